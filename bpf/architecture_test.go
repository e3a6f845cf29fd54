package bpf

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestArchitectures builds for processors that the packet plane cannot run on, which is the
// first thing that is said and the only one; and begins to build for some that it can.
func TestArchitectures(t *testing.T) {
	for arch, fits := range map[string]bool{"s390x": false, "ppc64": false, "arm": false, "386": false, "arm64": true, "riscv64": true} {
		t.Run(arch, func(t *testing.T) {
			cmd := exec.Command("go", "build", "-n", ".")
			cmd.Env = append(os.Environ(), "GOARCH="+arch, "CGO_ENABLED=0")
			out, err := cmd.CombinedOutput()
			if fits {
				if err != nil {
					t.Errorf("%v: %s", err, out)
				}
				return
			}
			if said := strings.TrimSpace(string(out)); err == nil || strings.Contains(said, "\n") || !strings.Contains(said, "needs-a-64-bit-little-endian-processor") {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}
