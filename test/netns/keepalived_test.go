package netns

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

const (
	vrrpRate = 1_000_000 // bytes a second
	vrrpPort = 5432
	vrrpMore = 4 // clients
)

var (
	vrrpAddress    = netip.MustParseAddr("10.9.3.1") // the virtual one
	vrrpDownstream = netip.MustParseAddr("10.9.0.5")
	vrrpClients    = netip.MustParseAddr("10.9.1.1")
)

// A vrrpGateway is one of a pair: shaperd, keepalived, and what stands for systemd.
type vrrpGateway struct {
	*host
	t          testing.TB
	addr       netip.Addr
	dir        string
	priority   int
	keepalived *lab.Process

	restarts atomic.Int64

	mu     sync.Mutex
	daemon *lab.Daemon
}

func vrrpConfig() string {
	return fmt.Sprintf(`[daemon]
metrics = %q
pin_path = %q

[[listen]]
name = "db"
address = "tcp://0.0.0.0:%d"
downstream = "%v:%d"

[[limit]]
name = "database"
rate = "%dB/s"
`, lab.MetricsAddr, unusedPinPath, vrrpPort, vrrpDownstream, vrrpPort, vrrpRate)
}

// startDaemon starts shaperd as the drop-in of the example does.
func (g *vrrpGateway) startDaemon() error {
	dropIn, err := os.ReadFile("../../configs/keepalived/shaperd-drain.conf")
	if err != nil {
		return err
	}
	_, timeout, ok := strings.Cut(strings.TrimSpace(string(dropIn)), "--drain-timeout ")
	if !ok {
		return errors.New("the drop-in has no --drain-timeout")
	}
	d, err := lab.StartDaemon(g.t.Context(), lab.DaemonOptions{Host: g.Host, Config: vrrpConfig(), Args: []string{"--drain-timeout", timeout}})
	if err != nil {
		return err
	}
	g.t.Cleanup((&daemon{d, g.t}).cleanUp)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.daemon = d
	return os.WriteFile(filepath.Join(g.dir, "control"), []byte(d.Control), 0o644)
}

func (g *vrrpGateway) current() *lab.Daemon {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.daemon
}

// followSystemctl does what systemd would when keepalived calls systemctl, until ctx ends.
func (g *vrrpGateway) followSystemctl(ctx context.Context) {
	for done := 0; ctx.Err() == nil; time.Sleep(5 * time.Millisecond) {
		text, _ := os.ReadFile(filepath.Join(g.dir, "calls"))
		calls := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")[done:]
		if len(text) == 0 || len(calls) == 0 {
			continue
		}
		for _, call := range calls {
			if call != "--no-block try-restart shaperd.service" {
				g.t.Errorf("systemctl %s", call)
			}
		}
		done += len(calls)
		d := g.current()
		if !d.Running() {
			continue
		}
		if err := errors.Join(d.Stop(patience), g.startDaemon()); err != nil {
			g.t.Error(err)
		}
		g.restarts.Add(1)
	}
}

// startKeepalived starts keepalived with the example, adapted to this host.
func (g *vrrpGateway) startKeepalived() {
	g.t.Helper()
	example, err := os.ReadFile("../../configs/keepalived/keepalived.conf")
	must(g.t, err)
	systemctl := filepath.Join(g.dir, "systemctl")
	must(g.t, os.WriteFile(systemctl, fmt.Appendf(nil, "#!/bin/sh\necho \"$@\" >>%s/calls\n", g.dir), 0o755))
	ready := filepath.Join(g.dir, "ready")
	must(g.t, os.WriteFile(ready, fmt.Appendf(nil, "#!/bin/sh\nexec %s --control $(cat %s/control) \"$@\"\n", daemonPath(g.t), g.dir), 0o755))
	text := string(example)
	for was, is := range map[string]string{
		"script_user shaperd": "script_user root", "/usr/bin/shaperd ": ready + " ", "interface eth0": "interface " + lab.StarLink,
		"priority 150": fmt.Sprint("priority ", g.priority), "192.0.2.10/24": vrrpAddress.String() + "/16", "/usr/bin/systemctl": systemctl,
	} {
		if !strings.Contains(text, was) {
			g.t.Fatalf("the example has no %q", was)
		}
		text = strings.ReplaceAll(text, was, is)
	}
	file := filepath.Join(g.dir, "keepalived.conf")
	must(g.t, os.WriteFile(file, []byte(text), 0o644))
	if out, err := g.Output("keepalived", "--config-test", "--use-file", file); err != nil || len(out) > 0 {
		g.t.Fatalf("the example is not valid: %v\n%s", err, out)
	}
	g.keepalived, err = lab.StartProcess(g.Start, exec.Command("keepalived", "--dont-fork", "--log-console", "--log-detail", "--vrrp", "--use-file", file,
		"--pid", filepath.Join(g.dir, "pid"), "--vrrp_pid", filepath.Join(g.dir, "vrrp.pid")))
	must(g.t, err)
	g.t.Cleanup(func() {
		g.keepalived.Kill()
		if g.t.Failed() {
			g.t.Logf("keepalived of %s wrote:\n%s", g.Name, &g.keepalived.Log)
		}
	})
}

