package bpf

import (
	"testing"

	"github.com/cilium/ebpf"
)

// TestVerified keeps the programs well below the million instructions that a
// verifier looks at before it gives up.
func TestVerified(t *testing.T) {
	b := newBench(t, kernelAttachment{Ethernet: 1, Keep: 1})
	for name, program := range map[string]*ebpf.Program{
		"shaperd_tc": b.ShaperdTc, "shaperd_xdp": b.ShaperdXdp, "shaperd_replies": b.ShaperdReplies,
	} {
		info, err := program.Info()
		if err != nil {
			t.Fatal(err)
		}
		n, _ := info.VerifiedInstructions()
		size, _ := info.TranslatedSize()
		t.Logf("%s: %d instructions verified, %d bytes", name, n, size)
		if n > 500_000 {
			t.Errorf("%s: %d instructions to verify", name, n)
		}
	}
}
