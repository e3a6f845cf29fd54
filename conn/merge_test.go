package conn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// at returns a match of listeners.
func at(names ...string) shaper.Match { return shaper.Match{Listen: names} }

// wantGroups checks which listeners are on one loop.
func (r *loopsRig) wantGroups(want string) {
	r.t.Helper()
	if got := r.groups(); got != want {
		r.t.Fatalf("loops have %s, want %s", got, want)
	}
}

// settle checks that nothing is left of connections that have ended.
func (r *loopsRig) settle() {
	r.t.Helper()
	left := ""
	for end := time.Now().Add(testTimeout); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		r.proxy.stopAll(func(leaky.Time) { left = whatIsLeft(r.proxy) })
		if left == "" && r.proxy.openConns.Load() == 0 {
			return
		}
	}
	r.t.Errorf("left behind: %s, %d open", left, r.proxy.openConns.Load())
}

// Those that wait at two listeners when these come to share slots are served in the order in which they came, and never are more in
// flight than may be.
func TestMerge_KeepsTurns(t *testing.T) {
	served := make(chan string, 100)
	var open, most atomic.Int64
	r := newLoopsRig(t, 2, shaper.TCP, testutil.ServeTCP(t, func(c *net.TCPConn) {
		b := make([]byte, 2)
		if _, err := io.ReadFull(c, b); err != nil {
			return
		}
		n := open.Add(1)
		defer open.Add(-1)
		most.Store(max(most.Load(), n))
		served <- string(b)
		io.Copy(io.Discard, c)
	}))
	slots := func(name string, n int, listeners ...string) shaper.Limit {
		return shaper.Limit{Name: name, Match: at(listeners...), MaxConnections: n, QueueTimeout: time.Minute, MaxQueue: 100}
	}
	r.apply([]string{"a", "b"}, slots("x", 1, "a"), slots("y", 1, "b"))
	r.wantGroups("[[a] [b]]")
	y := r.shaper.Policy().State(r.shaper.Policy().Find("y"))
	for range 20 { // at b many have waited before
		first, waits := dial(t, r.addr("b")), dial(t, r.addr("b"))
		testutil.WaitFor(t, "one that waits", func() bool { return y.Waiting.Load() == 1 })
		first.Close()
		waits.Close()
		testutil.WaitFor(t, "the end", func() bool { return r.proxy.openConns.Load() == 0 })
	}
	clients := map[string]*net.TCPConn{}
	arrive := func(i int) {
		name := []string{"a", "b"}[i%2]
		c := dialFrom(t, fmt.Sprintf("127.0.0.%d", 10+i), r.addr(name))
		fmt.Fprintf(c, "%02d", i)
		clients[fmt.Sprintf("%02d", i)] = c
		testutil.WaitFor(t, "its place", func() bool {
			n := 0
			r.proxy.Connections(func(*shaper.ConnectionStatus) { n++ })
			return n == i+1
		})
	}
	const n = 10
	for i := range n {
		arrive(i)
	}
	first := []string{<-served, <-served}
	slices.Sort(first)
	r.apply([]string{"a", "b"}, slots("z", 2, "a", "b"))
	r.wantGroups("[[a b]]")
	order := first
	for i := range n - 2 {
		select {
		case who := <-served:
			t.Fatalf("%s was served while two were in flight", who)
		case <-time.After(20 * time.Millisecond):
		}
		clients[order[i]].Close()
		select {
		case who := <-served:
			order = append(order, who)
		case <-time.After(testTimeout):
			t.Fatalf("nobody was served after %v", order)
		}
	}
	if !slices.IsSorted(order) || most.Load() > 2 {
		t.Errorf("served %v, %d at once", order, most.Load())
	}
	for _, c := range clients {
		c.Close()
	}
	r.settle()
}

