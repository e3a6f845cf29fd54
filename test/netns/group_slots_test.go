package netns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	groupSlots    = 30 // connections in flight, of all gateways together
	slotsPort     = 5433
	slotClients   = 60                         // of each gateway, at most
	ownSlots      = groupSlots / 2 / groupSize // that a gateway always has
	mostSlots     = groupSlots - 2*ownSlots    // that one gateway can have
	fairSlots     = groupSlots / groupSize     // of each gateway, if all have load
	shortestVisit = 100 * time.Millisecond     // of a connection at the downstream
	slotsFollow   = 15 * time.Second           // from a change of the load to slots where it is; 0.3 s if the machine is not busy
)

// A slotsLoad keeps up connections through all gateways to a server that counts them, and ends them.
type slotsLoad struct {
	g     *group
	group sync.WaitGroup

	mu       sync.Mutex
	changed  sync.Cond
	clients  [groupSize]int                   // that connect through a gateway
	inFlight [groupSize]map[*net.TCPConn]bool // as the server sees it
	most     int                              // at one time, of all
	mostBy   [groupSize]int                   // of these, through each gateway, and when
	mostAt   time.Time
	served   int
	ended    bool
}

func (g *group) startSlots() *slotsLoad {
	l := &slotsLoad{g: g}
	l.changed.L = &l.mu
	for i := range l.inFlight {
		l.inFlight[i] = map[*net.TCPConn]bool{}
	}
	g.more = fmt.Sprintf(`[[listen]]
name = "slots"
address = ["tcp://0.0.0.0:%d"]
downstream = ["%v"]

[[limit]]
name = "slots"
match = { listen = ["slots"] }
max_connections = %d
max_queue = 10000
queue_timeout = "60s"
shared = true
`, slotsPort, groupDownstream, groupSlots)
	g.downstream.serveTCP(g.t, netip.AddrPortFrom(groupDownstream, slotsPort), l.serve)
	for i := range groupSize {
		for n := range slotClients {
			l.group.Go(func() { l.visitAll(i, n) })
		}
	}
	g.t.Cleanup(func() {
		l.mu.Lock()
		l.ended, l.clients = true, [groupSize]int{}
		l.changed.Broadcast()
		l.mu.Unlock()
		l.group.Wait()
	})
	return l
}

// serve counts a connection until it ends it. So a gateway cannot have another one instead before it is counted
// no more, unless it has reset this one.
func (l *slotsLoad) serve(c *net.TCPConn) {
	from := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	for i, gw := range l.g.gateways {
		if gw.addr == from {
			l.begin(i, c)
			defer l.end(i, c)
		}
	}
	_, _ = c.Write([]byte{1})
	_ = c.SetReadDeadline(time.Now().Add(shortestVisit + rand.N(2*shortestVisit)))
	_, _ = io.Copy(io.Discard, c) // its gateway may be killed
}

// begin counts c. If there are more than ever before, some may have been reset and not have been told: a client
// went away, and the gateway let the next one in.
func (l *slotsLoad) begin(i int, c *net.TCPConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inFlight[i][c] = true
	if l.countAll() > l.most {
		for _, all := range l.inFlight {
			maps.DeleteFunc(all, func(c *net.TCPConn, _ bool) bool { return isReset(c) })
		}
	}
	if sum := l.countAll(); sum > l.most {
		l.most, l.mostBy, l.mostAt = sum, l.counts(), time.Now()
	}
	l.served++
}

func (l *slotsLoad) end(i int, c *net.TCPConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.inFlight[i], c)
}

func (l *slotsLoad) counts() (n [groupSize]int) {
	for i, all := range l.inFlight {
		n[i] = len(all)
	}
	return n
}

func (l *slotsLoad) countAll() (sum int) {
	for _, n := range l.counts() {
		sum += n
	}
	return sum
}

// isReset reports whether the other end has reset c.
func isReset(c *net.TCPConn) (reset bool) {
	raw, err := c.SyscallConn()
	if err != nil {
		return true
	}
	err = raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		reset = err == nil && info.State == unix.BPF_TCP_CLOSE
	})
	return reset || err != nil
}

// visitAll makes one connection after the other, while the n-th client of gateway i has work.
func (l *slotsLoad) visitAll(i, n int) {
	for {
		l.mu.Lock()
		for l.clients[i] <= n && !l.ended {
			l.changed.Wait()
		}
		ended := l.ended
		l.mu.Unlock()
		if ended {
			return
		}
		if err := l.visit(i, n); err != nil {
			time.Sleep(20 * time.Millisecond) // its gateway is away
		}
	}
}

// visit makes a connection, and gives up if the client has no work before it is served.
func (l *slotsLoad) visit(i, n int) error {
	c, err := l.g.sources.Dial(context.Background(), groupSources[n%2], netip.AddrPortFrom(l.g.gateways[i].addr, slotsPort), time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	for hello := make([]byte, 1); ; {
		_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		_, err := c.Read(hello)
		if err == nil {
			break
		}
		if !isTimeout(err) {
			return err
		}
		l.mu.Lock()
		idle := l.clients[i] <= n
		l.mu.Unlock()
		if idle {
			return nil
		}
	}
	_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
	_, err = io.Copy(io.Discard, c)
	return err
}

func isTimeout(err error) bool {
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout()
}

func (l *slotsLoad) set(clients ...int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	copy(l.clients[:], clients)
	l.changed.Broadcast()
}

func (l *slotsLoad) now() [groupSize]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.counts()
}

