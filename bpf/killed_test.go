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

	"shaperd/leaky"
	"shaperd/shaper"
)

// TestBeatsWhileLocked prepares a change that takes long: whatever has the lock, what is
// attached knows of the daemon.
func TestBeatsWhileLocked(t *testing.T) {
	w := newWire(t, "bl")
	p := openPlane(t)
	a := Attachment{Name: "edge", Interfaces: []string{w.to.Attrs().Name}, Ingress: true, Mode: Police}
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
	within(t, 10*beatInterval, func() bool { return last() > prepared })
}

// TestPreparedIsNotInForce prepares another interface, and another hook: before Commit
// packets meet what they met before.
func TestPreparedIsNotInForce(t *testing.T) {
	one, other := newWire(t, "pa"), newWire(t, "pb")
	p := openPlane(t)
	a := Attachment{Name: "edge", Interfaces: []string{one.from.Attrs().Name}, Mode: Police, Hook: hooks(t)[0]}
	p.apply([]shaper.Limit{tenAnHour("edge")}, a)

	wide := a
	wide.Interfaces = append(wide.Interfaces, other.from.Attrs().Name)
	c := p.prepare(wide)
	other.want(p, 1, 20, 20)
	c.Cancel()

	moved := a
	moved.Hook = Clsact
	c = p.prepare(moved)
	one.want(p, 2, 20, 10)
	c.Cancel()

	c = p.prepare(wide)
	if err := c.Commit(); err != nil {
		t.Fatal(err)
	}
	other.want(p, 3, 20, 10)
}

func (p *testPlane) prepare(a Attachment) *Change {
	p.t.Helper()
	policy, err := p.shaper.Compile([]shaper.Limit{tenAnHour(a.Name)}, nil, []shaper.Attachment{{Name: a.Name}}, nil, false)
	if err != nil {
		p.t.Fatal(err)
	}
	c, err := p.Prepare([]Attachment{a}, nil, policy)
	if err != nil {
		p.t.Fatal(err)
	}
	return c
}

// TestKilledWhilePreparing has a daemon killed that has attached what it does not
// remember yet.
func TestKilledWhilePreparing(t *testing.T) {
	for _, hook := range hooks(t) {
		t.Run(hook.String(), func(t *testing.T) {
			w := newWire(t, "kp")
			p := openPlane(t)
			a := Attachment{Name: "edge", Interfaces: []string{w.to.Attrs().Name}, Ingress: true, Mode: Police, Hook: hook}
			c := p.prepare(a)
			p.stop()                     // its goroutines end with it
			for _, pt := range c.added { // as the kernel does
				pt.letGo()
			}
			p.kernel.close()
			p.occupied.Close()
			p.Plane = nil
			p.open()
			p.apply([]shaper.Limit{tenAnHour("edge")}, a)
			w.want(p, 1, 20, 10)
		})
	}
}

