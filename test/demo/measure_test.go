package main

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/test/lab"
)

func TestBins(t *testing.T) {
	const ms = time.Millisecond
	var f flow
	for _, e := range []struct {
		at     time.Duration
		source int
		n      int
	}{{0, 0, 1}, {9 * ms, 2, 5}, {10 * ms, 1, 7}, {24 * ms, 0, 3}, {25 * ms, 0, 9}, {30 * ms, 0, 2}} {
		f.add(e.source, lab.Event{At: e.at, N: e.n})
	}
	// The last bin covers its full width.
	want := [][len(sources)]int{{1, 0, 5}, {0, 7, 0}, {12, 0, 0}}
	if diff := cmp.Diff(want, f.bins(10*ms, 25*ms)); diff != "" {
		t.Error(diff)
	}
	levels := []lab.Event{{At: 1 * ms, N: 1}, {At: 2 * ms, N: 3}, {At: 3 * ms, N: 2}, {At: 25 * ms, N: 0}}
	if diff := cmp.Diff([]int{3, 2, 2, 0}, levelBins(levels, 10*ms, 40*ms)); diff != "" {
		t.Error(diff)
	}
}

// TestAttribute has a port that is reused by another source, and datagrams of two sources from one port.
func TestAttribute(t *testing.T) {
	from := netip.AddrPortFrom(innerAddr, 4000)
	head := func(tag byte) [16]byte { return [16]byte{tag} }
	bytes, datagrams := attribute([]lab.Arrival{
		{At: 1, From: from, Flags: lab.SYN},
		{At: 2, From: from, Flags: lab.ACK, Payload: 10, Head: head('B')},
		{At: 3, From: from, Flags: lab.ACK, Payload: 20, Head: head('A')}, // mid-connection
		{At: 4, To: from, Flags: lab.ACK, Payload: 1, Head: head('B'), Outgoing: true},
		{At: 5, From: from, Flags: lab.SYN},
		{At: 6, From: from, Flags: lab.ACK, Payload: 30, Head: head('G')},
		{At: 7, From: from, Payload: 160, Head: head('A')},
		{At: 8, From: from, Payload: 160, Head: head('G')},
		{At: 9, From: from, Payload: 160, Head: head('?')},
	})
	for _, test := range []struct {
		name      string
		got, want []lab.Event
	}{
		{"bytes", bytes.all, []lab.Event{{At: 2, N: 10}, {At: 3, N: 20}, {At: 6, N: 30}}},
		{"bytes of A", bytes.bySource[0], nil},
		{"bytes of B", bytes.bySource[1], []lab.Event{{At: 2, N: 10}, {At: 3, N: 20}}},
		{"bytes of the greedy source", bytes.bySource[greedy], []lab.Event{{At: 6, N: 30}}},
		{"datagrams", datagrams.all, []lab.Event{{At: 7, N: 1}, {At: 8, N: 1}}},
		{"datagrams of A", datagrams.bySource[0], []lab.Event{{At: 7, N: 1}}},
		{"datagrams of B", datagrams.bySource[1], nil},
		{"datagrams of the greedy source", datagrams.bySource[greedy], []lab.Event{{At: 8, N: 1}}},
	} {
		if diff := cmp.Diff(test.want, test.got); diff != "" {
			t.Errorf("%s: %s", test.name, diff)
		}
	}
}