// awaitMaster waits until the host has the virtual address.
func (g *vrrpGateway) awaitMaster() {
	g.t.Helper()
	waitFor(g.t, patience, func() error {
		out, err := g.Output("ip", "-4", "-o", "address", "show")
		if err == nil && !strings.Contains(out, vrrpAddress.String()+"/") {
			err = fmt.Errorf("%s has not %v", g.Name, vrrpAddress)
		}
		return err
	})
}

// TestKeepalived checks that two gateways with the example for keepalived together never let more pass
// than the rate and what one second of it lets pass, while the address moves from one to the other:
// when keepalived is stopped, and when shaperd is killed.
func TestKeepalived(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("keepalived"); err != nil {
		t.Fatalf("%v: scripts/install-deps installs it", err)
	}
	star, err := lab.NewStar(16)
	must(t, err)
	t.Cleanup(star.Remove)
	add := func(role string, addr netip.Addr) *host {
		h, err := star.Add(role, addr)
		must(t, err)
		return &host{h}
	}
	downstream, clients := add("downstream", vrrpDownstream), add("clients", vrrpClients)
	downstream.acceptTransfers(t, netip.AddrPortFrom(vrrpDownstream, vrrpPort))
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	var pair [2]*vrrpGateway
	for i := range pair {
		addr := netip.AddrFrom4([4]byte{10, 9, 0, byte(101 + i)})
		dir, err := lab.TempDir()
		must(t, err)
		t.Cleanup(func() { os.RemoveAll(dir) })
		g := &vrrpGateway{host: add(fmt.Sprint("gw", i+1), addr), t: t, addr: addr, dir: dir, priority: 150 - 50*i}
		// What a host has left when the address moves away would take it seconds.
		must(t, errors.Join(g.SetMaxSegments(lab.StarLink, 1), g.Sysctl("net/ipv4/tcp_rmem", "4096 4194304 4194304")))
		must(t, g.startDaemon())
		running.Go(func() { g.followSystemctl(ctx) })
		pair[i] = g
	}
	pair[0].startKeepalived()
	pair[0].awaitMaster()
	pair[1].startKeepalived()

	recorder := downstream.record(t, vrrpPort, 1<<17)
	for range vrrpMore {
		running.Go(func() { clients.flood(ctx, netip.AddrPortFrom(vrrpAddress, vrrpPort)) })
	}
	time.Sleep(time.Second)
	must(t, pair[0].keepalived.Signal(syscall.SIGTERM))
	pair[1].awaitMaster()
	must(t, pair[0].keepalived.AwaitExit(patience))
	waitFor(t, patience, func() error {
		if pair[0].restarts.Load() == 0 {
			return errors.New("shaperd was not restarted when the address had moved")
		}
		return nil
	})
	pair[0].startKeepalived()
	waitFor(t, patience, func() error {
		if !strings.Contains(pair[0].keepalived.Log.String(), "Entering BACKUP STATE") {
			return errors.New("it is no backup again")
		}
		return nil
	})
	time.Sleep(time.Second)
	pair[1].current().Kill()
	pair[0].awaitMaster()
	time.Sleep(1500 * time.Millisecond)

	passed := slices.DeleteFunc(recorder.next(vrrpPort), func(a lab.Arrival) bool { return a.To.Addr() != vrrpDownstream })
	excess := lab.Sigma(lab.Bytes(passed), vrrpRate)
	by := map[netip.Addr]int{}
	for _, a := range passed {
		by[a.From.Addr()] += a.Payload
	}
	t.Logf("%v; the largest excess is %.0f bytes, what passes in %.2f s", by, excess, excess/vrrpRate)
	if excess > vrrpRate {
		t.Errorf("the largest excess is %.0f bytes", excess)
	}
	for _, g := range pair {
		if n := by[g.addr]; n < vrrpRate/2 {
			t.Errorf("%d bytes passed %s", n, g.Name)
		}
	}
}

// flood connects to an address again and again, and sends as much as it can.
func (h *host) flood(ctx context.Context, to netip.AddrPort) {
	block := make([]byte, 64<<10)
	for ctx.Err() == nil {
		c, err := h.Dial(ctx, vrrpClients, to, time.Second)
		if err != nil {
			time.Sleep(20 * time.Millisecond)
			continue
		}
		stop := context.AfterFunc(ctx, func() { abort(c) })
		for err == nil {
			_, err = c.Write(block)
		}
		stop()
		abort(c)
	}
}
