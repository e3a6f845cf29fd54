package shaper

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
)

func prefixOf(s string) netip.Prefix { return netip.MustParsePrefix(s) }

// A source that a reload moves to another tier keeps its backlog in bytes, and so does one whose limit gets tiers or loses them.
func TestTiers_ReloadKeepsBacklog(t *testing.T) {
	rnd := testutil.Rand(t)
	base := Limit{Name: "l", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 8000, MaxDelay: time.Hour}
	limit := func(tier string, rate uint64) Limit {
		l := base
		v := l.Values()
		v.Rate = rate
		switch tier {
		case "group":
			l.For = []Tier{{"gold", v}}
		case "source":
			l.BySource = []SourceValues{{prefixOf("10.0.0.0/24"), v}}
		}
		return l
	}
	gold := Group{Name: "gold", Source: []netip.Prefix{prefixOf("10.0.0.0/16")}}
	for range 50 {
		s := New(1000)
		now := leaky.Second
		rate := uint64(8000)
		swap := func(l Limit, rateNow uint64) {
			p, err := s.Compile([]Limit{l}, nil, nil, nil, false, gold)
			if err != nil {
				t.Fatal(err)
			}
			s.Swap(p, now)
			rate = rateNow
		}
		swap(base, 8000)
		f := &Flow{Source: netip.MustParseAddr("10.0.0.1"), Protocol: UDP, Origin: 0}
		other := &Flow{Source: netip.MustParseAddr("192.0.2.1"), Protocol: UDP, Origin: 0}
		backlog := uint64(0)
		for range 30 {
			p := s.Policy()
			n := rnd.Uint64N(2000)
			d := s.Decide(p, f, p.Route(f), 1, n, 1, now)
			if want := now + leaky.NewRate(rate, 8*time.Second).Cost(backlog); d.Depart > want+1000 || d.Depart+1000 < want {
				t.Fatalf("with %d bytes owed at %d bit/s: departs at %d, want %d", backlog, rate, d.Depart, want)
			}
			if d.Verdict != Refuse {
				backlog += n
			}
			if d := s.Decide(p, other, p.Route(other), 1, 1, 1, now); d.Depart > now+leaky.Second/10 {
				t.Fatal("another source waits")
			}
			next := 8000 * (1 + rnd.Uint64N(20))
			switch rnd.IntN(3) {
			case 0:
				swap(base, 8000)
			case 1:
				swap(limit("group", next), next)
			default:
				swap(limit("source", next), next)
			}
			if rnd.IntN(2) == 0 {
				s.Migrate()
			}
		}
	}
}

func TestTiers_Invalid(t *testing.T) {
	base := Limit{Name: "l", Key: KeySource, IPv4Prefix: 24, IPv6Prefix: 64, Rate: 8000, MaxConnections: 5}
	groups := []Group{{Name: "a", Source: []netip.Prefix{prefixOf("10.0.0.0/16")}}, {Name: "b", Source: []netip.Prefix{prefixOf("10.0.0.0/16")}}, {Name: "long", Source: []netip.Prefix{prefixOf("10.0.0.0/25")}}}
	v := base.Values()
	v.Rate *= 2
	for _, tt := range []struct {
		change func(l *Limit)
		want   string
	}{
		{func(l *Limit) { l.Match.Group = []string{"c"} }, `match.group: unknown group "c"`},
		{func(l *Limit) { l.Except.Group = []string{"c"} }, `except.group: unknown group "c"`},
		{func(l *Limit) { l.For = []Tier{{"c", v}} }, `for.c: unknown group "c"`},
		{func(l *Limit) { l.For = []Tier{{"a", v}, {"a", v}} }, `for.a: duplicate`},
		{func(l *Limit) { l.For = []Tier{{"a", v}}; l.Key = KeyPort }, `for: needs "source" in key`},
		{func(l *Limit) { l.For = []Tier{{"a", v}}; l.Shared = true }, `for: unsupported with shared`},
		{func(l *Limit) { l.For = []Tier{{"long", v}} }, `for.long: 10.0.0.0/25 is longer than ipv4_prefix = 24`},
		{func(l *Limit) { l.BySource = []SourceValues{{prefixOf("10.0.0.1/32"), v}} }, `values: 10.0.0.1/32 is longer than`},
		{func(l *Limit) { l.For = []Tier{{"a", Values{Rate: 8000}}} }, `for.a: max_connections: missing`},
		{func(l *Limit) { l.For = []Tier{{"a", Values{Rate: 1, MaxConnections: 1}}} }, `for.a: rate: 1 bit/s: must be from 8`},
		{func(l *Limit) { l.For = []Tier{{"a", v}, {"b", base.Values()}} }, `for: groups "a" and "b" both have 10.0.0.0/16`},
		{func(l *Limit) { l.For = []Tier{{"a", v}, {"b", v}} }, ""},
	} {
		l := base
		tt.change(&l)
		_, err := New(1).Compile([]Limit{l}, nil, nil, nil, false, groups...)
		var at *LimitError
		if tt.want == "" && err == nil {
			continue
		}
		if !errors.As(err, &at) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%v, want %s", err, tt.want)
		}
	}
}
