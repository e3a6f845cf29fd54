package adaptive

import (
	"fmt"
	"maps"
	"slices"
	"testing"
)

// fleet is hosts that exchange reports, with a gate each. What they may have in flight follows demand, as slots of a shared
// limit do.
type fleet struct {
	gates []*jointGate
	told  map[string]Report
	next  float64
	away  func(host int, now float64) bool // neither hears nor is heard
}

type jointGate struct {
	Load
	fleet *fleet
	name  string
	joint *Joint
	slots int
}

const exchangeEvery = 0.1

func newFleet(hosts int) *fleet {
	f := &fleet{told: map[string]Report{}, away: func(int, float64) bool { return false }}
	for i := range hosts {
		name := fmt.Sprint("gw", i)
		f.gates = append(f.gates, &jointGate{fleet: f, name: name, joint: NewJoint(name, 1, 1000), slots: 1})
	}
	return f
}

// newGate returns the controllers of the gates in turn.
func (f *fleet) newGate() func() controller {
	i := -1
	return func() controller { i++; return f.gates[i] }
}

func (f *fleet) exchange(now float64) {
	told := map[string]Report{}
	for i, g := range f.gates {
		r := g.Report(at(now))
		r.At += int64(i) * 1e9 // clocks differ
		if g.joint.Leads() {
			found, _ := g.joint.Found()
			r.Found = &found
		}
		if !f.away(i, now) {
			told[g.name] = r
			all := maps.Clone(f.told)
			all[g.name] = r
			g.joint.Exchange(all, ticks(exchangeEvery), at(now))
		}
	}
	f.told = told
	f.lend()
}

// lend divides the slots by max-min fairness. What is left when each part is rounded down goes to some that want more.
func (f *fleet) lend() {
	want := func(g *jointGate) float64 { return float64(g.inFlight + g.waiting + 1) }
	order := slices.SortedFunc(slices.Values(f.gates), func(a, b *jointGate) int { return int(want(a) - want(b)) })
	left, rest, level := 1.0, 1e9, 0.0
	for i, g := range order {
		found, _ := g.joint.Found()
		level = float64(max(found.Limit, 1))
		part := min(want(g)/level, left/float64(len(order)-i))
		left -= part
		g.slots = int(part*level + 1e-9)
		rest = min(rest, level)
	}
	for _, g := range order {
		rest -= float64(g.slots)
	}
	for _, g := range order {
		if rest >= 1 && want(g) > float64(g.slots) {
			g.slots++
			rest--
		}
	}
}

func (g *jointGate) Limit() int                             { return g.slots }
func (g *jointGate) set(inFlight, waiting int, now float64) { g.Set(inFlight, waiting, at(now)) }

func (g *jointGate) end(took float64, _ int, how outcome, now float64) {
	switch how {
	case answered:
		g.Answer(at(took), at(now))
	case failed:
		g.Fail(at(now))
	case left:
		g.Leave(at(now))
	}
}

func (g *jointGate) step(now float64) {
	if f := g.fleet; now >= f.next {
		f.next = now + exchangeEvery
		f.exchange(now)
	}
}

// Several hosts find the limit that one would find, and get as much from the server.
func TestJoint(t *testing.T) {
	for _, w := range servers() {
		if w.gates > 1 || !*long && w.name != "slow pool, half lost" && w.name != "slow database, lock storm" {
			continue
		}
		one := w
		w.gates = 3
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			best := simulate(one, func() controller { return &bestCap{&one, one.rights[0]} }, 1)
			ours := simulate(w, newFleet(w.gates).newGate(), 1)
			good, last := float64(ours.good)/float64(best.good), mean(ours.limits[int(w.length)*3/4:int(w.length)])
			t.Logf("goodput %.1f %% of the best cap's, limit %.0f at last, %d is right", 100*good, last, w.right(w.length))
			if good < 0.9 {
				t.Errorf("goodput is %.1f %% of what the best cap gets", 100*good)
			}
		})
	}
}

