package conn

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/conn/penalty"
	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// penalizing returns a limit of one connection for each source, with a penalty after 10 refusals in a minute.
func penalizing(more func(*shaper.Penalty)) shaper.Limit {
	y := &shaper.Penalty{After: shaper.Frequency{N: 10, Per: time.Minute}, Block: 10 * time.Minute, Factor: 2, Most: time.Hour}
	if more != nil {
		more(y)
	}
	return shaper.Limit{Name: "l", Match: shaper.Match{Protocol: shaper.TCP}, Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64, MaxConnections: 1, Penalty: y}
}

// refuse lets a source be refused so often, while it holds its only slot.
func (r *admissionRig) refuse(source string, times int) {
	r.t.Helper()
	v := r.visit(source, nil)
	for range times {
		if o := r.visit(source, nil); o.granted {
			r.t.Fatalf("%s got a second slot", source)
		}
	}
	if v.granted {
		v.finish()
	}
}

func (r *admissionRig) admitted(source string) bool {
	v := r.visit(source, nil)
	if v.granted {
		v.finish()
	}
	return v.granted
}

// A source is blocked from its tenth refusal on, twice as long each time, and others are not.
func TestPenalty(t *testing.T) {
	r := newAdmissionRig(t, penalizing(nil))
	state := r.admission.policy.State(0)
	r.refuse("10.0.0.1", 9)
	if !r.admitted("10.0.0.1") {
		t.Fatal("blocked after 9 refusals")
	}
	r.refuse("10.0.0.1", 1)
	if r.admitted("10.0.0.1") || !r.admitted("10.0.0.2") {
		t.Fatal("not blocked after 10 refusals, or others are")
	}
	if n := state.Connections[shaper.Refuse][shaper.Blocked].Load(); n != 1 {
		t.Errorf("%d connections are counted as blocked, want 1", n)
	}
	for i, block := range []time.Duration{10 * time.Minute, 20 * time.Minute, 40 * time.Minute, time.Hour, time.Hour} {
		if active, imposed := state.Penalties.Active.Load(), state.Penalties.Imposed.Load(); active != 1 || imposed != uint64(i+1) {
			t.Errorf("%d sources blocked, %d times, want 1, %d times", active, imposed, i+1)
		}
		r.sleep(block - time.Second)
		if r.admitted("10.0.0.1") {
			t.Errorf("block %d ended before %v", i, block)
		}
		r.sleep(2 * time.Second)
		if n := state.Penalties.Active.Load(); !r.admitted("10.0.0.1") || n != 0 {
			t.Errorf("block %d did not end after %v; %d sources blocked", i, block, n)
		}
		r.refuse("10.0.0.1", 10)
	}
	r.sleep(2*time.Hour + 2*time.Second) // a block, and as long without another
	r.refuse("10.0.0.1", 10)
	r.sleep(10*time.Minute + time.Second)
	if !r.admitted("10.0.0.1") {
		t.Error("what was blocked long ago is not forgotten")
	}
}

// What is left of earlier periods does not count, nor do refusals by others, and of excepted sources.
func TestPenalty_CountsWithinPeriod(t *testing.T) {
	monitoring := netip.MustParsePrefix("10.0.9.0/24")
	r := newAdmissionRig(t, penalizing(func(y *shaper.Penalty) { y.Except.Source = []netip.Prefix{monitoring} }), shaper.Limit{Name: "all", MaxConnections: 2})
	for range 5 {
		r.refuse("10.0.0.1", 9)
		r.sleep(time.Minute)
	}
	r.refuse("10.0.9.7", 100)
	a, b := r.visit("10.0.1.1", nil), r.visit("10.0.1.2", nil)
	for range 50 {
		if r.admitted("10.0.0.3") {
			t.Fatal("admitted beyond the limit of all")
		}
	}
	a.finish()
	b.finish()
	for _, source := range []string{"10.0.0.1", "10.0.9.7", "10.0.0.3"} {
		if !r.admitted(source) {
			t.Errorf("%s is blocked", source)
		}
	}
}

// A penalty that observes says whom it would block, once for each block. When it no longer observes, it forgets what it has counted.
func TestPenalty_Observe(t *testing.T) {
	observing := penalizing(func(y *shaper.Penalty) { y.Observe = true })
	r := newAdmissionRig(t, observing)
	var said []penalty.Source
	r.admission.onPenalty = func(_ *sourcePenalty, s *penalty.Source) { said = append(said, *s) }
	r.refuse("10.0.0.1", 100)
	would := &r.admission.policy.State(0).ObservedPenalties
	if !r.admitted("10.0.0.1") || len(said) != 1 || !said[0].Observed || would.Imposed.Load() != 1 || would.Active.Load() != 1 {
		t.Fatalf("%+v, imposed %d, active %d", said, would.Imposed.Load(), would.Active.Load())
	}
	r.sleep(10 * time.Minute)
	r.refuse("10.0.0.1", 10)
	if len(said) != 2 || said[1].Times != 2 || would.Active.Load() != 1 {
		t.Errorf("%+v, active %d", said, would.Active.Load())
	}
	r.swap(penalizing(nil))
	if !r.admitted("10.0.0.1") || would.Active.Load() != 0 {
		t.Error("what was only observed is enforced")
	}
	r.refuse("10.0.0.1", 10)
	if r.admitted("10.0.0.1") || len(said) != 3 || said[2].Times != 1 {
		t.Errorf("%+v", said)
	}
	r.swap(observing)
	if !r.admitted("10.0.0.1") {
		t.Error("blocked by a penalty that observes")
	}
	r.swap(penalizing(nil))
	if r.admitted("10.0.0.1") {
		t.Error("a block has not survived a reload")
	}
	limit := penalizing(nil)
	limit.Observe = true
	r.swap(limit)
	if !r.admitted("10.0.0.1") {
		t.Error("blocked by a limit that observes")
	}
	limit = penalizing(nil)
	limit.Penalty = nil
	r.swap(limit)
	if n := r.shaper.Policy().State(0).Penalties.Active.Load(); !r.admitted("10.0.0.1") || n != 0 {
		t.Errorf("blocked without a penalty; %d active", n)
	}
}

