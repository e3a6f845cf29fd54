package conn

import (
	"fmt"
	"math"
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"

	"shaperd/leaky"
	"shaperd/shaper"
)

// ideal is fair queueing of a fluid: what leaves is had in equal parts by those who wait at
// that moment. It holds what members really get against that, and against each other.
type ideal struct {
	fatalf  func(string, ...any)
	waiting map[string]*standing
	served  map[string]float64
	unit    float64 // the most that leaves at once
	most    int     // members that waited at once
}

// standing is a member since it waits without a break.
type standing struct {
	due, best float64                // what it should have had more than it had, and the least of that
	first     bool                   // it has had something
	lead      map[string]*[2]float64 // the least that another had more, and the same since first
}

func newIdeal(fatalf func(string, ...any)) *ideal {
	return &ideal{fatalf: fatalf, waiting: map[string]*standing{}, served: map[string]float64{}}
}

// few is 1 + 1/2 + ... + 1/n.
func few(n int) (sum float64) {
	for i := range n {
		sum += 1 / float64(i+1)
	}
	return sum
}

func (d *ideal) comes(who string) {
	if d.waiting[who] == nil {
		d.waiting[who] = &standing{lead: map[string]*[2]float64{}}
		d.most = max(d.most, len(d.waiting))
	}
}

func (d *ideal) goes(who string) { delete(d.waiting, who) }

// leaves notes that who has had n.
func (d *ideal) leaves(who string, n float64) {
	d.unit = max(d.unit, n)
	bound := (1+few(d.most))*d.unit + 1e-3
	for name, g := range d.waiting {
		g.due += n / float64(len(d.waiting))
		if name == who {
			g.due -= n
			g.best = min(g.best, g.due)
			g.first = true
			continue
		}
		if g.due-g.best > bound {
			d.fatalf("%s has %.2f units less than its part, of %d, want at most %.2f", name, (g.due-g.best)/d.unit, len(d.waiting), bound/d.unit)
		}
		lead := g.lead[who]
		if lead == nil {
			lead = &[2]float64{math.Inf(1), math.Inf(1)}
			g.lead[who] = lead
		}
		ahead := d.served[who] - d.served[name]
		lead[0] = min(lead[0], ahead)
		if ahead += n; ahead-lead[0] > bound {
			d.fatalf("%s had %.2f units more than %s, which waited, want at most %.2f", who, (ahead-lead[0])/d.unit, name, bound/d.unit)
		}
		if g.first {
			lead[1] = min(lead[1], ahead-n)
			if ahead-lead[1] > 2*d.unit+1e-3 {
				d.fatalf("%s had %.3f units more than %s, which waited and had its first turn, want at most 2", who, (ahead-lead[1])/d.unit, name)
			}
		}
	}
	d.served[who] += n
}

// fairRig sends the units of sources and their flows through one line.
type fairRig struct {
	*rig
	sources *ideal
	flows   map[string]*ideal // by source
	waits   map[string]map[*fairFlow]bool
	ids     int
}

// fairFlow is a flow that has so many bytes to send, in units of different sizes.
type fairFlow struct {
	unit
	rig  *fairRig
	name [2]string // its source, and it
	path []stop
	left []uint64
}

func newFairRig(t *testing.T, fatalf func(string, ...any)) *fairRig {
	return &fairRig{
		rig: newRig(t, shaper.Limit{Name: "all", Rate: 8e6}), sources: newIdeal(fatalf),
		flows: map[string]*ideal{}, waits: map[string]map[*fairFlow]bool{},
	}
}

// open begins a flow of source that sends units.
func (r *fairRig) open(source string, units []uint64) *fairFlow {
	r.ids++
	addr := netip.MustParseAddr(source)
	f := &fairFlow{rig: r, name: [2]string{source, fmt.Sprint(source, " flow ", r.ids)}, left: units}
	f.path = r.path(&shaper.Flow{Source: addr, Port: 1, Protocol: shaper.TCP, Connection: uint64(r.ids)})
	if r.flows[source] == nil {
		r.flows[source], r.waits[source] = newIdeal(r.sources.fatalf), map[*fairFlow]bool{}
	}
	f.more(nil)
	return f
}

// more has f send more units.
func (f *fairFlow) more(units []uint64) {
	f.left = append(f.left, units...)
	if f.queued || len(f.left) == 0 {
		return
	}
	r := f.rig
	r.waits[f.name[0]][f] = true
	r.sources.comes(f.name[0])
	r.flows[f.name[0]].comes(f.name[1])
	f.unit = unit{owner: f, path: f.path, bytes: f.left[0]}
	r.lines.submit(&f.unit, r.now)
}

func (f *fairFlow) send(leaky.Time) (bytes, packets uint64, again bool) {
	n := f.left[0]
	f.rig.sources.leaves(f.name[0], float64(n))
	f.rig.flows[f.name[0]].leaves(f.name[1], float64(n))
	if f.left = f.left[1:]; len(f.left) == 0 {
		f.rests()
		return n, 0, false
	}
	f.bytes = f.left[0]
	return n, 0, true
}

