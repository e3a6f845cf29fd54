package bpf

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// TestHeartbeat_WhileLocked prepares a change and holds its lock: heartbeats continue.
func TestHeartbeat_WhileLocked(t *testing.T) {
	t.Parallel()
	w := newWire(t, "bl")
	p := openPlane(t)
	a := shaper.Attachment{Name: "edge", Interfaces: []string{w.to.Attrs().Name}, Direction: shaper.Ingress, Mode: shaper.AttachPolice}
	p.apply([]shaper.Limit{tenAnHour("edge")}, a)
	c := p.prepare(a)
	defer c.Cancel()
	last := func() (at uint64) {
		if err := p.kernel.Heartbeats.Lookup(uint32(0), &at); err != nil {
			t.Fatal(err)
		}
		return at
	}
	prepared := last()
	within(t, 10*heartbeatInterval, func() bool { return last() > prepared })
}

// TestPrepare_EnforcesNothing prepares another interface, and another hook: enforcement does not
// change before Commit.
func TestPrepare_EnforcesNothing(t *testing.T) {
	one, other := newWire(t, "pa"), newWire(t, "pb")
	p := openPlane(t)
	a := shaper.Attachment{Name: "edge", Interfaces: []string{one.from.Attrs().Name}, Mode: shaper.AttachPolice, Hook: hooks(t)[0]}
	p.apply([]shaper.Limit{tenAnHour("edge")}, a)

	wide := a
	wide.Interfaces = append(wide.Interfaces, other.from.Attrs().Name)
	c := p.prepare(wide)
	other.want(p, 1, 20, 20)
	c.Cancel()

	moved := a
	moved.Hook = shaper.HookClsact
	c = p.prepare(moved)
	one.want(p, 2, 20, 10)
	c.Cancel()

	c = p.prepare(wide)
	if err := c.Commit(); err != nil {
		t.Fatal(err)
	}
	other.want(p, 3, 20, 10)
}

func (p *testPlane) prepare(a shaper.Attachment) *Change {
	p.t.Helper()
	policy, err := p.shaper.Compile([]shaper.Limit{tenAnHour(a.Name)}, nil, []shaper.Attachment{{Name: a.Name}}, nil, false)
	if err != nil {
		p.t.Fatal(err)
	}
	c, err := p.Prepare([]shaper.Attachment{a}, nil, policy)
	if err != nil {
		p.t.Fatal(err)
	}
	return c
}

// TestPrepare_Killed kills a daemon that has attached programs before Commit
// records them.
func TestPrepare_Killed(t *testing.T) {
	for _, hook := range hooks(t) {
		t.Run(hook.String(), func(t *testing.T) {
			w := newWire(t, "kp")
			p := openPlane(t)
			a := shaper.Attachment{Name: "edge", Interfaces: []string{w.to.Attrs().Name}, Direction: shaper.Ingress, Mode: shaper.AttachPolice, Hook: hook}
			c := p.prepare(a)
			p.stopLoops()                // as its goroutines end with it
			for _, pt := range c.added { // as the kernel does when it ends
				pt.release()
			}
			p.kernel.close()
			p.pinLock.Close()
			p.Plane = nil
			p.open()
			p.apply([]shaper.Limit{tenAnHour("edge")}, a)
			w.want(p, 1, 20, 10)
		})
	}
}