// expect waits until at least so many are in flight through each gateway, and fails the test if that takes longer
// than within.
func (l *slotsLoad) expect(what string, within time.Duration, least ...int) {
	l.g.t.Helper()
	begin := time.Now()
	var n [groupSize]int
	for time.Since(begin) < within {
		n = l.now()
		if all := n[0] >= least[0] && n[1] >= least[1] && n[2] >= least[2]; all {
			l.g.t.Logf("%-45s %v in flight after %v", what, n, time.Since(begin).Round(time.Millisecond))
			return
		}
		time.Sleep(2 * time.Millisecond)
	}
	l.g.t.Errorf("%s: %v are in flight after %v, want %v at least", what, n, within, least)
}

// check fails the test if more were in flight than there may be, or hardly any were served, since it was last called.
func (l *slotsLoad) check(what string) {
	l.g.t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.most > groupSlots {
		l.g.t.Errorf("%s: %d connections were in flight, %v, at %v, more than %d", what, l.most, l.mostBy, l.mostAt.UTC(), groupSlots)
	}
	if l.served < 20 {
		l.g.t.Errorf("%s: only %d connections were served", what, l.served)
	}
	l.g.t.Logf("%-45s at most %d in flight, %d served", what, l.most, l.served)
	l.served = 0
	l.most = l.countAll()
}

// TestGroup_Slots has gateways that share a maximum of connections in flight. The downstream counts them.
func TestGroup_Slots(t *testing.T) {
	t.Parallel()
	g := newGroup(t)
	r := g.useRedis()
	l := g.startSlots()
	g.start(g.all()...)
	time.Sleep(4 * time.Second) // until the ledger knows what all use

	l.set(50, 0, 0)
	l.expect("all load at one gateway", slotsFollow, mostSlots*8/10, 0, 0)
	time.Sleep(time.Second)
	l.expect("and later", slotsFollow, mostSlots, 0, 0)
	l.set(50, 50, 50)
	l.expect("load at all", slotsFollow, fairSlots*8/10, fairSlots*8/10, fairSlots*8/10)
	time.Sleep(time.Second)
	l.check("load that moves")

	must(t, r.Signal(unix.SIGSTOP))
	time.Sleep(4 * time.Second)
	l.expect("redis stopped", slotsFollow, fairSlots*8/10, fairSlots*8/10, fairSlots*8/10)
	l.set(0, 50, 0)
	time.Sleep(time.Second)
	must(t, r.Signal(unix.SIGCONT))
	l.expect("redis goes on, all load at one gateway", slotsFollow, 0, mostSlots*8/10, 0)
	l.check("redis stopped")

	r.kill()
	l.set(50, 50, 0)
	time.Sleep(3 * time.Second)
	r.start()
	l.expect("redis is back, empty", slotsFollow, fairSlots, fairSlots, 0)
	l.set(50, 50, 50)
	l.expect("load at all", slotsFollow, fairSlots*8/10, fairSlots*8/10, fairSlots*8/10)
	l.check("redis killed, back empty")

	g.kill(g.gateways[1])
	time.Sleep(500 * time.Millisecond)
	l.set(50, 0, 50)
	time.Sleep(2 * time.Second)
	g.start(g.gateways[1])
	l.expect("a gateway killed, and started again", slotsFollow, fairSlots+2, 0, fairSlots+2)
	l.check("a gateway killed")
	l.set(50, 50, 50)
	l.expect("load at all", slotsFollow, fairSlots*8/10, fairSlots*8/10, fairSlots*8/10)

	l.set(50, 0, 0)
	g.drain(g.gateways[2])
	l.expect("a gateway has left", slotsFollow, mostSlots*8/10, 0, 0)
	g.start(g.gateways[2])
	l.set(50, 50, 50)
	l.expect("and is back", slotsFollow, fairSlots*8/10, fairSlots*8/10, fairSlots*8/10)
	l.check("a gateway left, and came back")
}

// TestLongGroupSlotsReload reloads gateways while connections are in flight.
func TestLongGroupSlotsReload(t *testing.T) {
	g := newGroup(t)
	g.useRedis()
	l := g.startSlots()
	g.start(g.all()...)
	time.Sleep(4 * time.Second) // until the ledger knows what all use
	fair := []int{fairSlots * 8 / 10, fairSlots * 8 / 10, fairSlots * 8 / 10}
	l.set(50, 50, 50)
	l.expect("load at all", slotsFollow, fair...)

	// Another member goes on with what is in flight.
	last := g.gateways[2]
	was := last.shared
	last.shared += "alone = \"closed\"\n"
	last.daemon.reload(g.text(last))
	time.Sleep(time.Second)
	l.expect("a gateway has another alone", slotsFollow, fair...)
	l.check("another alone")

	// It leaves the limit, and has it again when the others use all.
	last.shared = was
	g.more = strings.Replace(g.more, "shared = true", "shared = false", 1)
	l.set(50, 50, 0)
	l.expect("no load at the last", slotsFollow, fairSlots+1, fairSlots+1, 0)
	last.daemon.reload(g.text(last))
	time.Sleep(500 * time.Millisecond)
	g.more = strings.Replace(g.more, "shared = false", "shared = true", 1)
	last.daemon.reload(g.text(last))
	l.set(50, 50, 50)
	time.Sleep(time.Second)
	l.expect("load at all", slotsFollow, fair...)
	l.check("shared again")
}