// Connections of a source that wait are refused when it is blocked, and those of others are not.
func TestPenalty_RefusesWaiting(t *testing.T) {
	limit := penalizing(nil)
	limit.MaxQueue, limit.QueueTimeout = 12, time.Minute
	r := newAdmissionRig(t, limit)
	r.visit("10.0.0.2", nil)
	other := r.visit("10.0.0.2", nil)
	r.visit("10.0.0.1", nil)
	var waiting []*visitor
	for range 11 {
		waiting = append(waiting, r.visit("10.0.0.1", nil))
	}
	for _, v := range waiting {
		if v.queue == nil {
			t.Fatal("not all wait")
		}
	}
	for range 10 {
		r.visit("10.0.0.1", nil)
	}
	for i, v := range waiting {
		if v.queue != nil {
			t.Errorf("connection %d waits", i)
		}
	}
	if other.queue == nil {
		t.Error("a connection of another source was refused")
	}
}

// UDP flows of a source that is blocked are refused, too, and by a limit that says nothing in a protocol of others.
func TestPenalty_UDP(t *testing.T) {
	limit := penalizing(nil)
	limit.RefuseWith, limit.Reply = shaper.RefuseReply, shaper.ReplyHTTP429
	r := newAdmissionRig(t, limit)
	flow := flowFrom("10.0.0.1", 1)
	flow.Protocol = shaper.UDP
	held, full := r.admission.tryAcquire(flow, "l", false, r.now)
	if full != nil {
		t.Fatal("refused before it is blocked")
	}
	held.release(r.now)
	r.refuse("10.0.0.1", 10)
	if _, full := r.admission.tryAcquire(flow, "l", false, r.now); full == nil || full.Name != "l" || full.RefuseWith != shaper.RefuseReset {
		t.Errorf("a flow of a blocked source is refused by %+v", full)
	}
	if limit, mayWait := r.admission.precheck(flow, "l", false, 1, r.now, nil); limit == nil || mayWait {
		t.Error("a flow of a blocked source passes")
	}
}

// Behind a PROXY header of a trusted address the source in it is counted and blocked, and not that address.
func TestPenalty_ProxyHeader(t *testing.T) {
	limit := penalizing(nil)
	limit.NewConnections, limit.MaxConnections = shaper.Frequency{N: 1, Per: time.Hour}, 0
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo), limit)
	r.listen.AcceptProxyFrom = anySource
	r.apply(limit)
	passes := func(source string) bool {
		c := dial(t, r.addr())
		defer c.Close()
		_, _ = c.Write(append(proxyHeaderBytes(t, 2, source+":1234", "198.51.100.1:80"), 'x'))
		_, err := c.Read(make([]byte, 1))
		return err == nil
	}
	if !passes("192.0.2.7") {
		t.Fatal("the first connection is refused")
	}
	for range 12 {
		if passes("192.0.2.7") {
			t.Fatal("a second connection")
		}
	}
	if !passes("192.0.2.8") {
		t.Error("another source is refused")
	}
	all := r.proxy.Penalties()
	if len(all) != 1 || all[0].Source.String() != "192.0.2.7/32" || all[0].Left <= 0 {
		t.Errorf("%+v", all)
	}
}

// Without blocked sources a penalty costs an admission nothing that can be measured, and with 10,000 a lookup.
func BenchmarkPenalty_Check(b *testing.B) {
	r := newAdmissionRig(b, penalizing(nil))
	y := r.admission.penalties[0]
	f := flowFrom("192.0.2.1", 1)
	route := r.admission.policy.Route(f)
	for _, blocked := range []int{0, penalty.MaxSources} {
		b.Run(fmt.Sprint(blocked), func(b *testing.B) {
			for i := range blocked {
				source := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 32)
				y.book.Restore(penalty.Source{Prefix: source, Until: time.Hour, Times: 1}, 0)
			}
			for b.Loop() {
				if l, _ := r.admission.checkPenalties(f, route, leaky.Second); l != nil {
					b.Fatal("blocked")
				}
			}
		})
	}
}
