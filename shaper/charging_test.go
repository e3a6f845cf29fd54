package shaper

import (
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
)

// departed is a unit that has left.
type departed struct {
	at    leaky.Time
	bytes uint64
}

// sigma returns the largest excess of the departed units over rate × time in any interval,
// in bytes with exact fractions, and without using buckets.
func sigma(all []departed, rate uint64) float64 {
	slices.SortStableFunc(all, func(a, b departed) int {
		if a.at < b.at {
			return -1
		}
		return 1
	})
	var sum, low, worst big.Int // bits × ticks a second
	last := leaky.Time(0)
	for i, u := range all {
		if i > 0 {
			sum.Sub(&sum, new(big.Int).Mul(big.NewInt(int64(rate)), big.NewInt(int64(u.at-last))))
		}
		last = u.at
		if sum.Cmp(&low) < 0 {
			low.Set(&sum)
		}
		sum.Add(&sum, new(big.Int).Mul(big.NewInt(int64(8*u.bytes)), big.NewInt(int64(leaky.Second))))
		if over := new(big.Int).Sub(&sum, &low); over.Cmp(&worst) > 0 {
			worst.Set(over)
		}
	}
	f, _ := new(big.Rat).SetFrac(&worst, big.NewInt(int64(8*leaky.Second))).Float64()
	return f
}

type arrival struct {
	at     leaky.Time
	source uint32
	bytes  uint64
}

func at(d time.Duration) leaky.Time { return leaky.Second + leaky.FromDuration(d) }

// bunchedLoad is an attack: each source fills its own limit, so that a last packet of each
// of many sources may leave at the same instant.
func bunchedLoad(total, narrow float64, span time.Duration) (all []arrival) {
	now, end := time.Duration(0), span-5*time.Millisecond
	for source := uint32(1); now < end; source++ {
		used := 0.0
		for ahead := narrow / 8 * (end - now).Seconds(); ahead >= 1; {
			n := min(ahead, 1400)
			all = append(all, arrival{at(now), source, uint64(n)})
			used += float64(uint64(n))
			ahead -= n
		}
		all = append(all, arrival{at(now), source, 1400})
		used += 1400
		now += time.Duration(used * 8 / total * 1e9)
	}
	return all
}

// fillerLoad is bunchedLoad with packets of one byte, for a limit of packets.
func fillerLoad(rate int, span time.Duration) (all []arrival) {
	now, end := time.Duration(0), span-5*time.Millisecond
	for source := uint32(1); now < end; source++ {
		used := 1400
		for range int((end - now).Seconds() * float64(rate)) {
			all = append(all, arrival{at(now), source, 1})
			used++
		}
		all = append(all, arrival{at(now), source, 1400})
		now += time.Duration(float64(used) / 10e6 * 1e9)
	}
	return all
}

func rndOf(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, seed)) }

