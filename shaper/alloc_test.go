package shaper

import (
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
)

func TestNoAllocation(t *testing.T) {
	s := New(1000)
	limits := []Limit{
		{Name: "all", Rate: 8e6, MaxDelay: time.Hour},
		{Name: "source", Key: KeySource | KeyPort, IPv4Prefix: 24, IPv6Prefix: 56, Rate: 8e6, MaxDelay: time.Second, Match: Match{Port: []PortRange{{1, 100}}}},
		{Name: "connection", Key: KeyConnection, Packets: Frequency{1000, time.Second}, MaxDelay: time.Second},
		{Name: "tight", Key: KeyASN, Rate: 8e4, MaxDelay: 30 * time.Millisecond},
		{Name: "attached", Key: KeyAttach, Rate: 8e4, Match: Match{Attach: []string{"up"}, Destination: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}},
	}
	p := mustCompile(t, s, limits, udpOnly, Attachment{Name: "up"})
	now := leaky.Second
	verdicts := map[Verdict]bool{}
	flows := []*Flow{
		fromIPv4(1), fromIPv4(2),
		{Source: netip.MustParseAddr("2001:db8::1"), Port: 99, Protocol: UDP, Connection: 3},
		{Source: ipv4Addr(4), Destination: ipv4Addr(10 << 24), Origin: p.AttachmentIndex("up"), Protocol: ICMP},
	}
	var n uint32
	got := testing.AllocsPerRun(10000, func() {
		n++
		now += leaky.Second / 500
		f := flows[n%4]
		f.Connection = uint64(n) // a new key each time, to fill the table and evict keys
		r := p.Route(f)
		verdicts[s.Decide(p, f, r, r.ToDownstream, 100, 1, now).Verdict] = true
		k := p.Key(0, f, r)
		b := s.CheckOut(k, now)
		s.CheckIn(k, b, now)
	})
	if got != 0 {
		t.Errorf("%v allocations a decision", got)
	}
	if !verdicts[Pass] && !verdicts[Delay] || !verdicts[Refuse] {
		t.Errorf("the test exercised nothing: verdicts %v", verdicts)
	}
}
