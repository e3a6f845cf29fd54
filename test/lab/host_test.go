package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newHost creates a host and removes it when the test ends.
func newHost(t testing.TB, role string) *Host {
	t.Helper()
	h, err := NewHost(role)
	must(t, err)
	t.Cleanup(h.Remove)
	return h
}

// namespaces lists the namespaces that this process created.
func namespaces(t testing.TB) []string {
	t.Helper()
	list, err := filepath.Glob(fmt.Sprintf("/run/netns/%s%d-*", prefix, os.Getpid()))
	must(t, err)
	return list
}

func descriptors(t testing.TB) int { return entries(t, "/proc/self/fd") }
func threads(t testing.TB) int     { return entries(t, "/proc/self/task") }

func entries(t testing.TB, dir string) int {
	t.Helper()
	list, err := os.ReadDir(dir)
	must(t, err)
	return len(list)
}

func ownNamespace(t testing.TB) string {
	t.Helper()
	ns, err := os.Readlink("/proc/thread-self/ns/net")
	must(t, err)
	return ns
}

func TestHost(t *testing.T) {
	h := newHost(t, "one")
	if got := namespaces(t); len(got) != 1 || filepath.Base(got[0]) != h.Name || !strings.HasSuffix(h.Name, "-one") {
		t.Errorf("namespaces %v, host %s", got, h.Name)
	}
	home := ownNamespace(t)
	var inside string
	failure := errors.New("failure")
	err := h.Do(func() error { inside = ownNamespace(t); return failure })
	if !errors.Is(err, failure) || inside == home {
		t.Errorf("Do ran in %s and returned %v", inside, err)
	}
	if ownNamespace(t) != home {
		t.Error("Do did not return to its own namespace")
	}
	must(t, h.Sysctl("net/ipv4/ip_default_ttl", "77"))
	out, err := h.Output("sh", "-c", "readlink /proc/self/ns/net; cd /proc/sys/net; cat ipv4/ip_default_ttl ipv6/conf/default/accept_dad")
	if want := inside + "\n77\n0\n"; err != nil || out != want {
		t.Errorf("a command wrote %q, %v, want %q", out, err, want)
	}
	if err := h.Run("sh", "-c", "echo out; echo err >&2; exit 3"); err == nil || !strings.HasSuffix(err.Error(), "exit status 3: out\nerr\n") {
		t.Errorf("a failing command: %v", err)
	}
	for what, err := range map[string]error{
		"interface": h.Up("nowhere"),
		"parameter": h.Sysctl("net/ipv4/nothing", "1"),
		"route":     h.AddDefaultRoute(a4),
		"command":   h.Run("/nowhere"),
	} {
		if err == nil || !strings.Contains(err.Error(), h.Name) {
			t.Errorf("unknown %s: %v", what, err)
		}
	}
}

// TestRoute dials through a forwarding host.
func TestRoute(t *testing.T) {
	a, b := pair(t)
	far := newHost(t, "far")
	via, at := netip.MustParseAddr("10.0.1.1"), netip.MustParseAddrPort("10.0.1.2:7")
	must(t, errors.Join(
		Join(b, "out", far, "in"),
		b.AddAddress("out", 24, via), far.AddAddress("in", 24, at.Addr()),
		a.AddDefaultRoute(b4), far.AddDefaultRoute(via), b.Sysctl("net/ipv4/ip_forward", "1")))
	l, err := far.Listen(at)
	must(t, err)
	defer l.Close()
	c, err := a.Dial(t.Context(), a4, at, 30*time.Second)
	must(t, err)
	c.Close()
}

