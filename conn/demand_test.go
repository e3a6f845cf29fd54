package conn

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// demands reports what r's host needs since the last report.
func (r *rig) demands() map[shaper.Key]shaper.Demand {
	sg := r.scheduler.sharing
	span, more := sg.beginReport(), true
	var all []shaper.Demand
	for more {
		all, more = sg.report(all, span, r.now)
	}
	byKey := map[shaper.Key]shaper.Demand{}
	for _, d := range all {
		if _, twice := byKey[d.Key]; twice {
			r.t.Errorf("%+v is reported twice", d.Key)
		}
		byKey[d.Key] = d
	}
	return byKey
}

// A report names the cold buckets that need more than they have, and the hot ones that are used.
func TestDemands(t *testing.T) {
	const quarter = shaper.Whole / 4
	for _, tt := range []struct {
		name    string
		hot     bool
		parts   uint32
		units   int // of 1,000 bytes and 500 of overhead, which take 1.5 ms at the whole rate, in 100 ms
		streams int // that each wait for ever, of as many sources
		want    string
	}{
		{name: "idle", parts: quarter, want: "not reported"},
		{name: "a tenth is used", parts: quarter, units: 2, want: "not reported"},
		{name: "78 % are used", parts: quarter, units: 13, want: "not reported"},
		{name: "84 % are used", parts: quarter, units: 14, want: "21ms used, 0 wait"},
		{name: "no parts", streams: 2, want: "0s used, 2 wait"},
		{name: "a long queue", parts: quarter, streams: 3, want: "25.5ms used, 3 wait"},
		{name: "a hot one is idle", hot: true, parts: quarter, want: "not reported"},
		{name: "a tenth of a hot one is used", hot: true, parts: quarter, units: 2, want: "3ms used, 0 wait"},
		{name: "a hot one without parts", hot: true, streams: 1, want: "0s used, 1 wait"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, shaper.Limit{Name: "l", Shared: true, Rate: 8e6, Overhead: 500, MaxDelay: time.Second})
			f := flowFrom("10.0.0.1", 1)
			f.Protocol = shaper.UDP
			path, key := r.path(f), r.keyOf(f)
			shares := shaper.Shares{Lease: steady(tt.parts)}
			if tt.hot {
				shares = shaper.Shares{Lease: steady(1), Given: []shaper.KeyParts{{Key: key, Parts: tt.parts}}}
			}
			r.setShares(shares)
			for i := range tt.streams {
				f.Source = netip.AddrFrom4([4]byte{10, 1, 0, byte(i)})
				s := &stream{rig: r, left: 1 << 40}
				s.unit = unit{owner: s, path: r.path(f), bytes: 1000, packets: 1}
				r.scheduler.submit(&s.unit, r.now)
			}
			r.advance(r.now+leaky.Second, onTime)
			r.demands()
			for range 2 { // each report counts from the one before
				begin := r.now
				for n := range tt.units {
					r.advance(begin+leaky.Time(n)*leaky.Second/150, onTime)
					r.offer(path, true, func() {})
				}
				r.advance(begin+leaky.Second/10, onTime)
				got := "not reported"
				if d, ok := r.demands()[key]; ok {
					got = fmt.Sprintf("%v used, %d wait", d.Used.Duration().Round(1500*time.Microsecond), d.Waiting)
				}
				if got != tt.want {
					t.Errorf("%s, want %s", got, tt.want)
				}
			}
		})
	}
}