// burstyLoad is ordinary traffic: 40 sources with bursts of 60 kB each.
func burstyLoad(rnd *rand.Rand, load float64) (all []arrival) {
	for source := range uint32(40) {
		for t := time.Duration(0); t < 3*time.Second; {
			t += time.Duration(rnd.ExpFloat64() * 60e3 / (10e6 * load / 40) * 1e9)
			for k := range 43 {
				all = append(all, arrival{at(t + time.Duration(k)*112*time.Microsecond), source + 1, 1400})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b arrival) int {
		if a.at < b.at {
			return -1
		} else if a.at > b.at {
			return 1
		}
		return 0
	})
	return all
}

// tandem holds the units that leave a limit of all of 80 Mbit/s and a narrow one of each
// source.
type tandem struct {
	policy  *Policy
	all     []departed
	sources map[uint32][]departed
	refused map[string]int
	wait    time.Duration // mean delay
}

func runTandem(t *testing.T, narrow Limit, load []arrival) tandem {
	t.Helper()
	s := New(10000)
	uplink := Match{Attach: []string{"uplink"}}
	narrow.Name, narrow.Match, narrow.Key, narrow.IPv4Prefix, narrow.IPv6Prefix = "source", uplink, KeySource, 32, 64
	narrow.MaxDelay = 200 * time.Millisecond
	p := mustCompile(t, s, []Limit{{Name: "all", Match: uplink, Rate: 80e6, MaxDelay: 200 * time.Millisecond}, narrow}, nil, Attachment{Name: "uplink"})
	s.Swap(p, leaky.Second)
	if p.Calendars() != 0b10 || p.ChargedOnArrival() != 0 {
		t.Fatalf("calendars %b, charged on arrival %b", p.Calendars(), p.ChargedOnArrival())
	}
	r := tandem{policy: p, sources: map[uint32][]departed{}, refused: map[string]int{}}
	for _, a := range load {
		f := fromIPv4(a.source)
		f.Origin = p.AttachmentIndex("uplink")
		route := p.Route(f)
		d := s.Shape(p, f, route, route.ToDownstream, a.bytes, 1, a.at)
		if d.Verdict == Refuse {
			r.refused[p.Limit(d.Limit).Name]++
			continue
		}
		if wait := (d.Depart - a.at).Duration(); wait > 200*time.Millisecond {
			t.Fatalf("a unit waits for %v", wait)
		}
		before := r.sources[a.source]
		if n := len(before); n > 0 && before[n-1].at > d.Depart {
			t.Fatalf("a unit of source %d overtakes another of it", a.source)
		}
		r.sources[a.source] = append(before, departed{d.Depart, a.bytes})
		r.all = append(r.all, departed{d.Depart, a.bytes})
		r.wait += (d.Depart - a.at).Duration()
	}
	r.wait /= time.Duration(len(r.all))
	return r
}

// Sources whose own limits delay their units can make them all leave at once; the limit of
// all still stays within its rate in every interval.
func TestShape_TandemStaysWithinRate(t *testing.T) {
	const span = 200 * time.Millisecond
	for _, tt := range []struct {
		name   string
		narrow Limit
		load   []arrival
		was    int // excess in bytes when all limits charged on arrival
		least  int // minimum of departed units: 0.97 of an ideal queue
	}{
		{"80 kbit/s", Limit{Rate: 80e3}, bunchedLoad(80e6, 80e3, span), 1_220_000, 1900},
		{"10 Mbit/s", Limit{Rate: 10e6}, bunchedLoad(80e6, 10e6, span), 670_000, 1370},
		{"100 packets/s", Limit{Packets: Frequency{100, time.Second}}, fillerLoad(100, span), 1_840_000, 0},
		{"50 % load", Limit{Rate: 10e6}, burstyLoad(rndOf(7), .5), 36_000, 12_255},
		{"90 % load", Limit{Rate: 10e6}, burstyLoad(rndOf(7), .9), 215_000, 20_000},
		{"150 % load", Limit{Rate: 10e6}, burstyLoad(rndOf(7), 1.5), 168_000, 23_000},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := runTandem(t, tt.narrow, tt.load)
			slack := float64(r.policy.Slots(1)[0].Slack(0).Duration()) * 80e6 / 8e9
			got := sigma(r.all, 80e6)
			t.Logf("%d of %d left, refused by %v, mean wait %v; excess %.0f bytes, allowed %.0f, %d when charged on arrival", len(r.all), len(tt.load), r.refused, r.wait, got, slack, tt.was)
			if got > slack || slack > 15_000 {
				t.Errorf("excess %.0f bytes, allowed %.0f", got, slack)
			}
			if len(r.all) < tt.least {
				t.Errorf("%d units left, want at least %d", len(r.all), tt.least)
			}
			for source, units := range r.sources {
				if tt.narrow.Rate > 0 {
					if got := sigma(units, tt.narrow.Rate); got > 1401 {
						t.Fatalf("excess of %.1f bytes of source %d", got, source)
					}
				}
			}
		})
	}
}

