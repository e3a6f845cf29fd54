package shaper

import (
	"net/netip"
	"testing"

	"shaperd.dev/shaperd/leaky"
)

// raceDetector makes everything ten times slower; race_test.go sets it.
var raceDetector bool

// shortRun reports whether tests of one goroutine should run fewer rounds.
func shortRun() bool { return raceDetector || testing.Short() }

func mustCompile(t testing.TB, s *Shaper, limits []Limit, listeners []Listener, attachments ...Attachment) *Policy {
	t.Helper()
	p, err := s.Compile(limits, listeners, attachments, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

var udpOnly = []Listener{{Name: "dns", Addresses: []Address{{Protocol: UDP}}}}

// fromIPv4 returns a flow of the n-th source.
func fromIPv4(n uint32) *Flow {
	return &Flow{Source: ipv4Addr(n), Port: 53, Protocol: UDP, Connection: uint64(n)}
}

func ipv4Addr(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}

// lookupBucket returns the bucket of f under limit i, and whether it is in the table.
func (s *Shaper) lookupBucket(p *Policy, i int, f *Flow) (leaky.Bucket, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := p.Key(i, f, p.Route(f))
	if slot := s.table.lookup(&k, s.table.probe(&k)); slot != nil {
		return slot.bucket, true
	}
	return leaky.Bucket{}, false
}