// rests notes that f waits for nothing any more.
func (f *fairFlow) rests() {
	r := f.rig
	r.flows[f.name[0]].goes(f.name[1])
	if delete(r.waits[f.name[0]], f); len(r.waits[f.name[0]]) == 0 {
		r.sources.goes(f.name[0])
	}
}

// close ends f, in the middle or when it has sent all.
func (f *fairFlow) close() {
	f.rests()
	f.rig.lines.withdraw(f.rig.now, &f.unit)
	f.rig.lines.release(f.path, f.rig.now)
}

func (f *fairFlow) resubmit(leaky.Time) {}

func (f *fairFlow) refused(*line, shaper.Reason) {}

// Whatever sources and flows open, send, close and reset, and however often they come
// again: what each gets while it waits is its part, but for a few units.
func TestLineAgainstIdealFairQueueing(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		r := newFairRig(t, rt.Fatalf)
		var open []*fairFlow
		strangers := 0
		sizes := rapid.SliceOfN(rapid.OneOf(rapid.Just[uint64](1448), rapid.Uint64Range(1, 1448)), 1, 12)
		bulk := rapid.SliceOfN(rapid.Just[uint64](1448), 30, 60)
		for range rapid.IntRange(1, 3).Draw(rt, "bulk") {
			open = append(open, r.open(fmt.Sprint("10.1.0.", 1+len(open)), bulk.Draw(rt, "units")))
		}
		for range rapid.IntRange(30, 300).Draw(rt, "steps") {
			switch action := rapid.IntRange(0, 11).Draw(rt, "action"); {
			case action < 4: // one of a few sources
				source := fmt.Sprint("10.0.0.", rapid.IntRange(1, 5).Draw(rt, "source"))
				open = append(open, r.open(source, sizes.Draw(rt, "units")))
			case action < 5: // many that nobody has seen before
				for range rapid.IntRange(1, 12).Draw(rt, "new") {
					strangers++
					open = append(open, r.open(fmt.Sprint("10.2.", strangers>>8, ".", strangers&255), []uint64{1448}))
				}
			case action < 6 && len(open) > 0:
				open[rapid.IntRange(0, len(open)-1).Draw(rt, "goes on")].more(sizes.Draw(rt, "units"))
			case action < 8 && len(open) > 0:
				i := rapid.IntRange(0, len(open)-1).Draw(rt, "closed")
				j := rapid.IntRange(i+1, min(i+8, len(open))).Draw(rt, "up to")
				for _, f := range open[i:j] {
					f.close()
				}
				open = append(open[:i], open[j:]...)
			default:
				r.advance(r.now+leaky.Second/1e6*leaky.Time(rapid.IntRange(1, 20_000).Draw(rt, "us")), onTime)
			}
		}
		for _, f := range open {
			f.close()
		}
		if len(r.lines.byKey) > 0 {
			rt.Fatal("a line is left")
		}
	})
}

// adversary opens a connection of one of sources as soon as the last one of its kind has sent
// its unit, at most so many at a time, for d. It returns what an upload and the others got.
func adversary(t *testing.T, source func(i int) string, atOnce int, d time.Duration) (upload, others float64) {
	r := newFairRig(t, t.Fatalf)
	r.open("10.0.0.1", slicesOf(1448, 100_000))
	var flows []*fairFlow
	for end := r.now + leaky.FromDuration(d); r.now < end; {
		for i := 0; i < len(flows); i++ {
			if len(flows[i].left) == 0 {
				flows[i].close()
				flows = append(flows[:i], flows[i+1:]...)
				i--
			}
		}
		for len(flows) < atOnce {
			flows = append(flows, r.open(source(r.ids), []uint64{1448}))
		}
		r.advance(r.now+leaky.Second/1e5, onTime)
	}
	upload = r.sources.served["10.0.0.1"]
	for _, n := range r.sources.served {
		others += n
	}
	for _, l := range r.lines.byKey {
		if n := len(l.shares); n > 200 {
			t.Errorf("%d shares are kept", n)
		}
	}
	return upload, others - upload
}

func slicesOf(size uint64, n int) []uint64 {
	all := make([]uint64, n)
	for i := range all {
		all[i] = size
	}
	return all
}

// Who opens a connection for each unit has no more than who is there.
func TestReconnectingGainsNothing(t *testing.T) {
	one := func(int) string { return "10.0.0.2" }
	each := func(i int) string { return netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).String() }
	for name, tt := range map[string]struct {
		source func(int) string
		atOnce int
		want   float64 // of all, for the upload
	}{
		"one source, one at a time":      {one, 1, 1. / 2},
		"one source, ten at a time":      {one, 10, 1. / 2},
		"new sources, one at a time":     {each, 1, 1. / 2},
		"new sources, four at a time":    {each, 4, 1. / 5},
		"new sources, hundred at a time": {each, 100, 1. / 101},
	} {
		upload, others := adversary(t, tt.source, tt.atOnce, 5*time.Second)
		t.Logf("%s: %.0f : %.0f bytes", name, upload, others)
		if off := (upload - tt.want*(upload+others)) / 1448; off < -(1+few(tt.atOnce+1)) || off > 1+few(tt.atOnce+1) {
			t.Errorf("%s: the upload has %.0f bytes of %.0f, %.1f units from its part", name, upload, upload+others, off)
		}
	}
}
