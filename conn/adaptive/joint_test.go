package adaptive

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"

	"shaperd.dev/shaperd/leaky"
)

// fleet is hosts that exchange reports, with a gate each. What they may have in flight follows demand, as slots of a shared
// limit do.
type fleet struct {
	gates []*jointGate
	told  map[string]Report
	next  float64
	parts []float64                        // of the slots, that each has
	away  func(host int, now float64) bool // neither hears nor is heard, and serves on with its part
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
	f := &fleet{told: map[string]Report{}, parts: make([]float64, hosts), away: func(int, float64) bool { return false }}
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
	told := maps.Clone(f.told) // the ledger tells what a host has said that is away
	for i, g := range f.gates {
		r := g.Report(at(now))
		r.At += int64(i) * 1e9 // clocks differ
		if found, _ := g.joint.Found(); found.Limit > 0 {
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
	f.lend(now)
}

// lend divides the slots by max-min fairness. What is left when each part is rounded down goes to some that want more.
func (f *fleet) lend(now float64) {
	want := func(i int) float64 { return float64(f.gates[i].inFlight + f.gates[i].waiting + 1) }
	level := func(i int) float64 { found, _ := f.gates[i].joint.Found(); return float64(max(found.Limit, 1)) }
	left := 1.0
	var order []int
	for i := range f.gates {
		if f.away(i, now) {
			left -= f.parts[i]
		} else {
			order = append(order, i)
		}
	}
	slices.SortFunc(order, func(i, k int) int { return int(want(i) - want(k)) })
	for n, i := range order {
		f.parts[i] = max(0, min(want(i)/level(i), left/float64(len(order)-n)))
		left -= f.parts[i]
		f.gates[i].slots = int(f.parts[i]*level(i) + 1e-9)
		left += f.parts[i] - float64(f.gates[i].slots)/level(i)
		f.parts[i] = float64(f.gates[i].slots) / level(i)
	}
	for _, i := range order {
		if left*level(i) >= 1-1e-6 && want(i) > float64(f.gates[i].slots) {
			f.gates[i].slots++
			f.parts[i] += 1 / level(i)
			left -= 1 / level(i)
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

// A host that is cut off now and then, or once, serves on with what it has. The limit neither runs away nor falls meanwhile.
func TestJoint_HostAway(t *testing.T) {
	for hosts, name := range map[int]string{2: "collapsing database", 3: "workers"} {
		w := servers()[slices.IndexFunc(servers(), func(w world) bool { return w.name == name })]
		w.length, w.gates = 400, hosts
		calm := simulate(w, newFleet(hosts).newGate(), 1)
		for _, away := range []int{0, hosts - 1} {
			for _, period := range []float64{6, 100} {
				t.Run(fmt.Sprintf("%s, host %d of %d, every %.0f s", name, away, hosts, period), func(t *testing.T) {
					t.Parallel()
					f := newFleet(hosts)
					f.away = func(host int, now float64) bool {
						return host == away && now > 60 && math.Mod(now-60, period) < min(period/2, 60)
					}
					r := simulate(w, f.newGate(), 1)
					limit := func(n int) float64 { found, _ := f.gates[n].joint.Found(); return float64(found.Middle) }
					middle, right := limit(0), mean(calm.limits[200:400])
					t.Logf("limit %.0f at last, %.0f undisturbed; %.2f of the answers", middle, right, float64(r.goodput(60, 400))/float64(calm.goodput(60, 400)))
					if middle > 2*right || middle < right/2 || float64(r.goodput(60, 400)) < 0.9*float64(calm.goodput(60, 400)) {
						t.Error("the limit does not stay")
					}
				})
			}
		}
	}
}

// A host that hears the others and is not heard does not lead, and does not obey itself.
func TestJoint_Mute(t *testing.T) {
	now := at(100)
	a, b := NewJoint("a", 1, 1000), NewJoint("b", 1, 1000)
	mute := false
	var toldA, toldB Report
	for i := range 200 {
		now += ticks(exchangeEvery)
		mute = i > 100
		r := Report{At: now.Duration().Microseconds()}
		toldB = r
		if f, _ := b.Found(); f.Limit > 0 {
			toldB.Found = &f
		}
		all := map[string]Report{"b": toldB}
		if !mute {
			toldA = r
			if f, _ := a.Found(); f.Limit > 0 {
				toldA.Found = &f
			}
			all["a"] = toldA
		}
		a.Exchange(maps.Clone(all), ticks(exchangeEvery), now)
		all["a"] = toldA // the ledger knows of it
		b.Exchange(all, ticks(exchangeEvery), now)
		if i == 99 && (!a.Leads() || b.Leads()) {
			t.Error("the first does not lead")
		}
	}
	fa, leaderA := a.Found()
	fb, leaderB := b.Found()
	if leaderA != "b" || leaderB != "b" || a.Leads() || !b.Leads() || fb.Step-fa.Step > 1 {
		t.Errorf("%q and %q lead; %+v, %+v", leaderA, leaderB, fa, fb)
	}
}

// What a host had found that is dead does not come back when another one starts.
func TestJoint_DeadLeader(t *testing.T) {
	ledger := map[string]Report{}
	joints := map[string]*Joint{"a": NewJoint("a", 1, 1000), "c": NewJoint("c", 1, 1000)}
	joints["a"].Resume(Found{Limit: 500, Middle: 500, Most: 500})
	now := at(100)
	exchange := func(times int) {
		for range times {
			now += ticks(exchangeEvery)
			for name, j := range joints {
				r := Report{At: now.Duration().Microseconds()}
				if f, _ := j.Found(); f.Limit > 0 {
					r.Found = &f
				}
				all := maps.Clone(ledger)
				all[name] = r
				j.Exchange(all, ticks(exchangeEvery), now)
				ledger[name] = r
			}
		}
	}
	exchange(30)
	delete(joints, "a")
	exchange(100)
	c := joints["c"]
	if !c.Leads() {
		t.Fatal("c does not lead")
	}
	c.controller.cut(20, LessCostsNothing, now)
	exchange(30)
	joints["b"] = NewJoint("b", 1, 1000)
	exchange(50)
	for name, j := range joints {
		if f, leader := j.Found(); f.Middle > 40 || leader != "b" {
			t.Errorf("%s has %d of %s", name, f.Middle, leader)
		}
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
	for i, c := range []struct{ told, want int }{{1, 5}, {-7, 5}, {1 << 40, 50}, {20, 20}} {
		step(map[string]Report{"a": {At: int64(now), Found: &Found{Step: int64(i + 1), Limit: c.told, Middle: c.told, Most: c.told}}})
		if f, leader := j.Found(); f.Limit != c.want || f.Middle != c.want || f.Most != c.want || leader != "a" {
			t.Errorf("told %d: %+v of %q", c.told, f, leader)
		}
	}
	step(map[string]Report{"a": {At: int64(now), Answers: 1e6, InFlight: 1e12}}) // it leads, and has found nothing
	if f, _ := j.Found(); f.Limit != 20 {
		t.Errorf("limit %d, and nobody has found another one", f.Limit)
	}
	step(map[string]Report{"a": {At: int64(now), Found: &Found{Step: 3, Limit: 40, Middle: 40, Most: 40}}}) // it was away meanwhile
	if f, _ := j.Found(); f.Limit != 20 {
		t.Errorf("limit %d, which was found before the present one", f.Limit)
	}
	last := Report{At: int64(now), Found: &Found{Step: 9, Limit: 40, Middle: 40, Most: 40}}
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
		again.Exchange(map[string]Report{"b": {At: 1 + n}, "c": {At: 1 + n, Found: &Found{Step: 7, Limit: 33, Middle: 30, Most: 34}}}, ticks(exchangeEvery), now+leaky.Time(n))
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