// The host is told once per report that a bucket has become short, and not of two packets that come
// together.
func TestOnShort(t *testing.T) {
	r := newRig(t, shaper.Limit{Name: "l", Key: shaper.KeySource, Shared: true, Rate: 8e6, MaxDelay: time.Second})
	short := 0
	r.scheduler.sharing.onShort = func() { short++ }
	r.setShares(shaper.Shares{Lease: steady(shaper.Whole / 2)}) // 2 ms a unit
	path, other := r.path(flowFrom("10.0.0.1", 1)), r.path(flowFrom("10.0.0.2", 1))
	expect := func(want int, what string) {
		t.Helper()
		if short != want {
			t.Errorf("%s: told %d times, want %d", what, short, want)
		}
	}
	queue := func(path []hop) {
		for range 10 {
			r.offer(path, true, func() {})
		}
		r.advance(r.now+leaky.Second/100, onTime)
	}
	for range 20 {
		r.offer(path, true, func() {})
		r.offer(path, true, func() {})
		r.advance(r.now+leaky.Second/100, onTime)
	}
	expect(0, "pairs")
	queue(path)
	expect(1, "a queue")
	r.advance(r.now+leaky.Second, onTime)
	queue(path)
	expect(1, "another one before the report")
	queue(other)
	expect(2, "another bucket")
	if n := len(r.demands()); n != 1 {
		t.Errorf("%d buckets are reported, want that of which units wait", n)
	}
	queue(other)
	expect(2, "reported as short")
	queue(path)
	expect(3, "reported as not short")
}

// Buckets of which nobody asks are not kept for ever.
func TestDemands_AreBounded(t *testing.T) {
	r := newRig(t, shaper.Limit{Name: "l", Key: shaper.KeySource, Shared: true, Rate: 8e9, MaxDelay: time.Second})
	r.setShares(shaper.Shares{Lease: steady(shaper.Whole / 2)})
	for i := range maxListed + 1000 {
		f := flowFrom("10.0.0.1", 1)
		f.Source = netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		path := r.path(f)
		r.offer(path, true, func() {})
		r.scheduler.releasePath(path, r.now)
	}
	if n := len(r.scheduler.byKey); n != maxListed {
		t.Errorf("%d queues are kept for the report, want %d", n, maxListed)
	}
	r.demands()
	if n, m := len(r.scheduler.byKey), len(r.scheduler.sharing.shares); n+m != 0 {
		t.Errorf("%d queues and %d shares are left after the report", n, m)
	}
}

// The heaviest come first, and no more than 10,000.
func TestDemands_Heaviest(t *testing.T) {
	r := start(t, shaper.UDP, serveUDP(t).LocalAddr().String(), shaper.Limit{Name: "l", Key: shaper.KeySource, Shared: true, Rate: 8e9, MaxDelay: time.Second})
	policy := r.shaper.Policy()
	shares := shaper.Shares{Lease: steady(1)}
	for i := range shaper.MaxDemands + 500 {
		shares.Given = append(shares.Given, shaper.KeyParts{Key: shaper.Key{Limit: policy.State(0).ID, Port: uint16(i)}, Parts: 1})
	}
	r.proxy.SetShares(shares)
	r.proxy.home.loop.call(func(leaky.Time) {
		sg := r.proxy.home.loop.sharing
		for i, g := range shares.Given {
			sh := sg.find(g.Key)
			sg.use(sh, uint64(1000+i), 0)
			if i < 100 {
				sh.waitsSince = 1 // for long
			}
		}
	})
	kept := shaper.Demand{Key: shaper.Key{ASN: 7}}
	all := r.proxy.Demands([]shaper.Demand{kept})
	if len(all) != 1+shaper.MaxDemands || all[0] != kept {
		t.Fatalf("%d demands, the first %+v", len(all), all[0])
	}
	for i, d := range all[1:] {
		want := uint16(shaper.MaxDemands + 500 - 1 - (i - 100))
		if i < 100 {
			want = uint16(99 - i)
		}
		if d.Key.Port != want || (d.Waiting > 0) != (i < 100) {
			t.Fatalf("demand %d is of bucket %d with %d that wait, want bucket %d", i, d.Key.Port, d.Waiting, want)
		}
	}
	if again := r.proxy.Demands(nil); len(again) != 100 {
		t.Errorf("%d are reported again, want those that wait", len(again))
	}
	r.proxy.SetShares(shaper.Shares{Lease: steady(1), Reset: true})
	r.proxy.home.loop.call(func(leaky.Time) {
		for _, sh := range r.proxy.home.loop.sharing.shares {
			sh.waitsSince = 0
		}
	})
	r.proxy.Demands(nil)
	r.proxy.Demands(nil)
	r.settle()
}