// TestKilledWhileDetaching has a daemon killed that remembers what it has detached.
func TestKilledWhileDetaching(t *testing.T) {
	for _, hook := range hooks(t) {
		t.Run(hook.String(), func(t *testing.T) {
			w := newWire(t, "kd")
			p := openPlane(t)
			a := Attachment{Name: "edge", Interfaces: []string{w.to.Attrs().Name}, Ingress: true, Mode: Police, Hook: hook, Keep: true}
			p.apply([]shaper.Limit{tenAnHour("edge")}, a)
			p.stop()
			for _, pt := range p.points {
				if err := pt.detach(); err != nil {
					t.Fatal(err)
				}
			}
			p.kernel.close()
			p.occupied.Close()
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

// TestKilledWhileSwapping has daemons killed one after the other between noting a swap
// and making it: none takes the table in force for free.
func TestKilledWhileSwapping(t *testing.T) {
	b := newTCP(t, Police, shaper.Limit{Name: "p", Packets: shaper.Frequency{N: 1000, Per: time.Second}})
	var id uint32
	if err := b.Policies.Lookup(uint32(0), &id); err != nil {
		t.Fatal(err)
	}
	inForce := b.registry.Tables[id]
	for i := range uint32(5) {
		tables, slot, err := b.kernel.freeSlot()
		if err != nil {
			t.Fatal(err)
		}
		if slot == inForce {
			t.Fatalf("after %d kills slot %d is in force and thought free", i, inForce)
		}
		tables[1_000_000+i] = slot
		b.registry.Tables = tables
		if err := b.save(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestOverlapAppears has an interface appear that two attachments match: one has it, and
// what appears after it is found as ever.
func TestOverlapAppears(t *testing.T) {
	w := newWire(t, "over")
	p := openPlane(t)
	p.apply([]shaper.Limit{tenAnHour("a")},
		Attachment{Name: "a", Interfaces: []string{"lap*"}, Mode: Police},
		Attachment{Name: "b", Interfaces: []string{"*p9", w.from.Attrs().Name}, Mode: Police})
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
		t.Error("nothing is said of the interface that both match")
	}
}

// TestElsewhere has a daemon, and "shaperd detach", in another network namespace find what is
// in this one, where the same numbers are other interfaces: it is refused, and works here. So is
// a second daemon while there is a first one.
func TestElsewhere(t *testing.T) {
	w := newWire(t, "else")
	p := openPlane(t)
	a := Attachment{Name: "edge", Interfaces: []string{"else1"}, Ingress: true, Mode: Police, Hook: Clsact, Keep: true}
	p.apply([]shaper.Limit{tenAnHour("edge")}, a)
	refused := func(where, text string, do func() error) {
		t.Helper()
		if err := do(); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v, want that there is %s", where, err, text)
		}
	}
	open := func() error {
		second, err := Open(shaper.New(1024), leaky.NewClock(), p.pins, p.keys, slog.New(slog.DiscardHandler))
		if err == nil {
			second.Release()
		}
		return err
	}
	refused("open twice", "another daemon", open)
	refused("detach what a daemon has", "another daemon", func() error { return Detach(p.pins) })
	if !Alive(p.pins) {
		t.Error("it is not alive")
	}
	w.want(p, 1, 20, 10)
	p.crash()
	p.Plane = nil
	if Alive(p.pins) {
		t.Error("it is alive after a crash")
	}
	if Pinned(filepath.Dir(p.pins)) || !Pinned(p.pins) {
		t.Error("the folder above is taken for that of the pins, or the latter not")
	}
	elsewhere := make(chan func() error)
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with its namespace
		err := unix.Unshare(unix.CLONE_NEWNET)
		for do := range elsewhere {
			done <- errors.Join(err, do())
		}
	}()
	for _, do := range []func() error{open, func() error { return Detach(p.pins) }} {
		refused("elsewhere", "another network namespace", func() error { elsewhere <- do; return <-done })
		refused("elsewhere", "shaperd detach --pins "+p.pins+`"`, func() error { elsewhere <- do; return <-done })
	}
	close(elsewhere)
	w.want(nil, 2, 20, 10)
	if err := Detach(p.pins); err != nil {
		t.Error(err)
	}
	w.want(nil, 1, 20, 20)
	assertNothing(t, w.to, p.pins)
}

// TestNamespaceIsGone has a daemon killed in a network namespace of its own. One in another
// namespace is refused as long as there is any of the former, and goes on when it is gone.
func TestNamespaceIsGone(t *testing.T) {
	const inside = "SHAPERD_TEST_GONE" // where the folder above that of the pins is
	limit, a := tenAnHour("edge"), Attachment{Name: "edge", Interfaces: []string{"gone1"}, Ingress: true, Mode: Police, Hook: XDP, Keep: true}
	limit.Connections = 5
	if above := os.Getenv(inside); above != "" {
		newWire(t, "gone")
		p := &testPlane{t: t, keys: 1024, pins: above + "/gone"}
		p.open()
		p.apply([]shaper.Limit{limit}, a)
		t.Log("ready")
		select {} // until it is killed
	}
	folder, err := os.Open(pins)
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestNamespaceIsGone$", "-test.v")
	cmd.Env = append(os.Environ(), inside+"=/proc/self/fd/3") // its TestMain mounts another one above this one
	cmd.ExtraFiles = []*os.File{folder}
	cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
	var out syncBuffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill := sync.OnceFunc(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	t.Cleanup(kill)
	for end := time.Now().Add(30 * time.Second); !strings.Contains(out.String(), "ready"); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it is not ready:\n%s", out.String())
		}
	}
	p := &testPlane{t: t, keys: 1024, pins: filepath.Join(pins, "gone")}
	open := func() error {
		second, err := Open(shaper.New(1024), leaky.NewClock(), p.pins, p.keys, slog.New(slog.DiscardHandler))
		if err == nil {
			second.Release()
		}
		return err
	}
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
		t.Error("what was pinned is still there, though nothing uses it")
	}
}
