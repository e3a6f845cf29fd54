package bpf

import (
	"fmt"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

const packetsOfShares = 2000 // of each policy

// roundings bounds what all roundings add up to, in the ticks of a bucket's time.
const roundings = 2 * packetsOfShares

// TestShares_Parity runs random packets under shared limits through the programs and through vessels
// that leak, while leases and the parts of keys change and phases of leases pass between packets.
func TestShares_Parity(t *testing.T) {
	t.Parallel()
	t.Run("tc", func(t *testing.T) { t.Parallel(); testSharesParity(t, uint32(shaper.AttachShape), (*bench).tc) })
	t.Run("xdp", func(t *testing.T) { t.Parallel(); testSharesParity(t, uint32(shaper.AttachPolice), (*bench).xdp) })
}

func testSharesParity(t *testing.T, mode uint32, run func(*bench, testing.TB, *sample) (uint32, uint64)) {
	rnd := testutil.Rand(t)
	b := newBench(t, kernelConfig{AttachId: 3, Mode: mode, Ethernet: 1, Keep: 1})
	policies := *policies
	if raceDetector {
		policies /= 10
	}
	var delays, refusals, passed int
	few := func(n int) bool { return n < 50*policies }
	for policy := 0; policy < policies || policy < 50*policies && (few(passed) || few(delays) || few(refusals)); policy++ {
		m := newGenerator(rnd)
		h := testHashes(m)
		b.kernel.Hashes = h
		s := shaper.New(testKeys)
		b.clearState(t)
		b.clearShares()
		limits := randomSharedLimits(m)
		p, err := s.Compile(limits, nil, []shaper.Attachment{{Name: "here"}}, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		n := numbers{limits: map[string]uint32{}, attachments: map[string]uint32{"here": 3}}
		for i, l := range limits {
			n.limits[l.Name] = uint32(255 - i)
		}
		if err := b.swap(newImage(p, n, h, b.kernel.Buckets.MaxEntries()), nil, nil, nil); err != nil {
			t.Fatal(err)
		}
		now := leaky.Time(m.Uint64N(uint64(leaky.Forever)/64)) * 64
		suspended := leaky.Time(m.Uint64N(1e15)) * 64
		model, meters := newShareModel(p, n, h)
		for i := range packetsOfShares {
			now += m.pause()
			if m.IntN(300) == 0 {
				suspended += leaky.Time(m.Uint64N(1e8)) * 64
			}
			boot := uint64(now + suspended)
			if m.IntN(40) == 0 {
				b.kernel.setShares(model.change(m, b, p, meters, boot), now, boot)
			}
			k := m.packet(uint64(now / 64))
			if mode == uint32(shaper.AttachPolice) {
				k.gsoSize, k.segments = 0, 1
			}
			f := k.flow
			f.Origin = p.AttachmentIndex("here")
			r := p.Route(&f)
			if !k.ip || k.anyPort || k.anyProtocol || r.ToDownstream == 0 {
				continue
			}
			if err := b.TestSuspended.Set(uint64(suspended / 64)); err != nil {
				t.Fatal(err)
			}
			_, got, _ := b.run(t, &k, uint64(now/64), run)
			shaped := mode == uint32(shaper.AttachShape)
			depart, slack, ok, sure := model.decide(p, &f, r, boot, shaped)
			gotOK, gotDepart := got.Verdict != uint32(shaper.Refuse), got.Depart+uint64(suspended)
			if sure && ok != gotOK || ok && gotOK && (gotDepart > depart+slack || depart > gotDepart+slack) {
				t.Fatalf("policy %d, packet %d: %+v, %d ticks after it came; want %v, %d ticks after\n%+v", policy, i, got, int64(gotDepart-boot), ok, depart-boot, limits)
			}
			switch {
			case !gotOK:
				refusals++
				continue
			case depart > boot:
				delays++
			default:
				passed++
			}
			if !shaped {
				gotDepart = boot
			}
			model.charge(p, &f, r, &k, boot, gotDepart, shaped)
		}
	}
	t.Logf("%d passed, %d delayed, %d refused", passed, delays, refusals)
	if few(passed) || few(delays) || few(refusals) {
		t.Errorf("fewer than %d of some", 50*policies)
	}
}

func randomSharedLimits(m *generator) []shaper.Limit {
	limits := make([]shaper.Limit, 1+m.IntN(3))
	for i := range limits {
		l := shaper.Limit{
			Name: fmt.Sprint("l", i), IPv4Prefix: 1 + m.IntN(32), IPv6Prefix: 1 + m.IntN(128), Shared: true,
			Key:      []shaper.Fields{0, shaper.KeySource, shaper.KeySource | shaper.KeyPort, shaper.KeyAttach, shaper.KeyDestination, shaper.KeyCountry}[m.IntN(6)],
			MaxDelay: time.Duration(m.Uint64N(uint64(time.Second))) * time.Duration(m.IntN(2)),
			Match:    shaper.Match{Attach: []string{"here"}},
		}
		kinds := 1 + m.IntN(3)
		if kinds&1 != 0 {
			l.Rate, l.Burst = m.logUniform(1e6, 1e9), m.Uint64N(100_000)*m.Uint64N(2)
			if leaky.NewRate(l.Rate, 8*time.Second).Cost(l.Burst) > longestBurst {
				l.Burst = 0
			}
		}
		if kinds&2 != 0 {
			l.Packets = shaper.Frequency{N: m.logUniform(100, 1e6), Per: time.Second}
			l.BurstPackets = m.Uint64N(20) * m.Uint64N(2)
		}
		limits[i] = l
	}
	return limits
}

func (b *bench) clearShares() {
	clear(b.leases)
	clear(b.coldFloors)
	clear(b.bursts)
	clear(b.floors)
	clear(b.hotLines)
	clear(b.hotBuckets)
	clear(b.cooled)
}

// TestShares_NoBase sends packets to a bucket of which the programs do not find what it may have at least, as if they
// could not read the lease: they are refused, and the bucket is not charged.
func TestShares_NoBase(t *testing.T) {
	b := newBench(t, kernelConfig{Mode: programModes[shaper.AttachShape], Ethernet: 1, Keep: 1})
	l := shaper.Limit{Name: "shared", Packets: perSecond(1), MaxDelay: time.Minute, Shared: true}
	p, err := shaper.New(testKeys).Compile(attachHere(l), nil, []shaper.Attachment{{Name: "here"}}, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	im := newImage(p, numbers{limits: map[string]uint32{"shared": 0}, attachments: map[string]uint32{"here": 0}}, b.Hashes, b.kernel.Buckets.MaxEntries())
	m := &im.policy.Limit[0].Meter[meterPackets]
	m.Tag = meterNumber(maxLimits, 0)<<tagMeterShift | neverEvicted | sharedTag // beyond cold_floors
	if err := b.swap(im, nil, nil, nil); err != nil {
		t.Fatal(err)
	}
	boot := leaky.FromDuration(time.Hour)
	b.kernel.setShares(&shareChange{lease: kernelLease{End: uint64(leaky.Never), AloneAt: uint64(leaky.Never), Cold: kernelShare{Parts: shaper.Whole}}}, boot, uint64(boot))
	bucket := b.kernel.lookupOrInsert(m.Tag, join(m, [2]uint64{}), boot, kernelShare{})
	backlog := uint64(boot + 30*leaky.Second)
	*bucket = backlog
	if _, d, _ := b.run(t, &sample{data: datagram(1)}, uint64(time.Hour), (*bench).tc); d.Verdict != uint32(shaper.Refuse) {
		t.Errorf("%+v", d)
	}
	if *bucket != backlog {
		t.Errorf("its value was %d and is %d", backlog, *bucket)
	}
}