// TestOpen_KilledBefore kills a daemon while it creates the maps: after some of them, after the last
// one, and before it writes the registry. The next daemon completes them, and so does Detach.
func TestOpen_KilledBefore(t *testing.T) {
	t.Parallel()
	all := len((&kernelMaps{}).byName())
	for _, created := range []int{0, 1, all / 2, all, all + 1} { // the registry is the last one
		for _, next := range []string{"open", "detach"} {
			t.Run(fmt.Sprintf("%d maps, %s", created, next), func(t *testing.T) {
				w := newWire(t, "kb")
				p := &testPlane{t: t, keys: 1024, pins: filepath.Join(pins, "killed-before")}
				k, err := openKernel(p.pins, p.keys)
				if err != nil {
					t.Fatal(err)
				}
				left := created
				for name := range k.byName() { // in random order, as they are created
					if left--; left < 0 {
						err = errors.Join(err, os.Remove(filepath.Join(pinDir(p.pins, p.keys), name)))
					}
				}
				if created > all {
					err = errors.Join(err, k.store.Put(uint32(0), make([]byte, registrySpec.ValueSize)))
				} else {
					err = errors.Join(err, k.store.Unpin())
				}
				k.close()
				if err != nil {
					t.Fatal(err)
				}
				if next == "open" {
					a := shaper.Attachment{Name: "edge", Interfaces: []string{w.to.Attrs().Name}, Direction: shaper.Ingress, Mode: shaper.AttachPolice, OnStop: shaper.StopKeep}
					p.open()
					p.apply([]shaper.Limit{tenAnHour("edge")}, a)
					w.want(p, 1, 20, 10)
					p.crash()
					w.want(p, 1, 20, 0)
					p.open()
					p.apply([]shaper.Limit{tenAnHour("edge")}, a)
					w.want(p, 1, 20, 0)
					p.crash()
				}
				if err := Detach(p.pins); err != nil {
					t.Error(err)
				}
				w.want(nil, 1, 20, 20)
				assertNoTrace(t, w.to, p.pins)
			})
		}
	}
}

// TestDetach_AfterKilledDetach kills a daemon after it has detached, before it updates the registry.
func TestDetach_AfterKilledDetach(t *testing.T) {
	for _, hook := range hooks(t) {
		t.Run(hook.String(), func(t *testing.T) {
			w := newWire(t, "kd")
			p := openPlane(t)
			a := shaper.Attachment{Name: "edge", Interfaces: []string{w.to.Attrs().Name}, Direction: shaper.Ingress, Mode: shaper.AttachPolice, Hook: hook, OnStop: shaper.StopKeep}
			p.apply([]shaper.Limit{tenAnHour("edge")}, a)
			p.stopLoops()
			for _, pt := range p.points {
				if err := pt.detach(); err != nil {
					t.Fatal(err)
				}
			}
			p.kernel.close()
			p.pinLock.Close()
			p.Plane = nil
			if err := Detach(p.pins); err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(p.pins); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("pins are left: %v", err)
			}
		})
	}
}

// TestSwap_Killed kills daemons one after the other between recording a swap and making it:
// none takes the current table for free.
func TestSwap_Killed(t *testing.T) {
	b := newTCP(t, shaper.AttachPolice, shaper.Limit{Name: "p", Packets: shaper.Frequency{N: 1000, Per: time.Second}})
	var id uint32
	if err := b.Policies.Lookup(uint32(0), &id); err != nil {
		t.Fatal(err)
	}
	current := b.registry.Tables[id]
	for i := range uint32(5) {
		tables, slot, err := b.kernel.freeSlot()
		if err != nil {
			t.Fatal(err)
		}
		if slot == current {
			t.Fatalf("after %d kills the current slot %d is taken for free", i, current)
		}
		tables[1_000_000+i] = slot
		b.registry.Tables = tables
		if err := b.save(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestPlane_OverlappingAttachments adds an interface that two attachments match: one of them has it,
// and later interfaces are still found.
func TestPlane_OverlappingAttachments(t *testing.T) {
	w := newWire(t, "over")
	p := openPlane(t)
	p.apply([]shaper.Limit{tenAnHour("a")},
		shaper.Attachment{Name: "a", Interfaces: []string{"lap*"}, Mode: shaper.AttachPolice},
		shaper.Attachment{Name: "b", Interfaces: []string{"*p9", w.from.Attrs().Name}, Mode: shaper.AttachPolice})
	for _, name := range []string{"lap9", "lap5"} {
		pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "peer" + name}
		if err := netlink.LinkAdd(pair); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = netlink.LinkDel(pair) })
		within(t, 15*time.Second, func() bool {
			s, err := p.Status()
			if err != nil {
				t.Fatal(err)
			}
			return slices.ContainsFunc(s.Points, func(pt PointStatus) bool { return pt.Interface == name && pt.Attachment == "a" && pt.Err == "" })
		})
	}
	if !strings.Contains(p.logged.String(), "are both at lap9") {
		t.Error("the overlap is not logged")
	}
}

// tryOpen opens a plane with the pins of p, and releases it.
func tryOpen(p *testPlane) error {
	second, err := Open(Options{Shaper: shaper.New(1024), Clock: pacer.NewClock(), PinPath: p.pins, Keys: p.keys, Log: slog.New(slog.DiscardHandler)})
	if err == nil {
		second.Release()
	}
	return err
}