// While one source is delayed by up to 200 ms, other sources within their rate pass at once.
func TestShape_TandemIsolatesSources(t *testing.T) {
	var load []arrival
	for ms := range 1000 {
		load = append(load, arrival{at(time.Duration(ms) * time.Millisecond), 1, 1400})
		if ms%10 == 5 {
			load = append(load, arrival{at(time.Duration(ms) * time.Millisecond), 2 + uint32(ms)/10, 1400})
		}
	}
	r := runTandem(t, Limit{Rate: 1e6}, load)
	if r.refused["source"] < 500 || r.refused["all"] > 0 {
		t.Fatalf("refused by %v", r.refused)
	}
	for source, units := range r.sources {
		if source > 1 {
			came := at(time.Duration(int(source-2)*10+5) * time.Millisecond)
			if wait := (units[0].at - came).Duration(); wait > time.Millisecond {
				t.Errorf("source %d waits for %v", source, wait)
			}
		}
	}
}

// Random units under random limits, some of which overlap: every bucket stays within its
// envelope, whatever other limits delay.
func TestShape_EveryBucketStaysWithinEnvelope(t *testing.T) {
	rnd := testutil.Rand(t)
	checked, delayed := 0, 0
	for round := 0; round < 60 || checked < 500 || delayed < 1000; round++ {
		if round == 600 {
			t.Fatalf("%d buckets, %d units delayed", checked, delayed)
		}
		s := New(10000)
		limits := randomLimits(rnd, 2+rnd.IntN(4))
		for i := range limits {
			limits[i].Key &= KeySource | KeyPort | KeyConnection
			limits[i].Match.Attach = []string{"uplink"}
			if limits[i].MaxDelay == 0 {
				limits[i].MaxDelay = 20 * time.Millisecond
			}
		}
		p := mustCompile(t, s, limits, nil, Attachment{Name: "uplink"})
		s.Swap(p, leaky.Second)
		type meter struct {
			key     Key
			limit   int
			packets bool
		}
		out := map[meter][]departed{}
		largest := [MaxLimits]uint64{}
		now := leaky.Second
		gap := leaky.FromDuration(time.Duration(10+rnd.IntN(3000)) * time.Microsecond)
		for range 1500 {
			now += leaky.Time(rnd.Uint64N(uint64(gap)))
			f := randomFlow(rnd)
			f.Origin = p.AttachmentIndex("uplink")
			r := p.Route(f)
			bytes := 1 + rnd.Uint64N(1500)
			d := s.Shape(p, f, r, r.ToDownstream, bytes, 1, now)
			if d.Verdict == Refuse {
				continue
			}
			if d.Verdict == Delay {
				delayed++
			}
			for i := range r.ToDownstream.All {
				n := bytes + uint64(p.Limit(i).Overhead)
				largest[i] = max(largest[i], n)
				key := p.Key(i, f, r)
				if p.Limit(i).Rate > 0 {
					out[meter{key, i, false}] = append(out[meter{key, i, false}], departed{d.Depart, n})
				}
				if p.Limit(i).Packets.N > 0 {
					out[meter{key, i, true}] = append(out[meter{key, i, true}], departed{d.Depart, 1})
				}
			}
		}
		for m, units := range out {
			if p.ChargedOnArrival()&(1<<m.limit) != 0 {
				continue
			}
			l, shape := p.Limit(m.limit), p.Shape(m.limit)
			rate, kind, burst, unit := l.Rate, 0, shape.BytesBurst, shape.Bytes.Cost(largest[m.limit])
			if m.packets {
				rate, kind, burst, unit = 8*l.Packets.N, 1, shape.PacketsBurst, shape.Packets.Cost(1)
			}
			allowed := burst + unit
			if p.Calendars()&(1<<m.limit) != 0 {
				allowed = burst + p.Slots(m.limit)[kind].Slack(unit)
			}
			bound := float64(rate)/8*float64(allowed)/float64(leaky.Second)*(1+1e-6) + 1e-3
			if got := sigma(units, rate); got > bound {
				t.Fatalf("limit %+v: excess %.2f, allowed %.2f", *l, got, bound)
			}
			checked++
		}
	}
}