// Connections that are in flight when their listeners come to share slots count there.
func TestMerge_KeepsSlots(t *testing.T) {
	var open atomic.Int64
	r := newLoopsRig(t, 2, shaper.TCP, testutil.ServeTCP(t, func(c *net.TCPConn) {
		open.Add(1)
		defer open.Add(-1)
		io.Copy(io.Discard, c)
	}))
	both := []string{"a", "b"}
	r.apply(both)
	r.wantGroups("[[a] [b]]")
	var clients []*net.TCPConn
	for i := range 6 {
		clients = append(clients, dial(t, r.addr(both[i%2])))
	}
	testutil.WaitFor(t, "six connections", func() bool { return open.Load() == 6 })
	r.apply(both, shaper.Limit{Name: "z", Match: atAB, MaxConnections: 4, QueueTimeout: time.Minute, MaxQueue: 100})
	r.wantGroups("[[a b]]")
	state := r.shaper.Policy().State(0)
	if n := state.InFlight.Load(); n != 6 {
		t.Errorf("%d in flight, want 6", n)
	}
	clients = append(clients, dial(t, r.addr("a")), dial(t, r.addr("b")))
	testutil.WaitFor(t, "two that wait", func() bool { return state.Waiting.Load() == 2 })
	for i, want := range []int64{5, 4, 4, 4} { // then those that wait
		clients[i].Close()
		testutil.WaitFor(t, fmt.Sprint(want, " connections"), func() bool { return open.Load() == want && state.InFlight.Load() == want })
	}
	for _, c := range clients {
		c.Close()
	}
	r.settle()
}

