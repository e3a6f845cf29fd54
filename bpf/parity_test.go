package bpf

import (
	"bytes"
	"cmp"
	"errors"
	"flag"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

var (
	policies = flag.Int("policies", 60, "random policies of the parity test")
	packets  = flag.Int("packets", 5000, "random packets for each of them")
)

// raceDetector is set by race_test.go in builds with the race detector.
var raceDetector bool

func newSeededRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 0)) }

// skb is struct __sk_buff, the context of a test run.
type skb struct {
	_           [2]uint32
	Mark        uint32
	_           [35]uint32
	Tstamp      uint64
	_           uint32
	GSOSegments uint32
	_           uint64
	GSOSize     uint32
	_           uint32
	_           uint64
}

// bench has the programs under test, with a clock that the test sets.
type bench struct {
	*kernel
	kernelPrograms
	kernelVariables
	out [4096]byte
}

// testKeys is more than any test uses, so that none is evicted.
const testKeys = 1 << 17

var longestBurst = leaky.FromDuration(shaper.MaxBurstTime)

func newBench(t testing.TB, at kernelConfig) *bench {
	return newVariant(t, at, map[string]any{kernelVarUnderTest: uint32(1)})
}

func newVariant(t testing.TB, at kernelConfig, variables map[string]any) *bench {
	t.Helper()
	return newSized(t, testKeys, at, variables)
}

func newSized(t testing.TB, keys int, at kernelConfig, variables map[string]any) *bench {
	t.Helper()
	dir := filepath.Join(pins, strings.NewReplacer("/", "-", ".", "-").Replace(t.Name()))
	k, err := openKernel(dir, keys)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		k.close()
		_ = os.RemoveAll(dir) // a kernel takes 100 MB
	})
	b := &bench{kernel: k}
	var objects struct {
		kernelPrograms
		kernelVariables
	}
	at.MaxLimits = cmp.Or(at.MaxLimits, fewLimits)
	if err := k.load(at, variables, &objects); err != nil {
		t.Fatalf("%+v", err)
	}
	b.kernelPrograms, b.kernelVariables = objects.kernelPrograms, objects.kernelVariables
	t.Cleanup(func() { b.kernelPrograms.Close() })
	return b
}

// Actions of tc and XDP.
const (
	tcNext  = math.MaxUint32
	tcDrop  = 2
	xdpDrop = 1
	xdpPass = 2
)

// run runs a program on a packet at now, and returns the action, the decision and the
// packet's timestamp.
func (b *bench) run(t testing.TB, s *sample, now uint64, run func(*bench, testing.TB, *sample) (uint32, uint64)) (action uint32, d kernelDecision, stamp uint64) {
	t.Helper()
	if err := errors.Join(b.TestNow.Set(now), b.TestDecision.Set(kernelDecision{})); err != nil {
		t.Fatal(err)
	}
	action, stamp = run(b, t, s)
	if err := b.TestDecision.Get(&d); err != nil {
		t.Fatal(err)
	}
	return action, d, stamp
}

func (b *bench) tc(t testing.TB, s *sample) (action uint32, stamp uint64) {
	in := skb{Mark: s.flow.Mark, Tstamp: s.stamp, GSOSize: s.gsoSize}
	if s.gsoSize > 0 {
		in.GSOSegments = uint32(s.segments)
	}
	var out skb
	options := &ebpf.RunOptions{Data: s.data, DataOut: b.out[:], Context: in, ContextOut: &out}
	action, err := b.ShaperdTc.Run(options)
	s.after = options.DataOut
	if err != nil {
		t.Fatalf("run: %v: %d bytes %+v %x", err, len(s.data), in, s.data[:min(len(s.data), 100)])
	}
	return action, out.Tstamp
}

