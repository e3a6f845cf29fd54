//go:build vmguest

package guest

import (
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

func TestProcessors(t *testing.T) {
	if n := runtime.NumCPU(); n < 2 {
		t.Errorf("%d processors, want at least 2", n)
	}
}

func TestMounts(t *testing.T) {
	for dir, magic := range map[string]int64{
		"/dev":           unix.TMPFS_MAGIC,
		"/proc":          unix.PROC_SUPER_MAGIC,
		"/sys":           unix.SYSFS_MAGIC,
		"/sys/fs/bpf":    unix.BPF_FS_MAGIC,
		"/sys/fs/cgroup": unix.CGROUP2_SUPER_MAGIC,
	} {
		var stat unix.Statfs_t
		if err := unix.Statfs(dir, &stat); err != nil {
			t.Errorf("%s: %v", dir, err)
		} else if stat.Type != magic {
			t.Errorf("%s has magic number %#x, want %#x", dir, stat.Type, magic)
		}
	}
}

func TestLoopback(t *testing.T) {
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0", "localhost:0"} {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Error(err)
			continue
		}
		c, err := net.DialTimeout("tcp", l.Addr().String(), time.Second)
		if err != nil {
			t.Error(err)
		} else {
			c.Close()
		}
		l.Close()
	}
}

// TestPin pins a map and loads it by its path.
func TestPin(t *testing.T) {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	must(t, "make map", err)
	defer m.Close()
	must(t, "update map", m.Put(uint32(0), uint64(42)))
	path := filepath.Join("/sys/fs/bpf", t.Name())
	must(t, "pin map", m.Pin(path))
	defer m.Unpin()
	pinned, err := ebpf.LoadPinnedMap(path, nil)
	must(t, "load pinned map", err)
	defer pinned.Close()
	var value uint64
	must(t, "look up", pinned.Lookup(uint32(0), &value))
	if value != 42 {
		t.Errorf("the pinned map contains %d, want 42", value)
	}
}

// TestBTF looks up sk_buff, which programs read, in the kernel's BTF.
func TestBTF(t *testing.T) {
	spec, err := btf.LoadKernelSpec()
	must(t, "load types", err)
	var skb *btf.Struct
	must(t, "find type", spec.TypeByName("sk_buff", &skb))
	if len(skb.Members) == 0 {
		t.Error("sk_buff has no members")
	}
}

func TestCongestionControl(t *testing.T) {
	for _, name := range []string{"bbr", "cubic", "reno"} {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		must(t, "open socket", err)
		if err := unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		unix.Close(fd)
	}
}

// TestClock_MatchesRTC compares the kernel's clock, which is derived from a processor
// counter, with the emulated real-time clock, which follows the host's.
func TestClock_MatchesRTC(t *testing.T) {
	rtc, err := os.Open("/dev/rtc0")
	must(t, "open clock", err)
	defer rtc.Close()
	const on, off = 0x7003, 0x7004 // RTC_UIE_ON, RTC_UIE_OFF: one interrupt a second
	must(t, "enable interrupts", unix.IoctlSetInt(int(rtc.Fd()), on, 0))
	defer unix.IoctlSetInt(int(rtc.Fd()), off, 0)
	const tries = 5 // on a busy host interrupts may be late
	var last time.Time
	for i := range tries + 1 {
		_, err := rtc.Read(make([]byte, 8))
		must(t, "wait for an interrupt", err)
		now := time.Now()
		if took := now.Sub(last); i > 0 {
			if (took - time.Second).Abs() < 50*time.Millisecond {
				return
			}
			t.Logf("a second of the host took %v", took)
		}
		last = now
	}
	t.Errorf("none of %d seconds had the right length", tries)
}

// TestClocksAgree reads the clock on each processor in turn.
func TestClocksAgree(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all unix.CPUSet
	must(t, "get affinity", unix.SchedGetaffinity(0, &all))
	defer unix.SchedSetaffinity(0, &all)
	var last time.Duration
	for i := range 200 {
		var one unix.CPUSet
		one.Set(i % runtime.NumCPU())
		must(t, "set affinity", unix.SchedSetaffinity(0, &one))
		var ts unix.Timespec
		must(t, "read clock", unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts))
		now := time.Duration(ts.Nano())
		if now < last {
			t.Fatalf("the clock went from %v back to %v", last, now)
		}
		last = now
	}
}
