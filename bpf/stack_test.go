package bpf

import (
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// Limits of the stack size and the depth of a call chain (MAX_BPF_STACK, MAX_CALL_FRAMES).
// Older kernels round each frame up to 32 bytes, newer ones to 16.
const stackLimit, stackUnit, frameLimit = 512, 32, 8

// stackOf returns the largest stack usage of a call chain of a program, the number of frames of
// the longest one, and a description.
func stackOf(p *ebpf.ProgramSpec) (deepest, frames int, path string) {
	sizes, calls := map[string]int{}, map[string]map[string]bool{}
	function := ""
	var copied asm.Register // the register that R10 was just copied to
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

// TestStackDepth checks the stack usage of the programs, as the oldest kernel computes it.
func TestStackDepth(t *testing.T) {
	spec, err := loadKernel()
	if err != nil {
		t.Fatal(err)
	}
	for name, p := range spec.Programs {
		deepest, frames, path := stackOf(p)
		t.Logf("%s: %d frames; %d bytes:%s", name, frames, deepest, path)
		if deepest > stackLimit {
			t.Errorf("%s needs %d bytes of stack, of at most %d", name, deepest, stackLimit)
		}
		if frames > frameLimit {
			t.Errorf("%s has a call chain of %d functions, of at most %d", name, frames, frameLimit)
		}
		if name != "shaperd_sweep" && (deepest < stackLimit/4 || frames < frameLimit/2) {
			t.Errorf("%s needs only %d bytes of stack in %d frames: this test counts too little", name, deepest, frames)
		}
	}
}
