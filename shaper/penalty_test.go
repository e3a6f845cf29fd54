package shaper

import (
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/shaper/asn"
)

func withPenalty(more func(*Limit)) Limit {
	l := Limit{
		Name: "l", Match: Match{Protocol: TCP}, Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, MaxConnections: 5,
		Penalty: &Penalty{After: Frequency{N: 100, Per: time.Minute}, Block: time.Minute, Factor: 2, Most: time.Hour},
	}
	if more != nil {
		more(&l)
	}
	return l
}

// A penalty is refused whose limit may refuse a source for what others do.
func TestPenalty_Validation(t *testing.T) {
	listeners := []Listener{{Name: "both", Addresses: []Address{{Protocol: TCP}, {Protocol: UDP}}}}
	for _, tt := range []struct {
		change func(*Limit)
		want   string
	}{
		{func(l *Limit) {}, ""},
		{func(l *Limit) { l.Key |= KeyPort }, ""},
		{func(l *Limit) { l.Match.Protocol = AnyProtocol }, "UDP too"},
		{func(l *Limit) { l.Match.Protocol = UDP }, "is for UDP,"},
		{func(l *Limit) { l.Match.Attach = []string{"up"} }, "for attachments"},
		{func(l *Limit) { l.Key = KeyASN }, "no \"source\" in key"},
		{func(l *Limit) { l.MaxConnections, l.Rate = 0, 1e6 }, "no max_connections or new_connections"},
		{func(l *Limit) { l.Shared = true }, "is shared"},
		{func(l *Limit) { l.SlotFor, l.TurnGap = PerTurn, time.Second }, "slots for turns"},
		{func(l *Limit) { l.Penalty.After.N = 0 }, "refusals in"},
		{func(l *Limit) { l.Penalty.After.Per = 2 * time.Hour }, "refusals in"},
		{func(l *Limit) { l.Penalty.Block = 2 * time.Hour }, "blocks of"},
		{func(l *Limit) { l.Penalty.Block = time.Millisecond }, "blocks of"},
		{func(l *Limit) { l.Penalty.Most = 400 * 24 * time.Hour }, "blocks of"},
		{func(l *Limit) { l.Penalty.Factor = 0 }, "factor 0"},
		{func(l *Limit) { l.Penalty.Except.Group = []string{"g"} }, "unknown group"},
		{func(l *Limit) { l.Penalty.Except.Source = []netip.Prefix{{}} }, "invalid"},
	} {
		_, err := New(1024).Compile([]Limit{withPenalty(tt.change)}, listeners, []Attachment{{Name: "up"}}, nil, false)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%v, want %q", err, tt.want)
		}
	}
}

func TestPolicy_Penalizes(t *testing.T) {
	table, err := asn.New([]asn.Range{{First: netip.MustParseAddr("198.51.100.0"), Last: netip.MustParseAddr("198.51.100.255"), ASN: 64500}})
	if err != nil {
		t.Fatal(err)
	}
	groups := []Group{{Name: "monitoring", Source: []netip.Prefix{netip.MustParsePrefix("10.0.9.0/24")}}}
	all, some := withPenalty(nil), withPenalty(func(l *Limit) {
		l.Name, l.Match.Source = "some", []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")} // what it does not match it does not refuse, but a neighbor in the same prefix
		l.Penalty.Except = Sources{Group: []string{"monitoring"}, Source: []netip.Prefix{netip.MustParsePrefix("2001:db8::/32")}, ASN: []uint32{64500}}
	})
	p, err := New(1024).Compile([]Limit{all, some, {Name: "none", Rate: 1e6}}, []Listener{{Name: "l", Addresses: []Address{{Protocol: TCP}}}}, nil, table, false, groups...)
	if err != nil {
		t.Fatal(err)
	}
	for source, want := range map[string]string{
		"10.0.9.1": "l", "10.0.8.1": "l some", "2001:db8::1": "l", "2001:db9::1": "l", "198.51.100.7": "l", "198.51.101.7": "l",
	} {
		var got []string
		for i := range p.Penalizes(netip.MustParseAddr(source)).All {
			got = append(got, p.Limit(i).Name)
		}
		slices.Sort(got)
		if names := strings.Join(got, " "); names != want {
			t.Errorf("%s: %q, want %q", source, names, want)
		}
	}
}

func TestPenalty_BlockFor(t *testing.T) {
	y := &Penalty{Block: time.Minute, Factor: 3, Most: 10 * time.Minute}
	for before, want := range []time.Duration{time.Minute, 3 * time.Minute, 9 * time.Minute, 10 * time.Minute, 10 * time.Minute} {
		if got := y.BlockFor(before); got != want {
			t.Errorf("block after %d: %v, want %v", before, got, want)
		}
	}
	y = &Penalty{Block: MaxPenaltyBlock - 1, Factor: MaxPenaltyFactor, Most: MaxPenaltyBlock}
	if got := y.BlockFor(math.MaxInt); got != MaxPenaltyBlock {
		t.Errorf("%v, want %v", got, MaxPenaltyBlock)
	}
	y = &Penalty{Block: time.Minute, Factor: 1, Most: time.Hour}
	if got := y.BlockFor(math.MaxInt); got != time.Minute {
		t.Errorf("%v, want a minute", got)
	}
}
