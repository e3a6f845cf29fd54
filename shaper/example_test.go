package shaper_test

import (
	"fmt"
	"net/netip"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// A policy classifies a flow once. Each unit of the flow is then offered to the flow's limits,
// which charge it or refuse it together.
func Example() {
	limits := []shaper.Limit{
		{Name: "total", Rate: 8_000_000, MaxDelay: time.Second},
		{Name: "per-source", Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 800_000, MaxDelay: 20 * time.Millisecond},
	}
	s := shaper.New(1000)
	policy, err := s.Compile(limits, []shaper.Listener{{Name: "dns", Addresses: []shaper.Address{{Protocol: shaper.UDP}}}}, nil, nil, false)
	if err != nil {
		fmt.Println(err)
		return
	}
	now := leaky.Second
	s.Swap(policy, now)

	flow := shaper.Flow{Source: netip.MustParseAddr("192.0.2.1"), Port: 53, Origin: policy.ListenerIndex("dns"), Protocol: shaper.UDP}
	route := policy.Route(&flow)
	for range 4 {
		d := s.Decide(policy, &flow, route, route.ToDownstream, 1000, 1, now)
		if d.Limit < 0 {
			fmt.Println(d.Verdict)
			continue
		}
		fmt.Printf("%v %v by %s, %s\n", d.Verdict, d.Depart.Sub(now).Duration(), policy.Limit(d.Limit).Name, policy.Describe(d.Limit, &flow, route))
	}
	// Output:
	// pass
	// delay 10ms by per-source, source 192.0.2.1/32
	// delay 20ms by per-source, source 192.0.2.1/32
	// refuse 30ms by per-source, source 192.0.2.1/32
}
