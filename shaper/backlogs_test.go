package shaper_test

import (
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/asn"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"shaperd.dev/shaperd/leaky"
)

func TestRestore_ContinuesBacklogs(t *testing.T) {
	limits := []shaper.Limit{
		{Name: "gone", Key: shaper.KeyPort, Rate: 8e3, MaxDelay: time.Hour},
		{Name: "all", Rate: 8e3, MaxDelay: time.Hour},
		{Name: "each", Key: shaper.KeySource | shaper.KeyListen, IPv4Prefix: 24, IPv6Prefix: 64, Rate: 8e3, MaxDelay: time.Hour},
		{Name: "connection", Key: shaper.KeyConnection, Rate: 8e3, MaxDelay: time.Hour},
	}
	listeners := []shaper.Listener{{Name: "other", Addresses: []shaper.Address{{Protocol: shaper.TCP}}}, {Name: "l", Addresses: []shaper.Address{{Protocol: shaper.TCP}}}}
	start := func(limits []shaper.Limit, listeners []shaper.Listener) *shaper.Shaper {
		s := shaper.New(1000)
		p, err := s.Compile(limits, listeners, nil, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		s.Swap(p, 0)
		return s
	}
	const now = 100 * leaky.Second
	flow := func(s *shaper.Shaper, source string) (*shaper.Flow, shaper.Route) {
		f := &shaper.Flow{Source: netip.MustParseAddr(source), Port: 80, Protocol: shaper.TCP, Connection: 7, Origin: s.Policy().ListenerIndex("l")}
		return f, s.Policy().Route(f)
	}
	old := start(limits, listeners)
	for source, bytes := range map[string]uint64{"10.0.0.1": 3000, "2001:db8::1": 5000} {
		f, r := flow(old, source)
		old.Decide(old.Policy(), f, r, r.ToDownstream, bytes, 0, now)
	}
	backlogs := old.Backlogs(100, now)
	want := []shaper.Backlog{
		{Limit: "all", Bytes: 8000},
		{Limit: "gone", Port: 80, Bytes: 8000},
		{Limit: "each", Address: netip.MustParseAddr("2001:db8::"), Listen: "l", Bytes: 5000},
		{Limit: "each", Address: netip.MustParseAddr("::ffff:10.0.0.0"), Listen: "l", Bytes: 3000},
	}
	byName := cmpopts.SortSlices(func(a, b shaper.Backlog) bool { return a.Limit+a.Address.String() < b.Limit+b.Address.String() })
	if diff := cmp.Diff(want, backlogs, byName, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Fatal(diff)
	}
	if top := old.Backlogs(2, now); len(top) != 2 || top[0].Bytes != 8000 || top[1].Bytes != 8000 {
		t.Errorf("the two largest: %+v", top)
	}

	// A second later, with twice the rate for one limit, a different order and different
	// listeners.
	limits[2].Rate = 16e3
	later := start([]shaper.Limit{limits[2], limits[1]}, []shaper.Listener{{Name: "l", Addresses: []shaper.Address{{Protocol: shaper.TCP}}}})
	const then = 5 * leaky.Second
	later.Restore(later.Policy(), backlogs, leaky.Second, then)
	for source, left := range map[string]leaky.Time{"10.0.0.1": leaky.Second / 2, "2001:db8::1": 3 * leaky.Second / 2} {
		f, r := flow(later, source)
		d := later.Decide(later.Policy(), f, r, r.ToDownstream&1, 0, 0, then)
		if got := d.Depart - then; got != left {
			t.Errorf("%s: a unit leaves after %v, want %v", source, got.Duration(), left.Duration())
		}
	}
	f, r := flow(later, "10.9.9.9")
	if d := later.Decide(later.Policy(), f, r, r.ToDownstream, 1, 0, then); d.Depart-then != 7*leaky.Second {
		t.Errorf("the bucket of all: a unit leaves after %v, want 7 s", (d.Depart - then).Duration())
	}
	if n := later.TableUsage().Entries; n != 4 {
		t.Errorf("%d buckets, want three restored ones and a new one", n)
	}
}

// Backlogs that have drained since, and those of unknown limits, create no buckets.
func TestRestore_ForgetsDrainedBacklogs(t *testing.T) {
	s := shaper.New(1000)
	p, err := s.Compile([]shaper.Limit{{Name: "l", Rate: 8e3}}, []shaper.Listener{{Name: "x", Addresses: []shaper.Address{{Protocol: shaper.TCP}}}}, nil, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	s.Swap(p, 0)
	s.Restore(p, []shaper.Backlog{{Limit: "l", Bytes: 1000}, {Limit: "unknown", Bytes: 1000}}, 2*leaky.Second, 5*leaky.Second)
	if n := s.TableUsage().Entries; n != 0 {
		t.Errorf("%d buckets, want none", n)
	}
}

// Buckets by other things than the source have their backlog in the next process, in which downstreams have other numbers.
func TestRestore_Keys(t *testing.T) {
	limits := []shaper.Limit{
		{Name: "destination", Key: shaper.KeyDestination, IPv4Prefix: 32, IPv6Prefix: 128, Rate: 8e3, MaxDelay: time.Hour},
		{Name: "downstream", Key: shaper.KeyDownstream, Rate: 8e3, MaxDelay: time.Hour},
		{Name: "country", Key: shaper.KeyCountry, Rate: 8e3, MaxDelay: time.Hour},
		{Name: "tlv", Key: shaper.KeyTLV, TLV: 0xe0, Rate: 8e3, MaxDelay: time.Hour},
	}
	home := asn.CountryRange{First: netip.MustParseAddr("192.0.2.0"), Last: netip.MustParseAddr("192.0.2.255"), Country: 'D'<<8 | 'E'}
	table, err := asn.New(nil, home)
	if err != nil {
		t.Fatal(err)
	}
	a, b := shaper.Downstream{Host: "10.0.0.1"}, shaper.Downstream{Host: "10.0.0.2", Port: 80}
	process := func(downstreams ...shaper.Downstream) (*shaper.Shaper, *shaper.Policy, *shaper.Flow) {
		s := shaper.New(100)
		p, err := s.Compile(limits, []shaper.Listener{{Name: "l", Addresses: []shaper.Address{{Protocol: shaper.TCP}}, Downstream: downstreams}}, nil, table, false)
		if err != nil {
			t.Fatal(err)
		}
		s.Swap(p, leaky.Second)
		return s, p, &shaper.Flow{
			Source: netip.MustParseAddr("192.0.2.1"), Destination: netip.MustParseAddr("198.51.100.1"), Protocol: shaper.TCP,
			Origin: p.ListenerIndex("l"), Downstream: p.DownstreamID(b.Name()), TLVs: []shaper.TLV{s.NewTLV(0xe0, []byte("tenant-7"))},
		}
	}
	s, p, f := process(a, b)
	r := p.Route(f)
	s.Decide(p, f, r, r.ToDownstream, 5000, 1, leaky.Second)
	next, q, g := process(b, a)
	if f.Downstream == g.Downstream {
		t.Fatalf("both processes number it %d: this tests nothing", f.Downstream)
	}
	next.Restore(q, s.Backlogs(10, leaky.Second), 0, leaky.Second)
	for i := range q.Len() {
		bucket, _ := next.Peek(q.Key(i, g, q.Route(g)), leaky.Second)
		if k := q.Key(i, g, q.Route(g)); k == (shaper.Key{Limit: k.Limit}) {
			t.Errorf("the key of limit %s is empty: this tests nothing", q.Limit(i).Name)
		}
		if bytes, _ := bucket.Backlog(q.Shape(i), leaky.Second); bytes != 5000 {
			t.Errorf("limit %s: %s has a backlog of %d bytes, want 5000", q.Limit(i).Name, q.Describe(i, g, q.Route(g)), bytes)
		}
	}
}
