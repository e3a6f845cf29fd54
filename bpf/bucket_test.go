package bpf

import (
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// TestBucketState runs random packets through the programs and through package shaper, and
// compares the states of their buckets.
func TestBucketState(t *testing.T) {
	t.Parallel()
	rnd := testutil.Rand(t)
	b := newBench(t, kernelConfig{AttachId: 3, Mode: programModes[shaper.AttachPolice], Ethernet: 1, Keep: 1, MaxLimits: shaper.MaxLimits})
	var backlogs, waits, of int
	const enough = 100
	for round := 0; round < 20 || round < 200 && min(backlogs, waits) < enough; round++ {
		m := newGenerator(rnd)
		b.Hashes = testHashes(m)
		now := leaky.Time(1+m.Uint64N(uint64(leaky.Forever)/64)) * 64
		s := shaper.New(testKeys)
		b.clearState(t)
		limits := randomLimits(m)
		table := asnTable(t, m)
		p, err := s.Compile(limits, nil, []shaper.Attachment{{Name: "elsewhere"}, {Name: "here"}}, table, false)
		if err != nil {
			t.Fatal(err)
		}
		n := numbers{limits: map[string]uint32{}, attachments: map[string]uint32{"here": 3, "elsewhere": 9}}
		for i, l := range limits {
			n.limits[l.Name] = uint32(255 - i)
		}
		s.Swap(p, now)
		if err := b.swap(newImage(p, n, b.Hashes, b.kernel.Buckets.MaxEntries()), nil, nil, nil); err != nil {
			t.Fatal(err)
		}
		plane := &Plane{kernel: b.kernel, shaper: s, policy: p, numbers: n}
		var flows []shaper.Flow
		for range 200 {
			now += leaky.Time(m.Uint64N(1e6)) * 64 * leaky.Time(m.IntN(2))
			k := m.packet(uint64(now / 64))
			k.gsoSize, k.segments = 0, 1
			if _, _, limited := wantDecision(s, p, &k, now, true); limited {
				k.flow.Origin = p.AttachmentIndex("here")
				flows = append(flows, k.flow)
			}
			b.run(t, &k, uint64(now/64), (*bench).tc)
		}
		for _, f := range flows {
			r := p.Route(&f)
			for i := range r.ToDownstream.All {
				key := p.Key(i, &f, r)
				got, ok := plane.bucket(i, key, now)
				if one := p.Limit(i).Key&shaper.KeyConnection == 0; ok != one {
					t.Fatalf("limit %+v: %v", p.Limit(i), ok)
				} else if !one {
					continue
				}
				bucket := s.CheckOut(key, now)
				s.CheckIn(key, bucket, now)
				shape := p.Shape(i)
				var want shaper.BucketState
				want.BacklogBytes, want.BacklogPackets = bucket.Backlog(shape, now)
				want.NextDeparture = bucket.Depart(shape, now).Sub(now).Duration()
				if got != want {
					t.Fatalf("%s of limit %+v: %+v, want %+v", p.DescribeKey(i, key), p.Limit(i), got, want)
				}
				of++
				if got.BacklogBytes+got.BacklogPackets > 0 {
					backlogs++
				}
				if got.NextDeparture > 0 {
					waits++
				}
			}
		}
	}
	t.Logf("%d buckets, %d with a backlog, %d with a wait", of, backlogs, waits)
	if min(backlogs, waits) < enough {
		t.Error("too few backlogs or waits")
	}
}

// TestBucketConnections reads the number of connections in flight of a key, and the time until
// the next admission.
func TestBucketConnections(t *testing.T) {
	t.Parallel()
	l := capped(3)
	l.NewConnections, l.QueueTimeout = shaper.Frequency{N: 1, Per: time.Minute}, time.Hour
	b := newTCP(t, shaper.AttachShape, l)
	l.Match.Attach = []string{"here"}
	s := shaper.New(1024)
	p, err := s.Compile([]shaper.Limit{l}, nil, []shaper.Attachment{{Name: "here"}}, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	n, err := b.assignNumbers(p, []shaper.Attachment{{Name: "here"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	plane := &Plane{kernel: b.kernel, shaper: s, policy: p, numbers: n}
	for _, c := range []struct {
		client string
		want   shaper.BucketState
	}{
		{"10.0.0.1:40000", shaper.BucketState{InFlight: 1, NextAdmission: time.Minute}},
		{"10.0.0.1:40001", shaper.BucketState{InFlight: 2, NextAdmission: 2 * time.Minute}},
		{"10.0.0.2:40001", shaper.BucketState{InFlight: 1, NextAdmission: time.Minute}},
		{"10.0.0.1:40002", shaper.BucketState{InFlight: 3, NextAdmission: 3 * time.Minute}},
		{"10.0.0.1:40003", shaper.BucketState{InFlight: 3, NextAdmission: 3 * time.Minute}},
	} {
		d := dial(c.client)
		b.open(d)
		f := shaper.Flow{Source: d.ends[client].Addr(), Origin: p.AttachmentIndex("here"), Protocol: shaper.TCP}
		got, ok := plane.bucket(0, p.Key(0, &f, p.Route(&f)), leaky.Time(b.now)*leaky.FromDuration(1))
		if got != c.want || !ok {
			t.Errorf("%s: %+v, %v, want %+v", c.client, got, ok, c.want)
		}
	}
	if !plane.ForgetBucket(0, p.KeyOf(0, netip.MustParseAddr("10.0.0.1"))) {
		t.Fatal("nothing to forget")
	}
	for source, want := range map[string]shaper.BucketState{"10.0.0.1": {InFlight: 3}, "10.0.0.2": {InFlight: 1, NextAdmission: time.Minute}} {
		got, _ := plane.bucket(0, p.KeyOf(0, netip.MustParseAddr(source)), leaky.Time(b.now)*leaky.FromDuration(1))
		if got != want {
			t.Errorf("%s after a reset: %+v, want %+v", source, got, want)
		}
	}
}

// TestPlane_Bucket reads a bucket of a plane by its flow, and none before there is a policy.
func TestPlane_Bucket(t *testing.T) {
	w := newWire(t, "bucket")
	p := openPlane(t)
	if _, ok := p.KeyBucket(0, shaper.Key{}); ok {
		t.Error("a bucket before there is a policy")
	}
	p.apply([]shaper.Limit{tenAnHour("here")}, shaper.Attachment{Name: "here", Interfaces: []string{"bucket0"}, Mode: shaper.AttachPolice})
	w.want(p, 1, 12, 10)
	at := func(source string) shaper.BucketState {
		f := shaper.Flow{Source: netip.MustParseAddr(source), Origin: p.policy.AttachmentIndex("here")}
		b, ok := p.Bucket(0, &f, p.policy.Route(&f))
		if !ok {
			t.Errorf("%s has no bucket", source)
		}
		return b
	}
	if b := at("10.0.0.1"); b.BacklogPackets != 9 || b.NextDeparture < 5*time.Minute || b.NextDeparture > 6*time.Minute {
		t.Errorf("%+v", b)
	}
	if b := at("10.0.0.2"); b != (shaper.BucketState{}) {
		t.Errorf("%+v of a source that has sent nothing", b)
	}
}