func (b *bench) xdp(t testing.TB, s *sample) (action uint32, stamp uint64) {
	options := &ebpf.RunOptions{Data: s.data, DataOut: b.out[:]}
	action, err := b.ShaperdXdp.Run(options)
	s.after = options.DataOut
	if err != nil {
		t.Fatalf("run: %v: %d bytes, %x", err, len(s.data), s.data[:min(len(s.data), 100)])
	}
	return action, s.stamp
}

// wantDecision returns the decisions of package shaper on a packet, by limits that enforce and by those
// that observe, and whether any limit matches.
func wantDecision(s *shaper.Shaper, p *shaper.Policy, k *sample, now leaky.Time, police bool) (want, observed shaper.Decision, limited bool) {
	decide := s.Shape
	if police {
		decide = s.Decide
	}
	f := k.flow
	f.Origin = p.AttachmentIndex("here")
	r := p.Route(&f)
	r.ToDownstream = possibleLimits(p, k, f)
	if !k.ip || r.ToDownstream == 0 {
		return want, observed, false
	}
	var observing shaper.Set
	for i := range r.ToDownstream.All {
		if p.Limit(i).Observe {
			observing |= 1 << i
		}
	}
	if observing != 0 {
		observed = decide(p, &f, r, observing, k.bytes, k.segments, now)
	}
	return decide(p, &f, r, r.ToDownstream&^observing, k.bytes, k.segments, now), observed, true
}

// possibleLimits returns the limits that a packet is under, or may be under where its port or protocol
// is unknown.
func possibleLimits(p *shaper.Policy, k *sample, f shaper.Flow) (set shaper.Set) {
	ports, protocols := []uint16{f.Port}, []shaper.Protocol{f.Protocol}
	if k.anyPort {
		for i := range p.Len() {
			for _, r := range p.Limit(i).Match.Port {
				ports = append(ports, r.First)
			}
		}
	}
	if k.anyProtocol {
		protocols = []shaper.Protocol{0, shaper.TCP, shaper.UDP, shaper.ICMP}
	}
	for _, f.Port = range ports {
		for _, f.Protocol = range protocols {
			set |= p.Route(&f).ToDownstream
		}
	}
	return set
}

func testHashes(m *generator) (h hashes) {
	for i := range h {
		h[i] = [2]uint64{m.Uint64(), m.Uint64()}
	}
	return h
}

// TestParity runs random packets through package shaper and through the programs in
// the kernel: they must agree on every packet, to the tick.
func TestParity(t *testing.T) {
	t.Parallel()
	t.Run("tc", func(t *testing.T) { t.Parallel(); testParity(t, uint32(shaper.AttachShape), (*bench).tc) })
	t.Run("xdp", func(t *testing.T) { t.Parallel(); testParity(t, uint32(shaper.AttachPolice), (*bench).xdp) })
}