// TestDial_HoldsNoThread checks that pending dials hold no thread and end with the context.
func TestDial_HoldsNoThread(t *testing.T) {
	a, b := pair(t)
	must(t, b.Apply(Cut{From: []netip.Addr{a4}})) // no answer, and no error for minutes
	silent := netip.AddrPortFrom(b4, 7)
	ctx, cancel := context.WithCancel(t.Context())
	before := threads(t)
	errs := make(chan error)
	for i := range 50 {
		go func() {
			_, err := a.Dial(ctx, a4, silent, 10*time.Minute)
			errs <- err
		}()
		// One after the other: until it has a socket, each has a thread.
		testutil.WaitFor(t, "a connection that waits for an answer", func() bool {
			var sockets []byte
			must(t, a.Do(func() (err error) { sockets, err = os.ReadFile("/proc/thread-self/net/tcp"); return err }))
			return strings.Count(string(sockets), ":0007 02 ") > i // TCP_SYN_SENT
		})
	}
	if more := threads(t) - before; more > 25 {
		t.Errorf("50 pending dials started %d threads", more)
	}
	cancel()
	for range 50 {
		if err := <-errs; !errors.Is(err, context.Canceled) {
			t.Errorf("a canceled dial returned %v", err)
		}
	}
	start := time.Now()
	_, err := a.Dial(t.Context(), a4, silent, 100*ms)
	if e := net.Error(nil); !errors.As(err, &e) || !e.Timeout() {
		t.Errorf("a dial with a timeout returned %v", err)
	}
	if took := time.Since(start); took < 100*ms || took > 30*time.Second {
		t.Errorf("a timeout of 100 ms expired after %v", took)
	}
}

// TestRemove checks that Remove kills the host's processes and leaks nothing.
func TestRemove(t *testing.T) {
	before := descriptors(t)
	h, err := NewHost("removed")
	must(t, err)
	cmd := exec.Command("sleep", "60")
	must(t, h.Start(cmd))
	if group, err := unix.Getpgid(cmd.Process.Pid); err != nil || group != cmd.Process.Pid {
		t.Errorf("the process is in group %d, %v", group, err)
	}
	h.Remove()
	late := time.AfterFunc(30*time.Second, func() { _ = cmd.Process.Signal(unix.SIGTERM) })
	defer late.Stop()
	_ = cmd.Wait()
	if status := cmd.ProcessState.Sys().(interface{ Signal() unix.Signal }); status.Signal() != unix.SIGKILL {
		t.Errorf("the process ended with %v, want SIGKILL", cmd.ProcessState)
	}
	if got := namespaces(t); len(got) != 0 {
		t.Errorf("namespaces left: %v", got)
	}
	if _, err := NewHost("no/such/folder"); err == nil {
		t.Error("NewHost accepted a role with a slash")
	}
	if after := descriptors(t); after > before { // those of earlier tests may be collected meanwhile
		t.Errorf("%d descriptors are open, %d before", after, before)
	}
	goleak.VerifyNone(t)
}

func TestOwner(t *testing.T) {
	for name, want := range map[string]int{
		"shaperd-123-4-client": 123,
		"shaperd-123-":         123,
		"shaperd-123":          0,
		"shaperd-x-1-client":   0,
		"shaperd--1-1-client":  0,
		"other-123-4-client":   0,
	} {
		if pid, ok := owner(name); ok != (want > 0) || ok && pid != want {
			t.Errorf("owner of %s is %d, %v", name, pid, ok)
		}
	}
}

// TestSweep checks that Sweep removes the leftovers of a dead process, and nothing else.
func TestSweep(t *testing.T) {
	gone := exec.Command("true")
	must(t, gone.Run())
	crashed := fmt.Sprintf("%s%d-", prefix, gone.Process.Pid)

	h := newHost(t, "left")
	namespace := filepath.Join("/run/netns", crashed+"1-left")
	must(t, os.WriteFile(namespace, nil, 0))
	must(t, unix.Mount(filepath.Join("/run/netns", h.Name), namespace, "", unix.MS_BIND, ""))
	unmounted := filepath.Join("/run/netns", crashed+"2-left")
	must(t, os.WriteFile(unmounted, nil, 0))

	// A file system for maps and programs, as tests mount it.
	folder := filepath.Join(os.TempDir(), crashed+"folder")
	must(t, os.Mkdir(folder, 0o700))
	must(t, unix.Mount("bpf", folder, "bpf", 0, ""))
	must(t, os.Mkdir(filepath.Join(folder, "pins"), 0o700))
	dir, err := TempDir()
	must(t, err)
	defer os.RemoveAll(dir)
	must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	left := []string{namespace, unmounted, folder}
	t.Cleanup(func() {
		for _, path := range left {
			_ = RemoveDir(path)
		}
	})

	must(t, Sweep())
	for _, path := range left {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s still exists: %v", path, err)
		}
	}
	for _, path := range []string{filepath.Join("/run/netns", h.Name), filepath.Join(dir, "file")} {
		if _, err := os.Lstat(path); err != nil {
			t.Error(err)
		}
	}
	must(t, h.Do(func() error { return nil }))
}
