package conn

import (
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// Queued datagrams of two listeners keep their order and their rates when these come to one loop, and their memory is accounted for.
func TestMerge_KeepsQueues(t *testing.T) {
	server, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	r := newLoopsRig(t, 2, shaper.UDP, server.LocalAddr().String())
	paced := func(name, listener string, per time.Duration) shaper.Limit {
		l := shaper.Limit{Name: name, Match: at(listener), Packets: shaper.Frequency{N: 1, Per: per}, MaxDelay: time.Hour}
		l.Match.Protocol = shaper.UDP
		return l
	}
	both := []string{"a", "b"}
	r.apply(both, paced("x", "a", 100*time.Second), paced("y", "b", 100*time.Second)) // until they are on one loop, all but the first of each wait
	r.wantGroups("[[a] [b]]")
	const n = 20
	for _, name := range both {
		c := udpFrom(t, "127.0.0.1", r.addr(name))
		for i := range n {
			fmt.Fprintf(c, "%s%02d", name, i)
		}
	}
	queued := func() (n int) {
		r.proxy.stopAll(func(leaky.Time) {
			for _, w := range r.proxy.workers {
				for _, f := range w.flows {
					for range f.queued.All() {
						n++
					}
				}
			}
		})
		return n
	}
	testutil.WaitFor(t, "two queues", func() bool { return queued() == 2*(n-1) })
	wide := shaper.Limit{Name: "wide", Match: at("a", "b"), Packets: shaper.Frequency{N: 1000, Per: time.Second}, MaxDelay: time.Hour}
	wide.Match.Protocol = shaper.UDP
	r.apply(both, paced("x", "a", 100*time.Second), paced("y", "b", 100*time.Second), wide)
	r.wantGroups("[[a b]]")
	r.proxy.stopAll(func(leaky.Time) {
		m, sum := &r.proxy.home.loop.memory, 0
		for _, h := range m.holders {
			own, last := 0, leaky.Time(0)
			for dg := range h.datagrams.All() {
				if own += dg.size(); dg.arrived < last || dg.holder != h {
					t.Error("the datagrams of a source are out of order, or of another one")
				}
				last = dg.arrived
			}
			if own != h.used {
				t.Errorf("a source has %d bytes, and %d are counted", own, h.used)
			}
			sum += own
		}
		if sum != m.used || sum == 0 {
			t.Errorf("%d bytes are queued, and %d are counted", sum, m.used)
		}
	})
	if left := queued(); left != 2*(n-1) {
		t.Errorf("%d of %d datagrams have left", 2*(n-1)-left, 2*(n-1))
	}
	begun := time.Now()
	r.apply(both, paced("x", "a", 20*time.Millisecond), paced("y", "b", 20*time.Millisecond), wide)
	next := map[string]int{}
	server.SetReadDeadline(time.Now().Add(testTimeout))
	b := make([]byte, 10)
	for range 2 * n {
		k, _, err := server.ReadFrom(b)
		if err != nil {
			t.Fatal(err)
		}
		name := string(b[:1])
		if got := string(b[1:k]); got != fmt.Sprintf("%02d", next[name]) {
			t.Errorf("%s: %s came, want %d", name, got, next[name])
		}
		next[name]++
	}
	if took := time.Since(begun); took < (n-2)*20*time.Millisecond {
		t.Errorf("they took %v, want 20 ms for each of a listener", took)
	}
	r.proxy.EndAll()
	r.settle()
}

// While listeners come to share a rate, part and come together with others, never more leaves than their limits let, and
// connections go on.
func TestMerge_KeepsRate(t *testing.T) {
	const rate = 2_000_000 // bytes/s
	var bytes atomic.Int64
	r := newLoopsRig(t, 3, shaper.TCP, testutil.ServeTCP(t, func(c *net.TCPConn) {
		b := make([]byte, 64<<10)
		for {
			n, err := c.Read(b)
			bytes.Add(int64(n))
			if err != nil {
				return
			}
		}
	}))
	var clients []*net.TCPConn
	var writers sync.WaitGroup
	stream := func(name string) {
		c := dial(t, r.addr(name))
		c.SetDeadline(time.Time{})
		clients = append(clients, c)
		writers.Go(func() {
			for {
				if _, err := c.Write(make([]byte, 32<<10)); err != nil {
					return
				}
			}
		})
	}
	// measure checks what leaves while the configuration stays, in intervals that are too short for a fresh burst to hide. The
	// server may read late what left before.
	measure := func(what string, rate int64) {
		t.Helper()
		begun := time.Now()
		arrived, before := bytes.Load(), forwarded(r.proxy)
		for range 4 {
			time.Sleep(60 * time.Millisecond)
			read := uint64(bytes.Load())
			all := forwarded(r.proxy)
			if read > all {
				t.Errorf("%s: the server has read %d bytes, of %d", what, read, all)
			}
			moved, took := float64(all-before), time.Since(begun)
			if due := float64(rate)*took.Seconds() + 96<<10; moved > due {
				t.Errorf("%s: %.0f bytes in %v, and %.0f may", what, moved, took, due)
			}
		}
		testutil.WaitFor(t, "bytes", func() bool { return bytes.Load() > arrived+rate/10 })
	}
	names := []string{"a"}
	limit := func(name string, listeners ...string) shaper.Limit {
		return shaper.Limit{Name: name, Match: at(listeners...), Rate: 8 * rate}
	}
	total := limit("total", "a")
	r.apply(names, total)
	stream("a")
	for i := range 6 {
		fresh := fmt.Sprint("n", i)
		names = append(names, fresh)
		own := limit("own "+fresh, fresh)
		r.apply(names, total, own)
		if n := len(r.proxy.workers); n != 2 {
			t.Fatalf("%d workers, want 2", n)
		}
		stream(fresh)
		stream(fresh)
		testutil.WaitFor(t, "the new connections", func() bool { return r.shaper.Listener(fresh).ToDownstream.Load() > 0 })
		time.Sleep(50 * time.Millisecond) // until the first segments of the new ones have left
		measure(fmt.Sprint(i, " apart"), 2*rate)
		total = limit("total", names...)
		r.apply(names, total)
		if n := len(r.proxy.workers); n != 1 {
			t.Fatalf("%d workers, want 1", n)
		}
		measure(fmt.Sprint(i, " together"), rate)
		checkApart(t, r.proxy)
	}
	for _, name := range names {
		if n := r.shaper.Listener(name).Open.Load(); n == 0 {
			t.Errorf("%s: its connections have ended", name)
		}
	}
	if v := r.shaper.Policy().State(0).Conformance.Violations.Load(); v > 0 {
		t.Errorf("%d violations", v)
	}
	for _, c := range clients {
		c.SetLinger(0)
		c.Close()
	}
	writers.Wait()
	r.settle()
}