func testParity(t *testing.T, mode uint32, run func(*bench, testing.TB, *sample) (uint32, uint64)) {
	rnd := testutil.Rand(t)
	b := newBench(t, kernelConfig{AttachId: 3, Mode: mode, Ethernet: 1, Keep: 1, MaxLimits: shaper.MaxLimits})
	next, drop := uint32(tcNext), uint32(tcDrop)
	if mode == uint32(shaper.AttachPolice) {
		next, drop = xdpPass, xdpDrop
	}
	policies := *policies
	if raceDetector {
		policies /= 25 // a single goroutine has no races, and the run without the detector covers all
	}
	var delays, refusals, blocked, stamped, unlimited, byDSCP, byMark int
	var marks uint64
	total := 0
	few := func(n int) bool { return n < 1+total/5000 }
	for policy := 0; policy < policies || policy < 50*policies && (few(delays) || few(refusals) || few(blocked) || few(unlimited) || few(int(marks)) || few(byDSCP) || few(byMark)); policy++ {
		total += *packets
		m := newGenerator(rnd)
		h := testHashes(m)
		now := leaky.Time(m.Uint64N(uint64(leaky.Forever)/64)) * 64
		s := shaper.New(testKeys)
		b.clearState(t)
		limits := randomLimits(m)
		p, err := s.Compile(limits, nil, []shaper.Attachment{{Name: "here"}, {Name: "elsewhere"}}, asnTable(t, m), false)
		if err != nil {
			t.Fatal(err)
		}
		n := numbers{limits: map[string]uint32{}, attachments: map[string]uint32{"here": 3, "elsewhere": 9}}
		for i, l := range limits {
			n.limits[l.Name] = uint32(255 - i)
		}
		s.Swap(p, now)
		if err := b.swap(newImage(p, n, h, b.kernel.Buckets.MaxEntries()), nil, nil, nil); err != nil {
			t.Fatal(err)
		}
		marked, waits := make([]uint64, len(limits)), make([]shaper.Histogram, len(limits))
		for i := range *packets {
			now += m.pause()
			k := m.packet(uint64(now / 64))
			if mode == uint32(shaper.AttachPolice) {
				k.gsoSize, k.segments = 0, 1 // XDP runs before GRO
				k.flow.Mark = 0              // and before marks
			} else if m.IntN(10) == 0 {
				k.stamp = uint64(now/64) + m.Uint64N(1e8)
			}
			want, observed, limited := wantDecision(s, p, &k, now, mode == uint32(shaper.AttachPolice))
			action, got, stamp := b.run(t, &k, uint64(now/64), run)
			wantAction, wantStamp, wantData := next, k.stamp, k.data
			if limited {
				if want.Verdict == shaper.Refuse {
					wantAction = drop
				} else if mode == uint32(shaper.AttachShape) {
					wantStamp = max(wantStamp, uint64(want.Depart.Duration()))
				}
				if want.Verdict == shaper.Delay && (k.ecn == 1 || k.ecn == 2) && uint64(want.Depart-now) > markDelay(p.Limit(want.Limit), p.Shape(want.Limit)) {
					wantData = slices.Clone(k.data)
					setECN(wantData[k.l3:], 3)
					marked[want.Limit] += k.segments
				}
			}
			if !bytes.Equal(k.after, wantData) {
				t.Fatalf("policy %d, packet %d is\n%x after, want\n%x", policy, i, k.after, wantData)
			}
			number := uint32(math.MaxUint32)
			if want.Limit >= 0 {
				number = uint32(want.Limit)
			}
			if !limited {
				unlimited++
				if (got != kernelDecision{}) || action != wantAction || stamp != wantStamp {
					t.Fatalf("policy %d, packet %d, under no limit: %d %+v stamp %d, want stamp %d\n%x", policy, i, int32(action), got, stamp, wantStamp, k.data)
				}
				continue
			}
			var size, segments uint32
			if err := errors.Join(b.TestBytes.Get(&size), b.TestSegments.Get(&segments)); err != nil {
				t.Fatal(err)
			}
			if uint64(size) != k.bytes || uint64(segments) != k.segments {
				t.Fatalf("policy %d, packet %d: %d bytes in %d segments, want %d in %d\n%+v\n%x", policy, i, size, segments, k.bytes, k.segments, k.flow, k.data)
			}
			if want.Verdict == shaper.Refuse && mode == uint32(shaper.AttachPolice) && p.Calendars()&(1<<want.Limit) != 0 && leaky.Time(got.Depart) <= want.Depart {
				got.Depart = uint64(want.Depart) // the programs stop searching a calendar when one of its meters refuses
			}
			if action != wantAction || stamp != wantStamp && action != drop || got.Verdict != uint32(want.Verdict) ||
				got.Reason != uint32(want.Reason) || leaky.Time(got.Depart) != want.Depart || got.Limit != number {
				t.Fatalf("policy %d, packet %d at %d: kernel %d %+v stamp %d, shaper %+v stamp %d\n%+v\n%+v\n%x",
					policy, i, now, int32(action), got, stamp, want, wantStamp, k.flow, *p.Limit(max(want.Limit, 0)), k.data)
			}
			for _, d := range []shaper.Decision{want, observed} {
				if d.Verdict == shaper.Delay {
					waits[d.Limit].Observe(d.Depart.Sub(now).Duration())
				}
			}
			if want.Limit >= 0 && want.Verdict != shaper.Pass {
				byDSCP += min(len(p.Limit(want.Limit).Match.DSCP), 1)
				byMark += min(len(p.Limit(want.Limit).Match.Mark), 1)
			}
			switch want.Verdict {
			case shaper.Delay:
				delays++
			case shaper.Refuse:
				refusals++
				if want.Reason == shaper.Blocked {
					blocked++
				}
			}
			if k.stamp > 0 && stamp == k.stamp {
				stamped++
			}
		}
		for i := range p.Len() {
			b.checkCounters(t, n.limits[p.Limit(i).Name], p.State(i), marked[i], &waits[i], mode == uint32(shaper.AttachPolice))
			marks += marked[i]
		}
	}
	if c, err := b.tableCounts(); err != nil || c.EvictedBacklogged > 0 || c.InsertFailed > 0 {
		t.Errorf("%+v, %v: the table is too small for this test", c, err)
	}
	t.Logf("%d packets: %d delayed, %d refused, %d of them blocked, %d marked, %d under no limit, %d kept a later timestamp, %d by limits of DSCPs, %d of marks", total, delays, refusals, blocked, marks, unlimited, stamped, byDSCP, byMark)
	for what, n := range map[string]int{"delays": delays, "refusals": refusals, "blocked": blocked, "packets under no limit": unlimited, "marks": int(marks), "decisions by DSCP": byDSCP, "decisions by mark": byMark} {
		if few(n) {
			t.Errorf("only %d %s", n, what)
		}
	}
	if mode == uint32(shaper.AttachShape) && stamped < 1+total/2000 {
		t.Errorf("only %d later timestamps", stamped)
	}
}