// TestOpen_OtherNetworkNamespace opens and detaches pins of this network namespace from another one, where
// the same indexes mean other interfaces: that is refused there and works here. A second daemon is
// refused too.
func TestOpen_OtherNetworkNamespace(t *testing.T) {
	w := newWire(t, "else")
	p := openPlane(t)
	a := shaper.Attachment{Name: "edge", Interfaces: []string{"else1"}, Direction: shaper.Ingress, Mode: shaper.AttachPolice, Hook: shaper.HookClsact, OnStop: shaper.StopKeep}
	p.apply([]shaper.Limit{tenAnHour("edge")}, a)
	refused := func(where, text string, do func() error) {
		t.Helper()
		if err := do(); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v, want an error with %s", where, err, text)
		}
	}
	open := func() error { return tryOpen(p) }
	refused("open twice", "another daemon", open)
	refused("detach what a daemon has", "another daemon", func() error { return Detach(p.pins) })
	if !Alive(p.pins) {
		t.Error("not alive")
	}
	w.want(p, 1, 20, 10)
	p.crash()
	p.Plane = nil
	if Alive(p.pins) {
		t.Error("alive after a crash")
	}
	if Pinned(filepath.Dir(p.pins)) || !Pinned(p.pins) {
		t.Error("Pinned is wrong about the pin directory or its parent")
	}
	elsewhere := make(chan func() error)
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with its namespace
		err := unix.Unshare(unix.CLONE_NEWNET)
		for do := range elsewhere {
			done <- errors.Join(err, do())
		}
	}()
	for _, do := range []func() error{open, func() error { return Detach(p.pins) }} {
		refused("elsewhere", "another network namespace", func() error { elsewhere <- do; return <-done })
		refused("elsewhere", "shaperd detach --pin-path "+p.pins+`"`, func() error { elsewhere <- do; return <-done })
	}
	close(elsewhere)
	w.want(nil, 2, 20, 10)
	if err := Detach(p.pins); err != nil {
		t.Error(err)
	}
	w.want(nil, 1, 20, 20)
	assertNoTrace(t, w.to, p.pins)
}

// TestOpen_RemovedNetworkNamespace kills a daemon in a separate network namespace. A daemon in another
// namespace is refused while the former exists, and starts when it is gone.
func TestOpen_RemovedNetworkNamespace(t *testing.T) {
	const inside = "SHAPERD_TEST_GONE" // path of the parent of the pin directory
	limit, a := tenAnHour("edge"), shaper.Attachment{Name: "edge", Interfaces: []string{"gone1"}, Direction: shaper.Ingress, Mode: shaper.AttachPolice, Hook: shaper.HookXDP, OnStop: shaper.StopKeep}
	limit.MaxConnections = 5
	if above := os.Getenv(inside); above != "" {
		newWire(t, "gone")
		p := &testPlane{t: t, keys: 1024, pins: above + "/gone"}
		p.open()
		p.apply([]shaper.Limit{limit}, a)
		t.Log("ready")
		select {} // until it is killed
	}
	parent, err := os.Open(pins)
	if err != nil {
		t.Fatal(err)
	}
	defer parent.Close()
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestOpen_RemovedNetworkNamespace$", "-test.v")
	cmd.Env = append(os.Environ(), inside+"=/proc/self/fd/3") // its TestMain mounts another bpf file system over this one
	cmd.ExtraFiles = []*os.File{parent}
	cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
	var out testutil.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill := sync.OnceFunc(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	t.Cleanup(kill)
	out.WaitFor(t, "ready")
	p := &testPlane{t: t, keys: 1024, pins: filepath.Join(pins, "gone")}
	open := func() error { return tryOpen(p) }
	if err := open(); err == nil || !strings.Contains(err.Error(), "another daemon") {
		t.Errorf("while it runs: %v", err)
	}
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	kill()
	for what, do := range map[string]func() error{"open": open, "detach": func() error { return Detach(p.pins) }} {
		if err := do(); err == nil || !strings.Contains(err.Error(), "another network namespace") {
			t.Errorf("%s after it was killed: %v", what, err)
		}
	}
	namespace.Close()
	within(t, 20*time.Second, func() bool { return open() == nil })
	if Pinned(p.pins) {
		t.Error("pins are left, though unused")
	}
}
