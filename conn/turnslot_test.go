package conn

import (
	"bytes"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// turnServer answers each byte after a time, and counts how many it has to answer at once.
type turnServer struct {
	addr         string
	mu           sync.Mutex // of changes
	inside, most atomic.Int64
}

// reset forgets how many there were at once before.
func (sv *turnServer) reset() {
	sv.mu.Lock()
	defer sv.mu.Unlock()
	sv.most.Store(sv.inside.Load())
}

func newTurnServer(t *testing.T, takes func() time.Duration) *turnServer {
	sv := &turnServer{}
	sv.addr = server(t, func(c *net.TCPConn) {
		for b := make([]byte, 1); ; {
			if _, err := c.Read(b); err != nil {
				return
			}
			sv.mu.Lock()
			sv.most.Store(max(sv.most.Load(), sv.inside.Add(1)))
			sv.mu.Unlock()
			time.Sleep(takes())
			sv.inside.Add(-1)
			c.Write(b)
		}
	})
	return sv
}

// turnLimit lets most connections be in a turn.
func turnLimit(most int, gap time.Duration) shaper.Limit {
	return shaper.Limit{
		Name: "turns", Match: shaper.Match{Protocol: shaper.TCP}, MaxConnections: most, SlotFor: shaper.PerTurn, TurnGap: gap,
		QueueTimeout: time.Minute, MaxQueue: 1000,
	}
}

// inTurn returns how many hold slots of the first limit.
func (r *proxyRig) inTurn() int64 { return r.shaper.Policy().State(0).InFlight.Load() }

// watchLoop returns a function that returns how long the loop was late at most, to within 10 ms.
func (r *proxyRig) watchLoop() (longest func() time.Duration) {
	l := r.proxy.home.loop
	var last, most leaky.Time
	var e pacer.Event
	e.Fire = func(now leaky.Time) {
		most, last = max(most, now-last), now
		l.pacer.Schedule(&e, now+leaky.Second/100)
	}
	l.call(func(now leaky.Time) {
		last = now
		l.pacer.Schedule(&e, now)
	})
	r.t.Cleanup(func() { l.call(func(leaky.Time) { l.pacer.Cancel(&e) }) })
	return func() (d time.Duration) {
		l.call(func(now leaky.Time) { d = max(most, now.Sub(last)).Duration() })
		return d
	}
}

// freed waits until none holds a slot of the first limit.
func (r *proxyRig) freed() {
	r.t.Helper()
	testutil.WaitFor(r.t, "all slots to be free", func() bool { return r.inTurn() == 0 })
}

// askOnOpen has n clients that stay connected ask one question after the other, until the result is called.
func (r *proxyRig) askOnOpen(t *testing.T, n int) (end func()) {
	stop := make(chan bool)
	var wg sync.WaitGroup
	for range n {
		c := dial(t, r.addr())
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if !asks(c, testTimeout) {
					t.Error("no answer")
					return
				}
			}
		})
	}
	return func() { close(stop); wg.Wait() }
}

// Of many connections that stay open only so many have a question at the downstream, and each gets its answers.
func TestTurnSlot(t *testing.T) {
	t.Parallel()
	var came atomic.Int64
	full := make(chan struct{})
	sv := newTurnServer(t, func() time.Duration {
		if came.Add(1) == 4 {
			close(full)
		}
		select { // the first ones wait for each other
		case <-full:
		case <-time.After(testTimeout):
		}
		return rand.N(4 * time.Millisecond)
	})
	r := start(t, shaper.TCP, sv.addr, turnLimit(4, 2*time.Millisecond))
	var wg sync.WaitGroup
	for range 40 {
		c := dial(t, r.addr())
		wg.Go(func() {
			for range 20 {
				if !asks(c, testTimeout) {
					t.Error("no answer")
					return
				}
				time.Sleep(rand.N(10 * time.Millisecond))
			}
		})
	}
	wg.Wait()
	if n := sv.most.Load(); n != 4 {
		t.Errorf("%d questions at once, want 4", n)
	}
	r.freed()
	if n := r.shaper.Policy().State(0).Connections[shaper.Delay][shaper.ByConnections].Load(); n == 0 {
		t.Error("no turn has waited")
	}
}

