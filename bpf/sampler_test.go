package bpf

import (
	"math"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/topk"
)

// rankBench has the programs under a policy, and a plane that ranks sources by their samples.
type rankBench struct {
	*bench
	plane *Plane
}

func newRankBench(t *testing.T, mode shaper.AttachMode, limits ...shaper.Limit) *rankBench {
	t.Helper()
	b := newVariant(t, kernelConfig{Mode: programModes[mode], Ethernet: 1, Keep: 1}, nil)
	s, clock := shaper.New(1024), pacer.NewClock()
	policy, err := s.Compile(attachHere(limits...), nil, []shaper.Attachment{{Name: "here"}}, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	b.loadPolicy(t, policy)
	s.Swap(policy, 0)
	n, err := b.assignNumbers(policy, []shaper.Attachment{{Name: "here"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	sampler, err := newSampler(b.kernel)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sampler.close)
	return &rankBench{b, &Plane{kernel: b.kernel, sampler: sampler, shaper: s, clock: clock, policy: policy, numbers: n}}
}

// send runs a datagram of a source the given number of times.
func (r *rankBench) send(t *testing.T, source, times int) {
	t.Helper()
	packet := datagram(0)
	packet[28], packet[29] = byte(source>>8), byte(source)
	if _, err := r.ShaperdTc.Run(&ebpf.RunOptions{Data: packet, Repeat: uint32(times)}); err != nil {
		t.Fatal(err)
	}
}

func (r *rankBench) updateRankings(t *testing.T) {
	t.Helper()
	if err := r.plane.updateRankings(); err != nil {
		t.Fatal(err)
	}
}

// TestRankings_HeaviestFirst sends from 1,000 sources, ten of them with much more traffic: these are
// ranked as the heaviest, with their actual share.
func TestRankings_HeaviestFirst(t *testing.T) {
	t.Parallel()
	const (
		sources = 1000
		heavies = 10
		rounds  = 10
		each    = 4 // packets of a light source in a round; a heavy one sends 100 times as many
	)
	for _, c := range []struct {
		name     string
		mode     shaper.AttachMode
		limit    shaper.Limit
		by       topk.SortKey
		distance float64
	}{
		{"bytes", shaper.AttachShape, shaper.Limit{Rate: 1e12, MaxDelay: time.Second}, topk.ByRate, sampleDistance[0]},
		{"drops", shaper.AttachPolice, shaper.Limit{Packets: shaper.Frequency{N: 1, Per: time.Hour}}, topk.ByDrops, sampleDistance[1]},
		{"blocked", shaper.AttachPolice, shaper.Limit{Block: true}, topk.ByDrops, sampleDistance[1]},
		{"waits", shaper.AttachShape, shaper.Limit{Packets: perSecond(10_000), MaxDelay: time.Hour}, topk.ByDelay, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.limit.Name = "of"
			if !c.limit.Block {
				c.limit.Key = shaper.KeySource
			}
			r := newRankBench(t, c.mode, c.limit)
			total, start := 0.0, time.Now()
			for range rounds {
				for source := range sources {
					n := each
					if source < heavies {
						n *= 100
					}
					r.send(t, source, n)
					total += float64(n)
				}
				r.updateRankings(t)
			}
			now := r.plane.clock.Now()
			share := each * 100 * rounds / total
			all := 0.0
			for _, prefix := range r.plane.shaper.TopPrefixes(c.by, 10, now) {
				all += prefix.Weight[c.by].Value
			}
			for i, heavy := range r.plane.shaper.TopSources(c.by, heavies, now) {
				a := heavy.Key.As4()
				if source := int(a[2])<<8 | int(a[3]); a[0] != 10 || source >= heavies {
					t.Errorf("source %d of the heaviest is %v", i, heavy.Key)
				}
				if c.distance == 0 {
					continue
				}
				// Within six standard deviations of the sampling error: one of 10^7 runs has more.
				is, err := heavy.Weight[c.by].Value/all, heavy.Weight[c.by].Error/all
				sigma := share / math.Sqrt(total*share/c.distance)
				if is-err < share-6*sigma-err || is-err > share+6*sigma {
					t.Errorf("%v: %.1f %% of all, at most %.1f %% too many, want %.1f %%", heavy.Key, 100*is, 100*err, 100*share)
				}
			}
			if c.limit.Block {
				return
			}
			keys := r.plane.policy.State(0).Keys.Heaviest(c.by, heavies, now)
			for i, heavy := range keys {
				prefix, _ := r.plane.policy.SourcePrefix(0, heavy.Key)
				if a := prefix.Addr().As4(); prefix.Bits() != 32 || a[2] != 0 || a[3] >= heavies {
					t.Errorf("key %d of the heaviest is %v", i, prefix)
				}
			}
			if len(keys) != heavies {
				t.Errorf("%d keys are heavy", len(keys))
			}
			// The total weight decays only by the duration of the test.
			unit := map[topk.SortKey]float64{topk.ByRate: 100, topk.ByDrops: 1}[c.by]
			half := c.by.HalfLife()
			weighs, faded := all*half.Seconds()/math.Ln2, math.Exp2(-float64(time.Since(start))/float64(half))
			if c.distance > 0 && (weighs > 1.1*unit*total || weighs < 0.9*faded*unit*total) {
				t.Errorf("all weigh %.0f, want %.0f", weighs, unit*total)
			}
		})
	}
}

// TestSampler_RingOverflow overflows the sample ring: the loss is counted, the remaining samples
// represent the lost ones, and samples of refused packets leave space for others.
func TestSampler_RingOverflow(t *testing.T) {
	t.Parallel()
	const flood = 1_000_000
	drop := shaper.Limit{Name: "drop", Block: true}
	drop.Match.Source = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}
	r := newRankBench(t, shaper.AttachPolice, drop, shaper.Limit{Name: "pass", Rate: 1e12, MaxDelay: time.Second})
	for range 3 {
		r.send(t, 1, flood)
		r.send(t, 256, 64*100)
		was := r.plane.sampler.lost
		samples, weight, err := r.plane.sampler.readSamples()
		if err != nil {
			t.Fatal(err)
		}
		var got [2]float64
		for i := range samples {
			got[samples[i].Refused]++
		}
		lost := r.plane.sampler.lost.Samples[1] - was.Samples[1]
		t.Logf("%v samples, %d lost, each for %.0f packets", got, lost, weight)
		if represented := got[1] * weight[1]; lost < flood/16/2 || represented < 0.9*flood || represented > 1.1*flood {
			t.Errorf("%v samples represent %.0f packets, want %d", got, represented, flood)
		}
		if got[0] < 50 || got[0] > 200 || r.plane.sampler.lost.Samples[0] > 0 {
			t.Errorf("%.0f samples of 6,400 packets that passed, and %d lost", got[0], r.plane.sampler.lost.Samples[0])
		}
		if cap(samples) > 2*maxSamples {
			t.Errorf("memory for %d samples", cap(samples))
		}
	}
	for range 2 {
		r.send(t, 256, flood)
	}
	// A run that a signal interrupts is repeated.
	if state, err := r.readState(1); err != nil || state.Admitted[0][1]+state.Admitted[1][1] < 3*6400+2*flood {
		t.Errorf("%v taken, %v", state.Admitted, err)
	}
	if _, weight, err := r.plane.sampler.readSamples(); err != nil || r.plane.sampler.lost.Samples[0] == 0 || weight[0] <= 64 {
		t.Errorf("%v, %v: want a full ring", r.plane.sampler.lost, err)
	}
}

// TestPlane_Rankings ranks a source that sends through an interface.
func TestPlane_Rankings(t *testing.T) {
	w := newWire(t, "rank")
	p := openPlane(t)
	p.apply([]shaper.Limit{tenAnHour("here")}, shaper.Attachment{Name: "here", Interfaces: []string{"rank0"}, Mode: shaper.AttachPolice})
	within(t, 10*time.Second, func() bool {
		w.send(7, 200)
		heavy := p.shaper.TopSources(topk.ByDrops, 1, p.clock.Now())
		return len(heavy) == 1 && heavy[0].Key == netip.MustParseAddr("10.0.0.7")
	})
	keys := p.policy.State(0).Keys.Heaviest(topk.ByDrops, 2, p.clock.Now())
	if len(keys) != 1 || p.policy.DescribeKey(0, keys[0].Key) != "source 10.0.0.7/32" {
		t.Errorf("heavy keys %+v", keys)
	}
}
