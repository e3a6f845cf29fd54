package conn

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// waitsInTurn waits until so many wait for slots of the first limit.
func (r *proxyRig) waitsInTurn(n int64) {
	r.t.Helper()
	testutil.WaitFor(r.t, "clients to wait", func() bool { return r.shaper.Policy().State(0).Waiting.Load() == n })
}

// A question that comes before the header for the downstream has left is not forgotten.
func TestTurnSlot_HeaderThenQuestion(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, server(t, func(c *net.TCPConn) {
		for b := make([]byte, 1); ; {
			if _, err := c.Read(b); err != nil {
				return
			}
			if b[0] == 'q' {
				c.Write(b)
			}
		}
	}))
	r.listen.SendProxy = 1
	r.apply(turnLimit(10, time.Millisecond), shaper.Limit{Name: "rate", Match: shaper.Match{Protocol: shaper.TCP}, Rate: 800_000, Direction: shaper.ToDownstream})
	var all []*net.TCPConn
	for range 50 {
		c := dial(t, r.addr())
		c.Write([]byte("q"))
		all = append(all, c)
	}
	for i, c := range all {
		if !readByte(c) {
			t.Fatalf("question %d is not sent: in turn %d, waiting %d", i, r.inTurn(), r.shaper.Policy().State(0).Waiting.Load())
		}
	}
}

// Nor is one that waits while the downstream closes, and another is tried.
func TestTurnSlot_DownstreamClosesMeanwhile(t *testing.T) {
	t.Parallel()
	var conns atomic.Int32
	r := start(t, shaper.TCP, server(t, func(c *net.TCPConn) {
		if conns.Add(1) == 2 {
			time.Sleep(300 * time.Millisecond)
			return // without a word
		}
		for b := make([]byte, 1); ; {
			if _, err := c.Read(b); err != nil {
				return
			}
			if b[0] == 'q' {
				c.Write(b)
			}
		}
	}))
	r.listen.SendProxy, r.listen.RetryUnanswered = 1, true
	r.apply(turnLimit(1, time.Millisecond))
	holder := dial(t, r.addr())
	holder.Write([]byte("n"))
	testutil.WaitFor(t, "the slot to be taken", func() bool { return r.inTurn() == 1 })
	c := dial(t, r.addr())
	c.Write([]byte("q"))
	testutil.WaitFor(t, "another connection to the downstream", func() bool { return conns.Load() == 3 })
	holder.Close()
	if !readByte(c) {
		t.Errorf("no answer although all slots are free: in turn %d", r.inTurn())
	}
}

// A client that sends more than the downstream reads does not keep its slot while others wait.
func TestTurnSlot_Flood(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, server(t, func(c *net.TCPConn) {
		for b := make([]byte, 16<<10); ; {
			n, err := c.Read(b)
			if err != nil {
				return
			}
			time.Sleep(time.Millisecond)
			c.Write(b[:n/1000+1])
		}
	}), turnLimit(1, time.Millisecond))
	hog := dial(t, r.addr())
	go io.Copy(io.Discard, hog)
	go func() {
		for b := make([]byte, 32<<10); ; {
			if _, err := hog.Write(b); err != nil {
				return
			}
		}
	}()
	testutil.WaitFor(t, "the slot to be taken", func() bool { return r.inTurn() == 1 })
	if c := dial(t, r.addr()); !asks(c, testTimeout) {
		t.Error("no answer")
	}
}

// An answer that comes in pieces keeps its slot to the end, also when others wait.
func TestTurnSlot_LongAnswers(t *testing.T) {
	t.Parallel()
	const gap, pieces = time.Second, 220
	var inside, most atomic.Int64
	var answering drip
	r := start(t, shaper.TCP, server(t, func(c *net.TCPConn) {
		for b := make([]byte, 1); ; {
			if _, err := c.Read(b); err != nil {
				return
			}
			most.Store(max(most.Load(), inside.Add(1)))
			if b[0] == 'l' {
				for range pieces - 1 {
					c.Write(b)
					answering.next()
					time.Sleep(gap / 20)
				}
			}
			inside.Add(-1)
			if c.Write(b); b[0] == 'l' {
				answering.end()
			}
		}
	}), turnLimit(1, gap))
	stalled := r.watchLoop()
	a, b := dial(t, r.addr()), dial(t, r.addr())
	a.Write([]byte("l"))
	testutil.WaitFor(t, "the slot to be taken", func() bool { return r.inTurn() == 1 })
	b.Write([]byte("q"))
	for _, c := range []*net.TCPConn{a, b} {
		n := int64(1)
		if c == a {
			n = pieces
		}
		c.SetDeadline(time.Now().Add(2 * testTimeout))
		if _, err := io.CopyN(io.Discard, c, n); err != nil {
			t.Fatal(err)
		}
	}
	if n := most.Load(); n != 1 && max(answering.pause(), stalled()) < gap*9/10 {
		t.Errorf("%d questions are being answered at once", n)
	}
}

