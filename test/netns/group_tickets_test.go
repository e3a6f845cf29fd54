package netns

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

const (
	ticketsEvery   = 400 * time.Millisecond // from one connection of all gateways to the next
	ticketsPort    = 5434
	ticketsClients = 4 // of each gateway
)

// A ticketsLoad has clients connect through all gateways to a server that records when.
type ticketsLoad struct {
	g     *group
	group sync.WaitGroup

	recorder *recorder // of the connections

	mu    sync.Mutex
	busy  [groupSize]bool // its clients have work
	ended bool

	last  time.Duration // of the recorder
	level float64       // of a leaky bucket of all connections
}

func (g *group) startTickets() *ticketsLoad {
	l := &ticketsLoad{g: g, recorder: g.downstream.record(g.t, ticketsPort, 1<<12)}
	g.more = fmt.Sprintf(`[[listen]]
name = "tickets"
address = ["tcp://0.0.0.0:%d"]
downstream = ["%v"]

[[limit]]
name = "tickets"
match = { listen = ["tickets"] }
new_connections = "%d/min"
max_queue = 100
queue_timeout = "60s"
shared = true
`, ticketsPort, groupDownstream, time.Minute/ticketsEvery)
	g.downstream.serveTCP(g.t, netip.AddrPortFrom(groupDownstream, ticketsPort), func(*net.TCPConn) {})
	for i := range groupSize {
		for range ticketsClients {
			l.group.Go(func() { l.connectAll(i) })
		}
	}
	g.t.Cleanup(func() {
		l.mu.Lock()
		l.ended = true
		l.mu.Unlock()
		l.group.Wait()
	})
	return l
}

// count returns how many connections each gateway has opened since it was last called, and the highest level. The
// kernel has stamped them: this program may accept them late.
func (l *ticketsLoad) count() (by [groupSize]int, worst float64) {
	worst = l.level
	for _, a := range l.recorder.next(ticketsPort) {
		if a.Flags&(lab.SYN|lab.ACK) != lab.SYN {
			continue
		}
		l.level = max(0, l.level-float64(a.At-l.last)/float64(ticketsEvery)) + 1
		l.last, worst = a.At, max(worst, l.level)
		for i, gw := range l.g.gateways {
			if gw.addr == a.From.Addr() {
				by[i]++
			}
		}
	}
	return by, worst
}

// connectAll makes one connection after the other while gateway i has work.
func (l *ticketsLoad) connectAll(i int) {
	for {
		l.mu.Lock()
		busy, ended := l.busy[i], l.ended
		l.mu.Unlock()
		switch {
		case ended:
			return
		case !busy:
			time.Sleep(10 * time.Millisecond)
			continue
		}
		c, err := l.g.sources.Dial(context.Background(), groupSources[0], netip.AddrPortFrom(l.g.gateways[i].addr, ticketsPort), time.Second)
		if err != nil {
			time.Sleep(20 * time.Millisecond)
			continue
		}
		_ = c.SetReadDeadline(time.Now().Add(2 * time.Second))
		_, _ = io.Copy(io.Discard, c)
		_ = c.Close()
	}
}

// run has some gateways busy for d, and fails the test if more have passed than may, or fewer than least of that
// through all or leastEach through each that is busy.
func (l *ticketsLoad) run(what string, d time.Duration, least, leastEach float64, busy ...bool) {
	l.g.t.Helper()
	stalls := startStallWatch(l.g.t)
	l.mu.Lock()
	copy(l.busy[:], busy)
	l.mu.Unlock()
	time.Sleep(d)
	by, worst := l.count()
	report := stalls.stop()
	most := float64(d) / float64(ticketsEvery)
	// Nothing passes in a stall, and after a long one gateways may be alone for a moment.
	due := most * (1 - report.share(d))
	sum := 0
	for i, n := range by {
		sum += n
		if busy[i] && float64(n) < leastEach*due-1 {
			l.g.t.Errorf("%s: %d have passed gateway %d, of %.0f that all may; %v", what, n, i, most, report)
		}
	}
	l.g.t.Logf("%-45s %v of %.0f, at most %.1f more than the rate; %v", what, by, most, worst, report)
	if float64(sum) < least*due {
		l.g.t.Errorf("%s: %d have passed, of %.0f; %v", what, sum, most, report)
	}
	if worst > 1+groupSize+0.5 { // a bucket of the ledger, and one of each gateway that is alone
		l.g.t.Errorf("%s: %.1f more than the rate have passed", what, worst)
	}
}

// TestGroup_Tickets has gateways that share a rate of which the part of each is less than a connection in a lease.
func TestGroup_Tickets(t *testing.T) {
	t.Parallel()
	g := newGroup(t)
	r := g.useRedis()
	l := g.startTickets()
	g.start(g.all()...)
	l.run("start", 3*time.Second, 0, 0, true, true, true)
	l.run("load at all", 6*time.Second, 0.8, 0.2, true, true, true)
	l.run("load at one gateway", 3*time.Second, 0.7, 0, false, true, false)
	must(t, r.Signal(unix.SIGSTOP))
	l.run("redis stopped, gateways become alone", 4*time.Second, 0, 0, true, true, true)
	l.run("redis stopped", 4*time.Second, 0.6, 0.1, true, true, true)
	must(t, r.Signal(unix.SIGCONT))
	l.run("redis goes on", 3*time.Second, 0, 0, true, true, true)
}

// TestGroup_TicketLatency has a store that needs some time for a call. A connection that waits for nothing but its
// ticket has it after one round trip, or two if another call is on its way.
func TestGroup_TicketLatency(t *testing.T) {
	t.Parallel()
	const roundTrip, connections = 20 * time.Millisecond, 12
	retryOnStall(t, func() (stallReport, error) {
		stalls := startStallWatch(t)
		g := newGroup(t)
		r := g.useRedis()
		slow := netip.AddrPortFrom(r.at.Addr(), redisPort+1)
		d := r.host.delayCalls(t, slow, r.at)
		d.delay.Store(int64(roundTrip))
		g.setStore(fmt.Sprintf("redis://%v", slow))
		g.startTickets()
		g.start(g.all()...)
		g.dialTickets(1) // the bucket becomes hot
		time.Sleep(2 * time.Second)
		took := g.dialTickets(connections)
		report := stalls.stop()
		t.Logf("a connection takes %v (median), %v at most, with %v for a call", lab.Percentile(took, 50).Round(100*time.Microsecond), took[connections-1].Round(100*time.Microsecond), roundTrip)
		median, most := lab.Percentile(took, 50), 2*roundTrip-time.Millisecond+report.longest()
		if median > most || median < roundTrip/2 { // some find a ticket that was bought for another, or wait for an instant
			return report, fmt.Errorf("connections take %v: the median must be from %v to %v", took, roundTrip/2, most)
		}
		return report, nil
	})
}

// dialTickets makes connections to a gateway, fewer than all may, and returns how long each took until the server
// had it, sorted.
func (g *group) dialTickets(n int) (took []time.Duration) {
	g.t.Helper()
	for range n {
		time.Sleep(ticketsEvery + 137*time.Millisecond)
		start := time.Now()
		c, err := g.sources.Dial(g.t.Context(), groupSources[0], netip.AddrPortFrom(g.gateways[1].addr, ticketsPort), patience)
		must(g.t, err)
		_ = c.SetReadDeadline(start.Add(patience))
		_, err = io.Copy(io.Discard, c) // the server closes it
		must(g.t, err)
		took = append(took, time.Since(start))
		_ = c.Close()
	}
	slices.Sort(took)
	return took
}
