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
)

// TestPrivileges attaches a program with the capabilities that the packet plane says
// it needs, and no others, and then with each of them missing.
func TestPrivileges(t *testing.T) {
	options, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	// Newer kernels then trust programs without CAP_PERFMON.
	trusting := strings.Contains(string(options), "mitigations=off")
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for missing := -1; missing < len(needed); missing++ {
		name, have := "none missing", needed
		if missing >= 0 {
			name = "no " + needed[missing].name
			have = append(have[:missing:missing], have[missing+1:]...)
		}
		t.Run(name, func(t *testing.T) {
			var told, failed error
			done := make(chan struct{})
			go func() {
				defer close(done)
				runtime.LockOSThread() // and never unlocked: the thread ends with its capabilities
				var data [2]unix.CapUserData
				for _, c := range have {
					data[c.number/32].Effective |= 1 << (c.number % 32)
					data[c.number/32].Permitted |= 1 << (c.number % 32)
				}
				header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
				if failed = unix.Capset(&header, &data[0]); failed == nil {
					told, failed = mayOpen(), attachOnce(lo)
				}
			}()
			<-done
			if missing < 0 {
				if told != nil || failed != nil {
					t.Errorf("mayOpen: %v; attaching: %v", told, failed)
				}
				return
			}
			if want := "lacks " + needed[missing].name + ": "; told == nil || !strings.Contains(told.Error(), want) {
				t.Errorf("mayOpen: %v, want %q", told, want)
			}
			if trusting && needed[missing].number == unix.CAP_PERFMON && failed == nil {
				return
			}
			if !errors.Is(failed, unix.EPERM) && !errors.Is(failed, unix.EACCES) {
				t.Errorf("attaching: %v", failed)
			}
		})
	}
}

// attachOnce takes all steps that need privileges, and takes back what it made.
func attachOnce(l netlink.Link) error {
	k, err := openKernel(filepath.Join(pins, "privileges"), 64)
	if err != nil {
		return err
	}
	defer k.close()
	var tc struct {
		Limit *ebpf.Program `ebpf:"shaperd_tc"`
	}
	if err := k.load(kernelAttachment{Ethernet: 1}, nil, &tc); err != nil {
		return err
	}
	defer tc.Limit.Close()
	h, err := attach(Auto, side{ifindex: l.Attrs().Index}, limiting, tc.Limit, filepath.Join(pins, "privileges-link"))
	if err != nil {
		return err
	}
	return h.detach()
}
