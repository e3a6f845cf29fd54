package bpf

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestBuild_Architectures builds for architectures that the packet plane does not support, where that
// must be the only error, and starts to build for some that it supports.
func TestBuild_Architectures(t *testing.T) {
	for arch, supported := range map[string]bool{"s390x": false, "ppc64": false, "arm": true, "mipsle": false, "386": false, "arm64": true, "riscv64": true} {
		t.Run(arch, func(t *testing.T) {
			cmd := exec.Command("go", "build", "-n", ".")
			cmd.Env = append(os.Environ(), "GOARCH="+arch, "CGO_ENABLED=0")
			out, err := cmd.CombinedOutput()
			if supported {
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
