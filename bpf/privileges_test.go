package bpf

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/bpf/internal/attach"
)

// TestCapabilities attaches a program with exactly the capabilities that the packet plane
// requires, and then with each of them missing.
func TestCapabilities(t *testing.T) {
	options, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	// Newer kernels then accept such programs without CAP_PERFMON.
	mitigationsOff := strings.Contains(string(options), "mitigations=off")
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for missing := -1; missing < len(requiredCaps); missing++ {
		name, have := "none missing", requiredCaps
		if missing >= 0 {
			name = "no " + requiredCaps[missing].name
			have = append(have[:missing:missing], have[missing+1:]...)
		}
		t.Run(name, func(t *testing.T) {
			var checkErr, attachErr error
			done := make(chan struct{})
			go func() {
				defer close(done)
				runtime.LockOSThread() // never unlocked: the thread ends with its capabilities
				var data [2]unix.CapUserData
				for _, c := range have {
					data[c.number/32].Effective |= 1 << (c.number % 32)
					data[c.number/32].Permitted |= 1 << (c.number % 32)
				}
				header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
				if attachErr = unix.Capset(&header, &data[0]); attachErr == nil {
					checkErr, attachErr = checkCapabilities(), attachOnce(lo)
				}
			}()
			<-done
			if missing < 0 {
				if checkErr != nil || attachErr != nil {
					t.Errorf("checkCapabilities: %v; attach: %v", checkErr, attachErr)
				}
				return
			}
			if want := "lacks " + requiredCaps[missing].name + ": "; checkErr == nil || !strings.Contains(checkErr.Error(), want) {
				t.Errorf("checkCapabilities: %v, want %q", checkErr, want)
			}
			if mitigationsOff && requiredCaps[missing].number == unix.CAP_PERFMON && attachErr == nil {
				return
			}
			if !errors.Is(attachErr, unix.EPERM) && !errors.Is(attachErr, unix.EACCES) {
				t.Errorf("attach: %v", attachErr)
			}
		})
	}
}

// attachOnce performs all steps that need privileges, and undoes them.
func attachOnce(l netlink.Link) error {
	k, err := openKernel(filepath.Join(pins, "privileges"), 64)
	if err != nil {
		return err
	}
	defer k.close()
	var tc struct {
		Limit *ebpf.Program `ebpf:"shaperd_tc"`
	}
	if err := k.load(kernelConfig{Ethernet: 1}, nil, &tc); err != nil {
		return err
	}
	defer tc.Limit.Close()
	h, err := attach.Attach(attach.Options{At: attach.Point{Ifindex: l.Attrs().Index}, Role: attach.Limiter, Program: tc.Limit, Pin: filepath.Join(pins, "privileges-link")})
	if err != nil {
		return err
	}
	return h.Detach()
}