// The host that leads goes away, and comes back: another one leads meanwhile, and goes on from what was found.
func TestJoint_LeaderAway(t *testing.T) {
	w := servers()[slices.IndexFunc(servers(), func(w world) bool { return w.name == "workers" })]
	w.gates, w.length = 3, 180
	f := newFleet(w.gates)
	leaders := map[string]bool{}
	f.away = func(host int, now float64) bool {
		if now > 70 && now < 115 {
			_, leader := f.gates[1].joint.Found()
			leaders[leader] = true
		}
		return host == 0 && now > 60 && now < 120
	}
	ours := simulate(w, f.newGate(), 1)
	if len(leaders) != 1 || !leaders["gw1"] {
		t.Errorf("meanwhile %v lead", leaders)
	}
	if _, leader := f.gates[2].joint.Found(); leader != "gw0" || !f.gates[0].joint.Leads() || f.gates[1].joint.Leads() {
		t.Errorf("%s leads when the first is back", leader)
	}
	before := mean(ours.limits[50:60])
	for from := 65; from < 180; from += 5 {
		if l := mean(ours.limits[from : from+5]); l < before/2 || l > 2*before {
			t.Errorf("limit %.0f after %d s, and %.0f before", l, from, before)
		}
	}
	if got := float64(ours.good) / w.length; got < 0.9*float64(ours.goodput(30, 60)) {
		t.Errorf("%.0f answers a second", got)
	}
}

// What a host tells is not trusted further than the operator's bounds, and a host that starts again does no harm.
func TestJoint_Reports(t *testing.T) {
	j := NewJoint("b", 5, 50)
	now := at(100)
	step := func(r map[string]Report) {
		now += ticks(exchangeEvery)
		r["b"] = Report{At: now.Duration().Microseconds()}
		j.Exchange(r, ticks(exchangeEvery), now)
	}
	for _, c := range []struct{ told, want int }{{1, 5}, {-7, 5}, {1 << 40, 50}, {20, 20}} {
		step(map[string]Report{"a": {At: int64(now), Found: &Found{Limit: c.told, Middle: c.told, Most: c.told}}})
		if f, leader := j.Found(); f.Limit != c.want || f.Middle != c.want || f.Most != c.want || leader != "a" {
			t.Errorf("told %d: %+v of %q", c.told, f, leader)
		}
	}
	step(map[string]Report{"a": {At: int64(now), Answers: 1e6, InFlight: 1e12}}) // it leads, and has found nothing
	if f, _ := j.Found(); f.Limit != 20 {
		t.Errorf("limit %d, and nobody has found another one", f.Limit)
	}
	last := Report{At: int64(now), Found: &Found{Limit: 40, Middle: 40, Most: 40}}
	for range 30 { // it is gone, and the ledger does not know
		step(map[string]Report{"a": last})
	}
	if f, leader := j.Found(); leader != "b" || f.Middle > 40 {
		t.Errorf("%q leads, %+v", leader, f)
	}
	step(map[string]Report{})
	if f, _ := j.Found(); !j.Leads() || f.Middle < 5 || f.Middle > 50 {
		t.Errorf("leads: %v, %+v", j.Leads(), f)
	}
	again := NewJoint("b", 5, 50) // b is started again, and another one has led
	for n := range int64(2) {
		again.Exchange(map[string]Report{"b": {At: 1 + n}, "c": {At: 1 + n, Found: &Found{Limit: 33, Middle: 30, Most: 34}}}, ticks(exchangeEvery), now)
	}
	if f, _ := again.Found(); !again.Leads() || f.Middle != 30 {
		t.Errorf("leads: %v, %+v", again.Leads(), f)
	}
	before := j.controller.sums
	step(map[string]Report{"c": {At: 1, Answers: 1 << 60, InFlight: 1 << 60, Latency: 1 << 60}}) // new: it has passed before
	step(map[string]Report{"c": {At: 2, Answers: 3}})                                            // started again
	if d := j.controller.since(before); d.answers != 0 || d.allInFlight != 0 {
		t.Errorf("%+v", d)
	}
	for _, r := range []Report{
		{At: 3, Answers: 1 << 60}, {At: 4, InFlight: 1 << 60}, {At: 5, Latency: -1}, {At: 6, Full: 1 << 62}, {At: -7}, {At: 2, Waiting: -1 << 40}, // broken
	} {
		step(map[string]Report{"c": r})
	}
	if d := j.controller.since(before); d.answers != 0 || d.allInFlight != 0 || j.controller.waiting != 0 {
		t.Errorf("%+v, %d wait", d, j.controller.waiting)
	}
	step(map[string]Report{"c": {At: 1e5 - 2, Answers: 3}})
	step(map[string]Report{"c": {At: 2e5, Answers: 5, InFlight: 3e5, Waiting: 1}})
	if d := j.controller.since(before); d.answers != 5 || j.controller.inFlight != 3 || j.controller.waiting == 0 {
		t.Errorf("%+v, %d in flight", d, j.controller.inFlight)
	}
}

func mean(x []float64) (sum float64) {
	for _, v := range x {
		sum += v / float64(len(x))
	}
	return sum
}