// checkCounters compares the programs' counters of a limit with package shaper's. When packets are
// policed none waits.
func (b *bench) checkCounters(t testing.TB, number uint32, want *shaper.LimitState, marked uint64, waits *shaper.Histogram, police bool) {
	t.Helper()
	got, err := b.readState(number)
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range []*shaper.Counters{&want.Bytes, &want.Packets} {
		pass, delay := c[shaper.Pass][shaper.None].Load(), c[shaper.Delay][shaper.ByRate].Load()
		if police {
			pass, delay = pass+delay, 0
		}
		refuse := c[shaper.Refuse][shaper.QueueFull].Load() + c[shaper.Refuse][shaper.Blocked].Load()
		if got.Admitted[0][i] != pass || got.Admitted[1][i] != delay || got.Refused[i] != refuse {
			t.Fatalf("limit %s counted %+v, want %d now, %d later and %d refused", want.Name, got, pass, delay, refuse)
		}
	}
	if got.Marked != marked {
		t.Fatalf("limit %s counted %d marks, want %d", want.Name, got.Marked, marked)
	}
	if police {
		waits = &shaper.Histogram{} // none waits
	}
	if got.DelaySum != waits.Sum.Load() {
		t.Fatalf("limit %s counted %d ns of waits, want %d", want.Name, got.DelaySum, waits.Sum.Load())
	}
	for class, n := range got.DelayHist {
		if want := waits.Counts[class].Load(); n != want {
			t.Fatalf("limit %d counted %d waits of class %d, want %d", number, n, class, want)
		}
	}
}

// clearState clears the buckets, calendars, counters and fragments.
func (b *bench) clearState(t testing.TB) {
	t.Helper()
	clear(b.buckets)
	clear(b.calendars)
	for number := range b.LimitCounters.MaxEntries() {
		if err := b.LimitCounters.Update(number, make([]kernelCounters, ebpf.MustPossibleCPU()), ebpf.UpdateAny); err != nil {
			t.Fatal(err)
		}
	}
	var key kernelFragmentKey
	for b.Fragments.NextKey(nil, &key) == nil {
		_ = b.Fragments.Delete(&key)
	}
}