// Connections that transfer, some of them by splice, lose nothing when they come to another loop, and each is in a listing once.
func TestMerge_KeepsConnections(t *testing.T) {
	r := newLoopsRig(t, 6, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	names := []string{"a", "b", "c", "d", "e", "f"}
	paced := shaper.Limit{Name: "paced", Key: shaper.KeyConnection, Match: at("a", "b", "c"), Rate: 80e6, Direction: shaper.Both}
	r.apply(names, paced)
	r.wantGroups("[[a] [b] [c] [d] [e] [f]]")
	var idle []*net.TCPConn
	for i := range 600 { // more than a batch of a listing
		idle = append(idle, dial(t, r.addr(names[i%len(names)])))
	}
	testutil.WaitFor(t, "the connections", func() bool { return r.proxy.openConns.Load() == 600 })
	var known sync.Map
	r.proxy.Connections(func(c *shaper.ConnectionStatus) { known.Store(c.ID, true) })
	var echoes, listings sync.WaitGroup
	var done atomic.Bool
	for i := range 12 {
		echoes.Go(func() {
			sent := randomBytes(3 << 20)
			c := dial(t, r.addr(names[i%len(names)]))
			c.SetDeadline(time.Now().Add(3 * testTimeout))
			go func() {
				c.Write(sent)
				c.CloseWrite()
			}()
			got, err := io.ReadAll(c)
			if err != nil || !slices.Equal(got, sent) {
				t.Errorf("%s: got %d of %d bytes back, equal %v, err %v", names[i%len(names)], len(got), len(sent), slices.Equal(got, sent), err)
			}
		})
	}
	var listed atomic.Int64
	listings.Go(func() {
		for !done.Load() {
			times := map[uint64]int{}
			r.proxy.Connections(func(c *shaper.ConnectionStatus) { times[c.ID]++ })
			known.Range(func(id, _ any) bool {
				if n := times[id.(uint64)]; n != 1 {
					t.Errorf("a connection is listed %d times", n)
				}
				return true
			})
			listed.Add(1)
		}
	})
	for n := 2; n <= len(names); n++ {
		before := listed.Load()
		testutil.WaitFor(t, "a listing", func() bool { return listed.Load() > before })
		r.apply(names, paced, shaper.Limit{Name: "slots", Match: at(names[:n]...), MaxConnections: 10000})
		checkApart(t, r.proxy)
	}
	r.wantGroups("[[a b c d e f]]")
	done.Store(true)
	listings.Wait()
	echoes.Wait()
	for _, c := range idle {
		c.Close()
	}
	r.settle()
}

// A connection of a listener that is gone holds what it had of limits: a listener that comes to these later, or again, is on its loop.
func TestMerge_FollowsConnectionsOfRemovedListeners(t *testing.T) {
	for name, c := range map[string]struct {
		listens []string
		limits  []shaper.Limit
		want    string
	}{
		"its limit is another's":            {[]string{"a", "c"}, []shaper.Limit{{Name: "x", Match: at("c"), Rate: 8e6}}, "[[a] [c]]"},
		"it comes again":                    {[]string{"a", "b"}, []shaper.Limit{{Name: "x", Match: at("b"), Rate: 8e6}}, "[[a] [b]]"},
		"its limit is another's, and first": {[]string{"c", "a"}, []shaper.Limit{{Name: "x", Match: at("a"), Rate: 8e6}}, "[[a] [c]]"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newLoopsRig(t, 3, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
			r.apply([]string{"a", "b"}, shaper.Limit{Name: "x", Match: at("b"), Rate: 8e6})
			r.wantGroups("[[a] [b]]")
			b := dial(t, r.addr("b"))
			b.Write([]byte{1})
			io.ReadFull(b, make([]byte, 1))
			at := r.proxy.listeners["b"].proxy
			r.apply([]string{"a"})
			r.apply(c.listens, c.limits...)
			if strings.Contains(name, "first") {
				if r.proxy.listeners["a"].proxy.sessions.all == nil {
					t.Error("the connection is not on the loop of the listener with its limit")
				}
			} else if got := r.proxy.listeners[c.listens[1]].proxy; got != at {
				t.Errorf("%s is not on the loop that the connection has", c.listens[1])
			}
			checkApart(t, r.proxy)
			b.Close()
			r.settle()
		})
	}
}

// A loop that is silent is noticed, whichever it is.
func TestAlive_OneOfSeveralLoops(t *testing.T) {
	r := newLoopsRig(t, 3, shaper.TCP, "127.0.0.1:9")
	r.apply([]string{"a", "b", "c"})
	alive := func(within time.Duration) bool {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		return r.proxy.Alive(ctx)
	}
	for i, w := range r.proxy.workers {
		hang := make(chan struct{})
		w.loop.post(func(leaky.Time) { <-hang })
		if alive(50 * time.Millisecond) {
			t.Errorf("loop %d hangs, and is alive", i)
		}
		close(hang)
		if !alive(testTimeout) {
			t.Errorf("loop %d is not alive", i)
		}
	}
	hang, reloaded := make(chan struct{}), make(chan struct{})
	r.proxy.workers[1].loop.post(func(leaky.Time) { <-hang })
	go func() { // as a reload does
		r.proxy.stopAll(func(leaky.Time) {})
		close(reloaded)
	}()
	testutil.WaitFor(t, "the reload", func() bool {
		free := r.proxy.moving.TryRLock()
		if free {
			r.proxy.moving.RUnlock()
		}
		return !free
	})
	answered := make(chan bool, 1)
	go func() { answered <- alive(50 * time.Millisecond) }()
	select {
	case yes := <-answered:
		if yes {
			t.Error("a loop hangs, for which a reload waits, and is alive")
		}
	case <-time.After(testTimeout):
		t.Error("no answer while a reload waits for a loop that hangs")
	}
	close(hang)
	<-reloaded
}

// What a loop has yet to do, and what it does at a time, is done by the one that takes its place.
func TestMerge_MovesWork(t *testing.T) {
	r := newLoopsRig(t, 2, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	r.apply([]string{"a", "b"})
	from, into := r.proxy.listeners["b"].proxy, r.proxy.home
	lasting := r.listener("b")
	lasting.MaxLifetime = time.Hour
	policy, err := r.shaper.CompileRules(shaper.Rules{Listeners: []shaper.Listener{r.listener("a"), lasting}})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.proxy.Apply(t.Context(), []shaper.Listener{r.listener("a"), lasting}, policy, nil); err != nil {
		t.Fatal(err)
	}
	ends := dial(t, r.addr("b"))
	testutil.WaitFor(t, "the connection", func() bool { return r.shaper.Listener("b").Open.Load() == 1 })
	ran, fired := make(chan *loop, 1), make(chan *loop, 1)
	var timer pacer.Event
	timer.Fire = func(leaky.Time) { fired <- from.loop }
	ended := from.loop
	admitted := make(owned, 1)
	q := &queue{pacing: pacing{shape: &leaky.Shape{}}}
	r.proxy.stopAll(func(now leaky.Time) {
		from.admission.outcomes = append(from.admission.outcomes, outcome{waiter: &waiter{owner: admitted}})
		from.loop.scheduler.markRunnable(q)
		from.loop.runLater(func(leaky.Time) { ran <- from.loop })
		from.loop.pacer.Schedule(&timer, now+leaky.Second/20)
		for _, s := range from.sessions.all {
			soon := *s.config.Load()
			soon.MaxLifetime = now.Sub(s.activity.start).Duration() + 200*time.Millisecond
			s.config.Store(&soon)
			s.armTimeouts(now)
		}
		merge{from, into}.run(now)
		r.proxy.workers = r.proxy.workers[:1]
	})
	ended.stop()
	addProcessors(-1)
	into.loop.call(into.admission.run)
	select {
	case <-admitted:
	default:
		t.Error("a connection that was admitted is not told")
	}
	testutil.WaitFor(t, "a queue to be served", func() (served bool) {
		into.loop.call(func(leaky.Time) { served = !q.pending })
		return served
	})
	for what, c := range map[string]chan *loop{"work": ran, "a timer": fired} {
		select {
		case at := <-c:
			if at != into.loop {
				t.Errorf("%s is of a loop that has ended", what)
			}
		case <-time.After(testTimeout):
			t.Errorf("%s is lost", what)
		}
	}
	ends.SetReadDeadline(time.Now().Add(testTimeout))
	if n, err := ends.Read(make([]byte, 1)); err == nil || n > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("max_lifetime has no effect: read %d, %v", n, err)
	}
	dial(t, r.addr("b")).Close()
	r.settle()
}

// owned is the owner of a waiter that is told when that is admitted.
type owned chan struct{}

func (o owned) pool() *gate                 { return nil }
func (o owned) assignDownstream(leaky.Time) {}
func (o owned) admitted(leaky.Time)         { o <- struct{}{} }
func (o owned) refused(refusal, leaky.Time) {}

// Connections of one source that wait at two gates, of loops that come together, go on waiting each for its own; and those that wait for
// a rate are let in at the rate.
func TestMerge_KeepsGates(t *testing.T) {
	var open [3]atomic.Int64
	r := newLoopsRig(t, 3, shaper.TCP, testutil.ServeTCP(t, func(c *net.TCPConn) {
		b := make([]byte, 1)
		if _, err := c.Read(b); err != nil {
			return
		}
		open[b[0]-'a'].Add(1)
		io.Copy(io.Discard, c)
		open[b[0]-'a'].Add(-1)
	}))
	names := []string{"a", "b", "c"}
	each := 100 * time.Second // until they are on one loop, all but the first wait for the rate
	limits := func(more ...shaper.Limit) []shaper.Limit {
		one := shaper.Limit{MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 100}
		x, y := one, one
		x.Name, x.Match = "x", at("a")
		y.Name, y.Match = "y", at("b")
		z := shaper.Limit{Name: "z", Match: at("c"), NewConnections: shaper.Frequency{N: 1, Per: each}, QueueTimeout: time.Hour, MaxQueue: 100}
		return append([]shaper.Limit{x, y, z}, more...)
	}
	r.apply(names, limits()...)
	r.wantGroups("[[a] [b] [c]]")
	clients := map[string][]*net.TCPConn{}
	arrive := func(name string) {
		c := dial(t, r.addr(name))
		c.Write([]byte(name))
		clients[name] = append(clients[name], c)
	}
	waiting := func(limit string) int64 {
		return r.shaper.Policy().State(r.shaper.Policy().Find(limit)).Waiting.Load()
	}
	for range 2 {
		arrive("a")
		arrive("b")
	}
	testutil.WaitFor(t, "two that wait", func() bool { return waiting("x") == 1 && waiting("y") == 1 })
	const paced = 20
	for range paced {
		arrive("c")
	}
	testutil.WaitFor(t, "those that wait for the rate", func() bool { return waiting("z") == paced-1 })
	all := shaper.Limit{Name: "all", MaxConnections: 1000}
	r.apply(names, limits(all)...)
	r.wantGroups("[[a b c]]")
	if n := waiting("z"); n != paced-1 {
		t.Errorf("%d wait at c, want %d", n, paced-1)
	}
	begun := time.Now()
	each = 50 * time.Millisecond
	r.apply(names, limits(all)...)
	clients["b"][0].Close()
	testutil.WaitFor(t, "the one that waits at b", func() bool { return waiting("y") == 0 && open[1].Load() == 1 })
	if n := waiting("x"); n != 1 {
		t.Errorf("%d wait at a, want 1", n)
	}
	clients["a"][0].Close()
	testutil.WaitFor(t, "the one that waits at a", func() bool { return waiting("x") == 0 && open[0].Load() == 1 })
	testutil.WaitFor(t, "those that waited for the rate", func() bool { return open[2].Load() == paced })
	if took := time.Since(begun); took < (paced-3)*each {
		t.Errorf("%d were let in within %v", paced-1, took)
	}
	for _, list := range clients {
		for _, c := range list {
			c.Close()
		}
	}
	r.settle()
}