// A conversation is not interrupted by those that wait.
func TestTurnSlot_Conversation(t *testing.T) {
	t.Parallel()
	const gap = 2 * time.Second
	r := start(t, shaper.TCP, slowAnswers(t), turnLimit(1, gap))
	a, b := dial(t, r.addr()), dial(t, r.addr())
	last, longest := time.Now(), time.Duration(0) // when a began to ask, and from then to the next answer
	asks(a, testTimeout)
	b.Write([]byte("q"))
	for range 3 {
		time.Sleep(gap / 100)
		begun := time.Now()
		if !asks(a, testTimeout) {
			t.Fatal("no answer")
		}
		longest, last = max(longest, time.Since(last)), begun
	}
	if longest >= gap*9/10 {
		t.Logf("a busy machine made a pause of %v", longest)
		return
	}
	if b.SetReadDeadline(time.Now().Add(gap / 10)); readByte(b) {
		if time.Since(last) < gap*9/10 {
			t.Fatal("another conversation has begun in the middle of one")
		}
		return
	}
	if b.SetReadDeadline(time.Now().Add(testTimeout)); !readByte(b) {
		t.Fatal("another conversation does not begin")
	}
	if d := time.Since(last); d < gap*9/10 {
		t.Errorf("the slot was free %v after the last answer", d)
	}
}

// pgServer speaks as much of the protocol of PostgreSQL as a test needs: each query says with which status its answer ends.
func pgServer(c *net.TCPConn) {
	head := make([]byte, 4)
	if _, err := io.ReadFull(c, head); err != nil {
		return
	}
	io.CopyN(io.Discard, c, int64(binary.BigEndian.Uint32(head))-4)
	c.Write([]byte(pgMessage('R', "\x00\x00\x00\x00") + pgMessage('Z', "I")))
	for head = make([]byte, 5); ; {
		if _, err := io.ReadFull(c, head); err != nil {
			return
		}
		body := make([]byte, binary.BigEndian.Uint32(head[1:])-4)
		if _, err := io.ReadFull(c, body); err != nil {
			return
		}
		for _, x := range []byte(pgMessage('C', "yes") + pgMessage('Z', string(body[:1]))) { // in pieces
			c.Write([]byte{x})
		}
	}
}

// dialPg connects to a pgServer.
func dialPg(t *testing.T, addr string) *net.TCPConn {
	c := dial(t, addr)
	c.Write([]byte(pgMessage(0, pgStartup)))
	if _, err := io.ReadFull(c, make([]byte, 9+6)); err != nil {
		t.Fatal(err)
	}
	return c
}

func pgAsk(c *net.TCPConn, status string) {
	c.SetWriteDeadline(time.Now().Add(testTimeout))
	c.Write([]byte(pgMessage('Q', status)))
}

func pgAnswered(c *net.TCPConn, within time.Duration) bool {
	c.SetReadDeadline(time.Now().Add(within))
	_, err := io.ReadFull(c, make([]byte, 8+6))
	return err == nil
}

// A transaction of PostgreSQL keeps its slot however long it pauses, and no longer.
func TestTurnSlot_Transaction(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, server(t, pgServer))
	limit := turnLimit(1, time.Minute)
	limit.SlotFor = shaper.PerTransaction
	r.apply(limit)
	a, b := dialPg(t, r.addr()), dialPg(t, r.addr())
	for _, status := range []string{"I", "I", "T", "E", "I"} {
		if pgAsk(a, status); !pgAnswered(a, testTimeout) {
			t.Fatal("no answer")
		}
	}
	if pgAsk(b, "I"); !pgAnswered(b, testTimeout) {
		t.Fatal("no answer: a slot is kept after the end of a transaction")
	}
	limit.TurnGap = time.Millisecond
	r.apply(limit)
	if pgAsk(a, "T"); !pgAnswered(a, testTimeout) {
		t.Fatal("no answer")
	}
	pgAsk(b, "I")
	for range 3 {
		if pgAnswered(b, 100*time.Millisecond) {
			t.Fatal("another connection has got a slot during a transaction")
		}
		if pgAsk(a, "E"); !pgAnswered(a, testTimeout) {
			t.Fatal("no answer")
		}
	}
	pgAsk(a, "I")
	if !pgAnswered(b, testTimeout) {
		t.Fatal("the slot is not free after a transaction")
	}
	r.freed()
}

