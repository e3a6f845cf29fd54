package netns

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"shaperd.dev/shaperd/test/lab"
)

const (
	groupSize = 3
	groupRate = 1_000_000 // bytes a second, of all gateways together, unless a test changes it
	groupPort = 5432      // for TCP and UDP
)

// The addresses in the network of a group.
var (
	groupDownstream = netip.MustParseAddr("10.9.0.5")
	groupSources    = addrs("10.9.1.1", "10.9.1.2", "10.9.1.3") // two for TCP, one for UDP
	groupStores     = []netip.Addr{netip.MustParseAddr("10.9.2.1"), netip.MustParseAddr("10.9.2.2")}
)

// A group is several daemons that share a limit, in front of one downstream. All hosts are in one
// network, but each frame that arrives at the downstream is of one gateway.
type group struct {
	t                   testing.TB
	star                *lab.Star
	sources, downstream *host
	gateways            [groupSize]*gateway
	rate                int    // bytes a second, of all gateways together
	more                string // of the configuration
	load                *groupLoad
	recorder            *recorder
	meter               *excessMeter
	stalls              stallReport // of the machine, in the last phase
	results             []outcome
}

// A gateway is a daemon of a group.
type gateway struct {
	*host
	name     string
	addr     netip.Addr
	state    string // path
	password string // path
	shared   string // lines of [shared], in addition to hosts
	pins     string // path; empty if it has a listener, else an attachment
	wrapper  []string
	stored   map[string]*os.File // listening sockets
	daemon   *daemon
	up       atomic.Bool
}

// newGroup creates the hosts of a group. Of the gateways, no daemon runs yet.
func newGroup(t testing.TB) *group {
	t.Helper()
	star, err := lab.NewStar(16)
	must(t, err)
	t.Cleanup(star.Remove)
	g := &group{t: t, star: star, rate: groupRate, meter: newExcessMeter(groupRate)}
	g.downstream = g.addHost("downstream", groupDownstream)
	g.sources = g.addHost("sources", groupSources[:]...)
	for i := range g.gateways {
		name, addr := fmt.Sprint("gw", i+1), netip.AddrFrom4([4]byte{10, 9, 0, byte(101 + i)})
		h := g.addHost(name, addr)
		// Segments within a super-packet would have no gaps. Little is buffered in front of the daemon.
		must(t, errors.Join(h.SetMaxSegments(lab.StarLink, 1), h.Sysctl("net/ipv4/tcp_rmem", "4096 8192 8192")))
		dir := t.TempDir()
		gw := &gateway{
			host: h, name: name, addr: addr, stored: map[string]*os.File{},
			state: filepath.Join(dir, "state"), password: filepath.Join(dir, "redis.pass"),
		}
		gw.setPassword(t, redisPassword)
		g.gateways[i] = gw
	}
	at := netip.AddrPortFrom(groupDownstream, groupPort)
	g.downstream.acceptTransfers(t, at)
	g.downstream.discardUDP(t, at)
	g.recorder = g.downstream.record(t, groupPort, 1<<16)
	g.load = g.startLoad()
	t.Cleanup(g.report)
	return g
}

func (g *group) addHost(role string, addrs ...netip.Addr) *host {
	g.t.Helper()
	h, err := g.star.Add(role, addrs...)
	must(g.t, err)
	return &host{h}
}

// groupAllowed returns the excess that is allowed of all gateways together, in bytes: for each a unit and the
// maximum catch-up, as docs/architecture.md states them. A unit is a grant of 4 ms of the rate. The
// catch-up is the time of two segments, which is more than 2 ms of groupRate.
func groupAllowed() float64 { return groupSize * (0.004*groupRate + 2*1448) }

// text returns the configuration of a gateway.
func (g *group) text(gw *gateway) string {
	if gw.pins != "" {
		return g.packetText(gw)
	}
	at := netip.AddrPortFrom(netip.IPv4Unspecified(), groupPort)
	return fmt.Sprintf(`[daemon]
observe = false
metrics = %q
pin_path = %q

[[listen]]
name = "door"
address = ["tcp://%v", "udp://%v"]
downstream = ["%v"]

[[limit]]
name = "total"
match = { listen = ["door"] }
rate = "%dB/s"
shared = true

%s
[shared]
hosts = %d
%s`, lab.MetricsAddr, unusedPinPath, at, at, groupDownstream, g.rate, g.more, groupSize, gw.shared)
}

// start starts the daemons of some gateways, which inherit the sockets of those before.
func (g *group) start(gateways ...*gateway) {
	g.t.Helper()
	for _, gw := range gateways {
		d, err := lab.StartDaemon(g.t.Context(), lab.DaemonOptions{
			Host: gw.Host, Config: g.text(gw), Wrapper: gw.wrapper, Stored: gw.stored,
			Args: []string{"--state", gw.state, "--drain-timeout", "10s"},
		})
		must(g.t, err)
		gw.daemon = &daemon{d, g.t}
		maps.Copy(gw.stored, d.Notify.Stored)
		g.t.Cleanup(gw.daemon.cleanUp)
		gw.up.Store(true)
	}
}

// setPassword writes the password at Redis.
func (gw *gateway) setPassword(t testing.TB, password string) {
	t.Helper()
	must(t, os.WriteFile(gw.password, []byte(password+"\n"), 0o600))
}

// kill kills the daemon.
func (g *group) kill(gw *gateway) {
	gw.up.Store(false)
	gw.daemon.Kill()
}

// drain ends the daemon in the ordinary way, and waits until it has ended.
func (g *group) drain(gw *gateway) {
	gw.up.Store(false)
	g.load.wake()
	gw.daemon.terminate()
	gw.daemon.waitExit(patience)
}

// all returns the gateways.
func (g *group) all() []*gateway { return g.gateways[:] }

// report logs a table of all phases.
func (g *group) report() {
	if len(g.results) == 0 {
		return
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\nR = %d B/s, allowed excess %.0f bytes (%.1f ms of R)\n", groupRate, groupAllowed(), 1000*groupAllowed()/groupRate)
	fmt.Fprintf(&b, "%-40s %6s %7s %8s %8s %6s %6s %9s %6s %8s\n", "phase", "time", "excess", "of R", "beyond", "use", "low", "recovered", "failed", "stall")
	for _, r := range g.results {
		fmt.Fprintln(&b, r)
	}
	g.t.Log(b.String())
}