// Queries of PostgreSQL that are sent together keep the slot until all are answered.
func TestTurnSlot_PipelinedTransactions(t *testing.T) {
	t.Parallel()
	const together = 20
	var inside, most atomic.Int64
	limit := turnLimit(1, time.Second)
	limit.SlotFor = shaper.PerTransaction
	r := start(t, shaper.TCP, server(t, func(c *net.TCPConn) {
		io.ReadFull(c, make([]byte, len(pgMessage(0, pgStartup))))
		c.Write([]byte(pgMessage('R', "\x00\x00\x00\x00") + pgMessage('Z', "I")))
		for query := make([]byte, len(pgMessage('Q', "I"))); ; {
			if _, err := io.ReadFull(c, query); err != nil {
				return
			}
			most.Store(max(most.Load(), inside.Add(1)))
			time.Sleep(5 * time.Millisecond)
			inside.Add(-1)
			c.Write([]byte(pgMessage('C', "yes") + pgMessage('Z', "I") + pgMessage('A', "notification")))
		}
	}), limit)
	done := make(chan bool)
	for range 6 {
		c := dialPg(t, r.addr())
		go func() {
			for range together {
				pgAsk(c, "I")
			}
			_, err := io.ReadFull(c, make([]byte, together*len(pgMessage('C', "yes")+pgMessage('Z', "I")+pgMessage('A', "notification"))))
			done <- err == nil
		}()
	}
	for range 6 {
		if !<-done {
			t.Error("no answer")
		}
	}
	if n := most.Load(); n != 1 {
		t.Errorf("%d queries at once", n)
	}
	r.freed()
}

// A request to cancel a query does not wait for the slot that the query has.
func TestTurnSlot_CancelRequest(t *testing.T) {
	t.Parallel()
	limit := turnLimit(1, time.Second)
	limit.SlotFor = shaper.PerTransaction
	request := pgMessage(0, "\x04\xd2\x16\x2e........")
	canceled := make(chan bool)
	r := start(t, shaper.TCP, server(t, func(c *net.TCPConn) {
		b := make([]byte, 100)
		n, _ := c.Read(b)
		if string(b[:n]) == request {
			close(canceled)
			return
		}
		c.Write([]byte(pgMessage('R', "\x00\x00\x00\x00") + pgMessage('Z', "I")))
		c.Read(b)
		<-canceled
		c.Write([]byte(pgMessage('C', "yes") + pgMessage('Z', "I")))
	}), limit)
	c := dialPg(t, r.addr())
	pgAsk(c, "I")
	testutil.WaitFor(t, "the slot to be taken", func() bool { return r.inTurn() == 1 })
	dial(t, r.addr()).Write([]byte(request))
	if !pgAnswered(c, testTimeout) {
		t.Error("the query is not canceled")
	}
}

// A reload that renames the listener does not let all in that wait.
func TestTurnSlot_RenamedListener(t *testing.T) {
	t.Parallel()
	answers := make(chan struct{})
	answer := sync.OnceFunc(func() { close(answers) })
	t.Cleanup(answer)
	sv := newTurnServer(t, func() time.Duration { <-answers; return 10 * time.Millisecond })
	r := start(t, shaper.TCP, sv.addr)
	apply := func(name string) {
		t.Helper()
		r.listen.Name = name
		l := turnLimit(1, time.Millisecond)
		l.IPv4Prefix, l.IPv6Prefix, l.Match.Listen = 32, 64, []string{name}
		p, err := r.shaper.Compile([]shaper.Limit{l}, []shaper.Listener{r.listen}, nil, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.proxy.Apply(t.Context(), []shaper.Listener{r.listen}, p, nil); err != nil {
			t.Fatal(err)
		}
	}
	apply("one")
	var all []*net.TCPConn
	for range 10 {
		c := dial(t, r.addr())
		c.Write([]byte("q"))
		all = append(all, c)
	}
	testutil.WaitFor(t, "most to wait", func() bool { return r.shaper.Policy().State(0).Waiting.Load() > 5 })
	apply("two")
	answer()
	for _, c := range all {
		if !readByte(c) {
			t.Error("no answer")
		}
	}
	if n := sv.most.Load(); n != 1 {
		t.Errorf("%d questions at once", n)
	}
}

// A reload that shortens turn_gap reaches slots that are kept.
func TestTurnSlot_ShorterGap(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, slowAnswers(t), turnLimit(1, time.Minute))
	asks(dial(t, r.addr()), testTimeout)
	r.apply(turnLimit(1, time.Millisecond))
	if !asks(dial(t, r.addr()), testTimeout) {
		t.Error("no answer")
	}
}

// Who waits for a turn is shown, and for what.
func TestTurnSlot_Shown(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, slowAnswers(t), turnLimit(1, time.Millisecond))
	holder, c := dial(t, r.addr()), dial(t, r.addr())
	holder.Write([]byte("n"))
	testutil.WaitFor(t, "the slot to be taken", func() bool { return r.inTurn() == 1 })
	c.Write([]byte("q"))
	r.waitsInTurn(1)
	time.Sleep(10 * time.Millisecond)
	waits := 0
	r.proxy.Connections(func(c *shaper.ConnectionStatus) {
		if c.ThrottledBy == "turns" && c.Waited > 0 {
			waits++
		}
	})
	if waits != 1 {
		t.Errorf("%d connections are said to wait", waits)
	}
}