// Of two clients that ask without a pause both are answered.
func TestTurnSlot_Endless(t *testing.T) {
	t.Parallel()
	const gap = 10 * time.Millisecond
	r := start(t, shaper.TCP, slowAnswers(t), turnLimit(1, gap))
	var wg sync.WaitGroup
	var answers [2]int
	for i := range answers {
		c := dial(t, r.addr())
		wg.Go(func() {
			for end := time.Now().Add(30 * turnsKept * gap); time.Now().Before(end) && asks(c, testTimeout); {
				answers[i]++
			}
		})
	}
	wg.Wait()
	if min(answers[0], answers[1]) < max(answers[0], answers[1])/4 {
		t.Errorf("%d answers", answers)
	}
	r.freed()
}

func readByte(c net.Conn) bool {
	_, err := io.ReadFull(c, make([]byte, 1))
	return err == nil
}

// What a downstream says first, the header for it and a FIN wait for no slot.
func TestTurnSlot_WithoutQuestion(t *testing.T) {
	t.Parallel()
	ended := make(chan []byte, 2)
	r := start(t, shaper.TCP, server(t, func(c *net.TCPConn) {
		c.Write([]byte("hello"))
		b, _ := io.ReadAll(c)
		ended <- b
	}))
	r.listen.SendProxy = 1
	r.apply(turnLimit(1, time.Millisecond))
	holder := dial(t, r.addr())
	io.ReadFull(holder, make([]byte, 5))
	holder.Write([]byte("q")) // which is never answered
	testutil.WaitFor(t, "the slot to be taken", func() bool { return r.inTurn() == 1 })
	c := dial(t, r.addr())
	if b := make([]byte, 5); !func() bool { _, err := io.ReadFull(c, b); return err == nil }() {
		t.Fatal("no greeting")
	}
	c.CloseWrite()
	if b := <-ended; !bytes.HasPrefix(b, []byte("PROXY TCP4 ")) || !bytes.HasSuffix(b, []byte("\r\n")) {
		t.Errorf("the downstream got %q", b)
	}
	holder.Close()
	<-ended
	r.freed()
	r.settle()
}

// A client that asks and closes its side is answered when it has its slot.
func TestTurnSlot_HalfClosed(t *testing.T) {
	t.Parallel()
	sv := newTurnServer(t, func() time.Duration { return 100 * time.Millisecond })
	r := start(t, shaper.TCP, sv.addr, turnLimit(1, time.Millisecond))
	var all []*net.TCPConn
	for range 4 {
		c := dial(t, r.addr())
		c.Write([]byte("q"))
		c.CloseWrite()
		all = append(all, c)
	}
	for _, c := range all {
		if b, err := io.ReadAll(c); len(b) != 1 || err != nil {
			t.Errorf("got %q, %v", b, err)
		}
	}
	if sv.most.Load() != 1 {
		t.Errorf("%d at once", sv.most.Load())
	}
	r.settle()
	r.freed()
}

