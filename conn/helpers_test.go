package conn

import (
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"testing"

	"go.uber.org/goleak"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/asn"
)

func TestMain(m *testing.M) {
	var kind, from, to string
	var rate int
	if n, _ := fmt.Sscan(os.Getenv(floodVariable), &kind, &from, &to, &rate); n == 4 {
		flood(kind, netip.MustParseAddr(from), to, rate)
		return
	}
	flag.Parse()
	flag.Set("test.parallel", "8") // they mostly wait
	goleak.VerifyTestMain(m)
}

// policy compiles limits for one listener, "l".
func policy(t testing.TB, s *shaper.Shaper, limits ...shaper.Limit) *shaper.Policy {
	t.Helper()
	return policyOf(t, s, nil, limits...)
}

// policyOf is policy with classes.
func policyOf(t testing.TB, s *shaper.Shaper, classes []shaper.TrafficClass, limits ...shaper.Limit) *shaper.Policy {
	t.Helper()
	return policyByAS(t, s, nil, classes, limits...)
}

// policyByAS is policyOf with a table of AS.
func policyByAS(t testing.TB, s *shaper.Shaper, asns *asn.Table, classes []shaper.TrafficClass, limits ...shaper.Limit) *shaper.Policy {
	t.Helper()
	limits = slices.Clone(limits) // tests that run at once may have the same
	for i := range limits {
		l := &limits[i]
		if l.IPv4Prefix == 0 {
			l.IPv4Prefix, l.IPv6Prefix = 32, 64
		}
		if l.Packets.N > 0 || l.Overhead > 0 {
			l.Match.Protocol = shaper.UDP
		}
	}
	p, err := s.CompileRules(shaper.Rules{
		Limits: limits, Classes: classes, ASNs: asns,
		Listeners: []shaper.Listener{{Name: "l", Addresses: []shaper.Address{{Protocol: shaper.TCP}, {Protocol: shaper.UDP}}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func flowFrom(source string, port uint16) *shaper.Flow {
	return &shaper.Flow{Source: netip.MustParseAddr(source), Port: port, Protocol: shaper.TCP}
}

func testLog(t testing.TB) *slog.Logger {
	level := slog.LevelError
	if testing.Verbose() {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
}

var quietLog = slog.New(slog.DiscardHandler)

// sigma is the smallest burst for which the departures conform to rate, in units.
type sigma struct {
	rate     float64 // units per tick
	sent     float64
	low, max float64
	started  bool
}

func (s *sigma) add(at leaky.Time, n uint64) {
	line := s.rate * float64(at)
	if !s.started || s.sent-line < s.low {
		s.low, s.started = s.sent-line, true
	}
	s.sent += float64(n)
	s.max = max(s.max, s.sent-line-s.low)
}

// addressOf returns the address of one port.
func addressOf(p shaper.Protocol, at netip.AddrPort) shaper.Address {
	return shaper.Address{Protocol: p, Addr: at.Addr(), Ports: shaper.PortRange{First: at.Port(), Last: at.Port()}}
}

// must fails the test if err is not nil.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
