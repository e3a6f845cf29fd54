package conn

import (
	"fmt"
	"math"
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// ideal is fluid fair queueing: all service is shared, by weight, by the nodes that are backlogged at that
// moment. It compares what nodes really receive with that, and with each other.
type ideal struct {
	fatalf        func(string, ...any)
	waiting       map[string]*idealFlow
	served        map[string]float64
	unit          float64 // the most that leaves at once
	maxBacklogged int     // nodes backlogged at once

	weights map[string]float64 // 1 if it has no entry
	least   float64            // of the weights of nodes that were ever backlogged

	beside *float64 // the most that all nodes weighed at once, also those of other ideals that share the service; nil without
}

// idealFlow is a node during one backlogged period.
type idealFlow struct {
	deficit, best float64                // its fair share less its service, and the minimum of that
	served        bool                   // it was served once
	lead          map[string]*[2]float64 // the minimum of the lead of another for its weight, and the same since served
}

func newIdeal(fatalf func(string, ...any)) *ideal {
	return &ideal{fatalf: fatalf, waiting: map[string]*idealFlow{}, served: map[string]float64{}, weights: map[string]float64{}, least: math.Inf(1)}
}

// harmonic returns 1 + 1/2 + ... + 1/n.
func harmonic(n int) float64 { return harmonicOf(1, n) }

// harmonicOf returns r + r/(r+1) + ... + r/(r+n-1): what a node of n may lag whose weight is r times the least.
func harmonicOf(r float64, n int) float64 {
	sum := r
	for i := 1; i < n; i++ {
		sum += r / (r + float64(i))
	}
	return sum
}

func (d *ideal) weight(server string) float64 {
	if w := d.weights[server]; w > 0 {
		return w
	}
	return 1
}

// lag is how many units a node may lag behind its share.
func (d *ideal) lag(server string) float64 {
	if d.beside != nil {
		sum, w := d.weight(server), d.weight(server)
		for k := w + 1; k <= *d.beside; k++ {
			sum += w / k
		}
		return sum
	}
	return harmonicOf(d.weight(server)/d.least, d.maxBacklogged)
}

func (d *ideal) activate(server string) {
	if d.waiting[server] == nil {
		d.waiting[server] = &idealFlow{lead: map[string]*[2]float64{}}
		d.maxBacklogged = max(d.maxBacklogged, len(d.waiting))
		d.least = min(d.least, d.weight(server))
	}
}

func (d *ideal) deactivate(server string) { delete(d.waiting, server) }

// tagError is by how much the tags of two nodes together differ from their service, in bytes for the weight: each leaves out less than 1.
const tagError = 2 / float64(byteWeight)

// serve records that server received n.
func (d *ideal) serve(server string, n float64) {
	d.unit = max(d.unit, n)
	weights := 0.0
	for name := range d.waiting {
		weights += d.weight(name)
	}
	w := d.weight(server)
	for name, g := range d.waiting {
		v := d.weight(name)
		bound := (1+d.lag(name))*d.unit + v*tagError
		g.deficit += n * v / weights
		if name == server {
			g.deficit -= n
			g.best = min(g.best, g.deficit)
			g.served = true
			continue
		}
		if g.deficit-g.best > bound && d.beside == nil {
			d.fatalf("%s got %.2f units less than its fair share, of %d, want at most %.2f", name, (g.deficit-g.best)/d.unit, len(d.waiting), bound/d.unit)
		}
		lead := g.lead[server]
		if lead == nil {
			lead = &[2]float64{math.Inf(1), math.Inf(1)}
			g.lead[server] = lead
		}
		ahead := d.served[server]/w - d.served[name]/v
		lead[0] = min(lead[0], ahead)
		first := (1+d.lag(server))*d.unit/w + tagError
		if ahead += n / w; ahead-lead[0] > first {
			d.fatalf("%s got %.2f units for its weight more than %s, which was backlogged, want at most %.2f", server, (ahead-lead[0])/d.unit, name, first/d.unit)
		}
		if g.served {
			lead[1] = min(lead[1], ahead-n/w)
			if most := (1/w+1/v)*d.unit + tagError; ahead-lead[1] > most {
				d.fatalf("%s got %.3f units for its weight more than %s, which was backlogged and had been served, want at most %.3f", server, (ahead-lead[1])/d.unit, name, most/d.unit)
			}
		}
	}
	d.served[server] += n
}

// fairRig sends the units of sources and their flows through one queue.
type fairRig struct {
	*rig
	sources *ideal
	flows   map[string]*ideal // by source
	waits   map[string]map[*fairFlow]bool
	ids     int
	floors  *floorOracle // nil without
}

// idealOf returns the ideal of a source.
func (r *fairRig) idealOf(source string) *ideal {
	if r.floors != nil {
		if class := r.floors.classOf(source); class != nil {
			return class.members
		}
	}
	return r.sources
}

// fairFlow is a flow with a list of units of different sizes, in bytes.
type fairFlow struct {
	unit
	rig  *fairRig
	name [2]string // of its source, and its own
	path []hop
	left []uint64
}

func newFairRig(t *testing.T, fatalf func(string, ...any), classes ...shaper.TrafficClass) *fairRig {
	return &fairRig{
		rig: newClassRig(t, classes, shaper.Limit{Name: "all", Rate: 8e6}), sources: newIdeal(fatalf),
		flows: map[string]*ideal{}, waits: map[string]map[*fairFlow]bool{},
	}
}

// open starts a flow of source that sends units.
func (r *fairRig) open(source string, units []uint64) *fairFlow {
	r.ids++
	addr := netip.MustParseAddr(source)
	f := &fairFlow{rig: r, name: [2]string{source, fmt.Sprint(source, " flow ", r.ids)}, left: units}
	f.path = r.path(&shaper.Flow{Source: addr, Port: 1, Protocol: shaper.TCP, Connection: uint64(r.ids)})
	if r.flows[source] == nil {
		r.flows[source], r.waits[source] = newIdeal(r.sources.fatalf), map[*fairFlow]bool{}
		r.idealOf(source).weights[source] = float64(r.weightOf(source))
	}
	f.add(nil)
	return f
}

// add adds units to f.
func (f *fairFlow) add(units []uint64) {
	f.left = append(f.left, units...)
	if f.queued || len(f.left) == 0 {
		return
	}
	r := f.rig
	r.waits[f.name[0]][f] = true
	r.idealOf(f.name[0]).activate(f.name[0])
	r.floors.update()
	r.flows[f.name[0]].activate(f.name[1])
	f.unit = unit{owner: f, path: f.path, bytes: f.left[0]}
	r.scheduler.submit(&f.unit, r.now)
}

func (f *fairFlow) send(leaky.Time) (bytes, packets uint64, requeue bool) {
	n := f.left[0]
	f.rig.idealOf(f.name[0]).serve(f.name[0], float64(n))
	f.rig.floors.serve(f.name[0], float64(n))
	f.rig.flows[f.name[0]].serve(f.name[1], float64(n))
	if f.left = f.left[1:]; len(f.left) == 0 {
		f.deactivate()
		return n, 0, false
	}
	f.bytes = f.left[0]
	return n, 0, true
}

// deactivate records that f is not backlogged any more.
func (f *fairFlow) deactivate() {
	r := f.rig
	r.flows[f.name[0]].deactivate(f.name[1])
	if delete(r.waits[f.name[0]], f); len(r.waits[f.name[0]]) == 0 {
		r.idealOf(f.name[0]).deactivate(f.name[0])
		r.floors.update()
	}
}

// close ends f, early or after all units.
func (f *fairFlow) close() {
	f.deactivate()
	f.rig.scheduler.withdraw(f.rig.now, &f.unit)
	f.rig.scheduler.releasePath(f.path, f.rig.now)
}

func (f *fairFlow) resubmit(leaky.Time) {}

func (f *fairFlow) refused(*queue, shaper.Reason) {}

// Whatever sources and flows open, send, close and reset, and however often they return: each gets its
// fair share while it is backlogged, except for a few units.
func TestQueue_AgainstIdealFairQueueing(t *testing.T) {
	testAgainstIdeal(t, func(*rapid.T) []shaper.TrafficClass { return nil })
}

// The same by the weights of classes.
func TestQueue_AgainstIdealWeightedFairQueueing(t *testing.T) {
	testAgainstIdeal(t, func(rt *rapid.T) (classes []shaper.TrafficClass) {
		for _, prefix := range []string{"10.1.0.1/32", "10.1.0.2/31", "10.2.0.0/16", "10.0.0.1/32", "10.0.0.2/32", "10.0.0.3/32"} {
			classes = append(classes, classOf(prefix, rapid.OneOf(rapid.IntRange(1, 5), rapid.IntRange(1, shaper.MaxWeight)).Draw(rt, "weight of "+prefix)))
		}
		return classes
	})
}

// classOf is a class of the sources of a prefix, and has its name.
func classOf(prefix string, weight int) shaper.TrafficClass {
	return shaper.TrafficClass{Name: prefix, Match: shaper.Match{Source: []netip.Prefix{netip.MustParsePrefix(prefix)}}, Weight: weight}
}

func testAgainstIdeal(t *testing.T, classes func(*rapid.T) []shaper.TrafficClass) {
	testChurnAgainstIdeal(t, func(rt *rapid.T) *fairRig { return newFairRig(t, rt.Fatalf, classes(rt)...) })
}

func testChurnAgainstIdeal(t *testing.T, rig func(*rapid.T) *fairRig) {
	rapid.Check(t, func(rt *rapid.T) {
		r := rig(rt)
		var open []*fairFlow
		unverified := 0
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
			case action < 5: // many new ones
				for range rapid.IntRange(1, 12).Draw(rt, "new") {
					unverified++
					open = append(open, r.open(fmt.Sprint("10.2.", unverified>>8, ".", unverified&255), []uint64{1448}))
				}
			case action < 6 && len(open) > 0:
				open[rapid.IntRange(0, len(open)-1).Draw(rt, "goes on")].add(sizes.Draw(rt, "units"))
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
		if len(r.scheduler.byKey) > 0 {
			rt.Fatal("a queue is left")
		}
	})
}

// adversary opens a connection of a source as soon as the previous one has sent its unit, at most
// atOnce at a time, for d. It returns what an upload and the others received.
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
	for _, q := range r.scheduler.byKey {
		if n := len(q.sources); n > 200 {
			t.Errorf("%d idle sources are kept", n)
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

// A source that opens a connection for each unit gets no more than one that stays.
func TestReconnectingGainsNothing(t *testing.T) {
	one := func(int) string { return "10.0.0.2" }
	each := func(i int) string { return netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).String() }
	for name, tt := range map[string]struct {
		source func(int) string
		atOnce int
		want   float64 // the upload's part of all
	}{
		"one source, one at a time":      {one, 1, 1. / 2},
		"one source, ten at a time":      {one, 10, 1. / 2},
		"new sources, one at a time":     {each, 1, 1. / 2},
		"new sources, four at a time":    {each, 4, 1. / 5},
		"new sources, hundred at a time": {each, 100, 1. / 101},
	} {
		upload, others := adversary(t, tt.source, tt.atOnce, 5*time.Second)
		t.Logf("%s: %.0f : %.0f bytes", name, upload, others)
		if off := (upload - tt.want*(upload+others)) / 1448; off < -(1+harmonic(tt.atOnce+1)) || off > 1+harmonic(tt.atOnce+1) {
			t.Errorf("%s: the upload got %.0f bytes of %.0f, %.1f units from its share", name, upload, upload+others, off)
		}
	}
}
