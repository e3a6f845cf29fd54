package bpf

import (
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// What the functions of a program that call one another may take of the stack, and how many
// may (MAX_BPF_STACK, MAX_CALL_FRAMES). Older kernels round up what each takes, to 32 bytes;
// newer ones to 16.
const stackLimit, stackUnit, frameLimit = 512, 32, 8

// stackOf adds up what the functions of a program take, along the calls that take most, and
// counts them along the deepest.
func stackOf(p *ebpf.ProgramSpec) (deepest, frames int, path string) {
	sizes, calls := map[string]int{}, map[string]map[string]bool{}
	function := ""
	var copied asm.Register // R10 was put there just before
	for _, ins := range p.Instructions {
		if name := ins.Symbol(); name != "" {
			function = name
			sizes[function], calls[function] = 1, map[string]bool{}
		}
		depth := 0
		switch op := ins.OpCode; {
		case op.Class().IsLoad() && ins.Src == asm.R10, op.Class().IsStore() && ins.Dst == asm.R10:
			depth = -int(ins.Offset)
		case op.ALUOp() == asm.Add && op.Source() == asm.ImmSource && ins.Dst == copied && copied != asm.R10:
			depth = -int(ins.Constant)
		}
		sizes[function] = max(sizes[function], depth)
		copied = asm.R10
		if ins.OpCode.ALUOp() == asm.Mov && ins.OpCode.Source() == asm.RegSource && ins.Src == asm.R10 {
			copied = ins.Dst
		}
		if ins.IsFunctionCall() {
			calls[function][ins.Reference()] = true
		}
	}
	var walk func(string) (int, int, string)
	walk = func(name string) (most, frames int, path string) {
		for callee := range calls[name] {
			n, f, p := walk(callee)
			if n > most {
				most, path = n, p
			}
			frames = max(frames, f)
		}
		own := (sizes[name] + stackUnit - 1) / stackUnit * stackUnit
		return own + most, frames + 1, fmt.Sprint(" ", name, " ", own, path)
	}
	return walk(p.Instructions[0].Symbol())
}

// TestStack adds up what the programs take of the stack, as the oldest kernel does.
func TestStack(t *testing.T) {
	spec, err := loadKernel()
	if err != nil {
		t.Fatal(err)
	}
	for name, p := range spec.Programs {
		deepest, frames, path := stackOf(p)
		t.Logf("%s: %d frames; %d bytes:%s", name, frames, deepest, path)
		if deepest > stackLimit {
			t.Errorf("%s takes %d bytes of the stack, of %d there are", name, deepest, stackLimit)
		}
		if frames > frameLimit {
			t.Errorf("%s has %d functions call one another, of %d there may", name, frames, frameLimit)
		}
		if name != "shaperd_sweep" && (deepest < stackLimit/4 || frames < frameLimit/2) {
			t.Errorf("%s takes %d bytes of the stack in %d frames: this counts too little", name, deepest, frames)
		}
	}
}