// Who waits too long is refused with the reply of the limit, and who leaves meanwhile leaves nothing behind.
func TestTurnSlot_Refused(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, slowAnswers(t))
	limit := turnLimit(1, time.Millisecond)
	limit.QueueTimeout, limit.RefuseWith, limit.Reply = 3*time.Second, shaper.RefuseReply, "busy\n"
	r.apply(limit)
	holder, late, leaves := dial(t, r.addr()), dial(t, r.addr()), dial(t, r.addr())
	holder.Write([]byte("n"))
	testutil.WaitFor(t, "the slot to be taken", func() bool { return r.inTurn() == 1 })
	late.Write([]byte("question"))
	leaves.Write([]byte("question"))
	testutil.WaitFor(t, "both to wait", func() bool { return r.shaper.Policy().State(0).Waiting.Load() == 2 })
	leaves.SetLinger(0)
	leaves.Close()
	if b, err := io.ReadAll(late); string(b) != "busy\n" || err != nil {
		t.Errorf("refused with %q, %v", b, err)
	}
	if n := r.shaper.Policy().State(0).Connections[shaper.Refuse][shaper.WaitTimeout].Load(); n != 1 {
		t.Errorf("%d refused", n)
	}
	holder.Close()
	r.settle()
	r.freed()
}

// Limits come and go while questions are asked and wait.
func TestTurnSlot_Reload(t *testing.T) {
	t.Parallel()
	sv := newTurnServer(t, func() time.Duration { return rand.N(4 * time.Millisecond) })
	r := start(t, shaper.TCP, sv.addr)
	end := r.askOnOpen(t, 30)
	keyed, connections := turnLimit(3, time.Millisecond), turnLimit(100, 0)
	keyed.Key = shaper.KeySource
	connections.SlotFor = shaper.PerConnection
	for i, limits := range [][]shaper.Limit{{turnLimit(2, time.Millisecond)}, {keyed}, {}, {turnLimit(1, 0)}, {connections}, {turnLimit(5, time.Millisecond)}} {
		r.apply(limits...)
		want := []int64{2, 3, 30, 1, 30, 5}[i]
		testutil.WaitFor(t, "those beyond the maximum to end", func() bool { return len(limits) == 0 || r.inTurn() <= want })
		time.Sleep(200 * time.Millisecond)
		sv.reset()
		time.Sleep(100 * time.Millisecond)
		if sv.most.Load() > want {
			t.Errorf("%d: %d at once, want %d", i, sv.most.Load(), want)
		}
	}
	end()
	r.freed()
	r.apply()
	r.proxy.home.loop.call(func(leaky.Time) {
		if n := len(r.proxy.home.admission.byKey); n > 0 {
			t.Errorf("%d gates are left", n)
		}
	})
}

// A question that is sent to another downstream waits for a slot again.
func TestTurnSlot_Resend(t *testing.T) {
	t.Parallel()
	var came atomic.Int32
	r := start(t, shaper.TCP, server(t, func(c *net.TCPConn) {
		b := make([]byte, 1)
		if _, err := io.ReadFull(c, b); err == nil && came.Add(1) > 2 {
			c.Write(b)
			io.Copy(io.Discard, c)
		}
	}))
	r.listen.RetryUnanswered, r.listen.SendProxy = true, 0
	r.apply(turnLimit(1, time.Millisecond))
	if c := dial(t, r.addr()); !asks(c, testTimeout) {
		t.Error("no answer")
	}
	if came.Load() != 3 {
		t.Errorf("asked %d times", came.Load())
	}
	r.freed()
}

// An adaptive limit finds how many connections may be in a turn.
func TestTurnSlot_Adapts(t *testing.T) {
	t.Parallel()
	sv := newTurnServer(t, func() time.Duration { return 10 * time.Millisecond })
	limit := turnLimit(40, time.Millisecond)
	limit.Adapt, limit.MinConnections = shaper.AdaptOn, 2
	r := start(t, shaper.TCP, sv.addr, limit)
	end := r.askOnOpen(t, 60)
	state := r.shaper.Policy().State(0)
	testutil.WaitFor(t, "the limit to grow", func() bool {
		st := state.Adaptive.Load()
		return st != nil && st.Limit >= 8 && st.Throughput > 0
	})
	end()
	if n := sv.most.Load(); n > 40 {
		t.Errorf("%d at once", n)
	}
	r.freed()
}
