package shaper

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestValidate(t *testing.T) {
	listeners := []Listener{{Name: "web", TCP: true}, {Name: "dns", UDP: true}}
	attachments := []Attachment{{"uplink"}}
	attach := []string{"uplink"}
	ten := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	for _, tt := range []struct {
		name  string
		limit Limit
		want  string // "" is valid
	}{
		{"rate", Limit{Rate: 8}, ""},
		{"highest rate", Limit{Rate: 1e12}, ""},
		{"packets of UDP", Limit{Packets: Frequency{1, time.Second}, Match: Match{Protocol: UDP}}, ""},
		{"packets of a UDP listener", Limit{Packets: Frequency{1, time.Second}, Match: Match{Listen: []string{"dns"}}}, ""},
		{"connections", Limit{Connections: 1}, ""},
		{"new connections", Limit{NewConnections: Frequency{1, time.Minute}}, ""},
		{"nothing", Limit{}, `limit "l": rate: one of rate, packets, connections, new_connections is needed`},
		{"blocks always", Limit{Block: true, Always: true}, ""},
		{"always, and blocks nothing", Limit{Rate: 8, Always: true}, `limit "l": block: only a limit that blocks is enforced in every mode`},
		{"rate too low", Limit{Rate: 7}, `limit "l": rate: 7 bit/s: from 8 to 1e12`},
		{"rate too high", Limit{Rate: 1e12 + 1}, `limit "l": rate: 1000000000001 bit/s: from 8 to 1e12`},
		{"packets of TCP", Limit{Packets: Frequency{1, time.Second}}, `limit "l": packets: listener "web" proxies TCP, which has no packets here: match protocol "udp"`},
		{"packets every nothing", Limit{Packets: Frequency{1, 0}, Match: Match{Protocol: UDP}}, `limit "l": packets: 1 every 0s: every 1ns to 8784h0m0s`},
		{"new connections every nothing", Limit{NewConnections: Frequency{5, -time.Second}}, `limit "l": new_connections: 5 every -1s: every 1ns to 8784h0m0s`},
		{"too many packets", Limit{Packets: Frequency{math.MaxUint64, time.Second}, Match: Match{Protocol: UDP}}, `limit "l": packets: 18446744073709551615 every 1s: at most 1e12`},
		{"negative connections", Limit{Connections: -1}, `limit "l": max_connections: -1, and max_queue 0: from 0`},
		{"negative max_queue", Limit{Connections: 1, MaxWaiting: -2}, `limit "l": max_connections: 1, and max_queue -2: from 0`},
		{"queue_timeout too long", Limit{Connections: 1, MaxWait: 2 * time.Hour}, `limit "l": queue_timeout: 2h0m0s: from 0 to 1h0m0s`},
		{"unknown listener", Limit{Rate: 8, Match: Match{Listen: []string{"web", "smtp"}}}, `limit "l": match.listen: there is no listener "smtp"`},
		{"no IPv4 prefix", Limit{Rate: 8, Key: KeySource, IPv6Prefix: 64}, `limit "l": ipv4_prefix: /0 and ipv6_prefix /64: from 1 to 32 and from 1 to 128`},
		{"long IPv6 prefix", Limit{Rate: 8, Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 129}, `limit "l": ipv4_prefix: /32 and ipv6_prefix /129: from 1 to 32 and from 1 to 128`},
		{"prefix of no source", Limit{Rate: 8, Key: KeyPort, IPv4Prefix: 99}, ""},
		{"negative max_delay", Limit{Rate: 8, MaxDelay: -1}, `limit "l": max_delay: -1ns: from 0 to 1h0m0s`},
		{"long max_delay", Limit{Rate: 8, MaxDelay: time.Hour + 1}, `limit "l": max_delay: 1h0m0.000000001s: from 0 to 1h0m0s`},
		{"long burst", Limit{Rate: 8, Burst: 1e9}, `limit "l": burst: takes more than 720h0m0s at the rate`},
		{"long burst of packets", Limit{Packets: Frequency{1, time.Hour}, BurstPackets: 721, Match: Match{Protocol: UDP}}, `limit "l": burst: takes more than 720h0m0s at the rate`},
		{"longest burst", Limit{Packets: Frequency{1, time.Hour}, BurstPackets: 719, Match: Match{Protocol: UDP}}, ""},
		{"no such protocol", Limit{Rate: 8, Match: Match{Protocol: 4}}, `limit "l": match: protocol 4, direction 0, excess 0, share 0 or key 0x0 is unknown`},
		{"no such direction", Limit{Rate: 8, Direction: 3}, `limit "l": match: protocol 0, direction 3, excess 0, share 0 or key 0x0 is unknown`},
		{"no such excess", Limit{Rate: 8, Excess: 5}, `limit "l": match: protocol 0, direction 0, excess 5, share 0 or key 0x0 is unknown`},
		{"no such share", Limit{Rate: 8, Share: 2}, `limit "l": match: protocol 0, direction 0, excess 0, share 2 or key 0x0 is unknown`},
		{"no such key", Limit{Rate: 8, Key: 64}, `limit "l": match: protocol 0, direction 0, excess 0, share 0 or key 0x40 is unknown`},
		{"no prefix", Limit{Rate: 8, Match: Match{Source: []netip.Prefix{{}}}}, `limit "l": match.source: invalid Prefix is no prefix`},
		{"ports back to front", Limit{Rate: 8, Match: Match{Port: []PortRange{{9, 8}}}}, `limit "l": match.port: 9-8 ends before it begins`},
		{"overhead of UDP", Limit{Rate: 8, Overhead: 1000, Match: Match{Protocol: UDP}}, ""},
		{"overhead of TCP", Limit{Rate: 8, Overhead: 38}, `limit "l": overhead: listener "web" proxies TCP, which has no packets here: match protocol "udp"`},
		{"negative overhead", Limit{Rate: 8, Overhead: -1, Match: Match{Protocol: UDP}}, `limit "l": overhead: -1 bytes: from 0 to 1000`},
		{"large overhead", Limit{Rate: 8, Overhead: 1001, Match: Match{Protocol: UDP}}, `limit "l": overhead: 1001 bytes: from 0 to 1000`},
		{"destination at listeners", Limit{Rate: 8, Match: Match{Destination: ten}}, `limit "l": match.destination: only for limits that match attachments`},
		{"ICMP at listeners", Limit{Rate: 8, Match: Match{Protocol: ICMP}}, `limit "l": match.protocol: only for limits that match attachments`},
		{"key of listeners", Limit{Rate: 8, Key: KeyAttach}, `limit "l": key: only for limits that match attachments`},
		{"ECN at listeners", Limit{Rate: 8, ECNMark: 50}, `limit "l": ecn_mark: only for limits that match attachments`},
		{"silence at listeners", Limit{Connections: 1, Excess: ExcessDrop}, `limit "l": refuse_with: only for limits that match attachments`},

		{"everything at an attachment", Limit{
			Rate: 8, Packets: Frequency{1, time.Second}, Overhead: 38, ECNMark: 100, Key: KeyAttach,
			Connections: 1, NewConnections: Frequency{1, time.Second}, Excess: ExcessDrop,
			Match: Match{Attach: attach, Protocol: TCP, Destination: ten, Port: []PortRange{{1, 2}}},
		}, ""},
		{"ICMP", Limit{Rate: 8, Match: Match{Attach: attach, Protocol: ICMP}}, ""},
		{"two planes", Limit{Rate: 8, Match: Match{Attach: attach, Listen: []string{"web"}}}, `limit "l": match.attach: with match.listen: a limit's buckets live in one plane`},
		{"unknown attachment", Limit{Rate: 8, Match: Match{Attach: []string{"uplink", "downlink"}}}, `limit "l": match.attach: there is no attachment "downlink"`},
		{"no destination", Limit{Rate: 8, Match: Match{Attach: attach, Destination: []netip.Prefix{{}}}}, `limit "l": match.destination: invalid Prefix is no prefix`},
		{"ports of ICMP", Limit{Rate: 8, Match: Match{Attach: attach, Protocol: ICMP, Port: []PortRange{{1, 2}}}}, `limit "l": match.port: icmp has no ports`},
		{"connections of UDP", Limit{Connections: 1, Match: Match{Attach: attach, Protocol: UDP}}, `limit "l": max_connections: counts TCP connections, and udp has none`},
		{"new connections of ICMP", Limit{NewConnections: Frequency{1, time.Second}, Match: Match{Attach: attach, Protocol: ICMP}}, `limit "l": new_connections: counts TCP connections, and icmp has none`},
		{"other direction", Limit{Rate: 8, Direction: Both, Match: Match{Attach: attach}}, `limit "l": direction: both: an attachment sees one direction`},
		{"key of attachments", Limit{Rate: 8, Key: KeyListen, Match: Match{Attach: attach}}, `limit "l": key: attachments have no listener`},
		{"closing at attachments", Limit{Connections: 1, Excess: ExcessClose, Match: Match{Attach: attach}}, `limit "l": refuse_with: close: only for limits of listeners`},
		{"ECN", Limit{Rate: 8, ECNMark: 101, Match: Match{Attach: attach}}, `limit "l": ecn_mark: 101 %: from 0 to 100`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.limit.Name = "l"
			_, err := New(1).Compile([]Limit{tt.limit}, listeners, attachments, nil, false)
			got := ""
			if err != nil {
				got = err.Error()
				var le *LimitError
				if !errors.As(err, &le) || le.Limit != 0 || le.Name != "l" || !strings.Contains(got, le.Key) {
					t.Errorf("%#v is not the limit's error", err)
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestValidateFindsEveryMistake(t *testing.T) {
	_, err := New(1).Compile([]Limit{{Name: "a", Rate: 1}, {Name: "b", Rate: 8}, {Name: "b", Rate: 8, MaxDelay: -1}}, udpOnly, nil, nil, false)
	want := strings.Join([]string{
		`limit "a": rate: 1 bit/s: from 8 to 1e12`,
		`limit "b": name: used twice`,
		`limit "b": max_delay: -1ns: from 0 to 1h0m0s`,
	}, "\n")
	if diff := cmp.Diff(want, fmt.Sprint(err)); diff != "" {
		t.Error(diff)
	}
}

func TestNumberOfLimits(t *testing.T) {
	limits := make([]Limit, MaxLimits+1)
	for i := range limits {
		limits[i] = Limit{Name: fmt.Sprint(i), Rate: 8}
	}
	if _, err := New(1).Compile(limits, nil, nil, nil, false); fmt.Sprint(err) != "65 limits: at most 64" {
		t.Error(err)
	}
	p := mustCompile(t, New(1), limits[:MaxLimits], udpOnly)
	if got := p.Route(fromIPv4(1)).ToDownstream; got != ^Set(0) {
		t.Errorf("64 limits on everything give the set %x", got)
	}
}

func TestNumberOfAttachments(t *testing.T) {
	if _, err := New(1).Compile(nil, nil, make([]Attachment, MaxAttachments+1), nil, false); fmt.Sprint(err) != "65 attachments: at most 64" {
		t.Error(err)
	}
	limits := make([]Limit, MaxConnectionLimits+2)
	for i := range limits {
		limits[i] = Limit{Name: fmt.Sprint(i), Connections: 1, Match: Match{Attach: []string{"up", "down", "up"}}}
	}
	limits[1].Match.Attach = []string{"down"}
	_, err := New(1).Compile(limits, nil, []Attachment{{"up"}, {"down"}}, nil, false)
	want := strings.Join([]string{
		`limit "4": max_connections: more than 4 limits with max_connections match attachment "down"`,
		`limit "5": max_connections: more than 4 limits with max_connections match attachment "up"`,
		`limit "5": max_connections: more than 4 limits with max_connections match attachment "down"`,
	}, "\n")
	if diff := cmp.Diff(want, fmt.Sprint(err)); diff != "" {
		t.Error(diff)
	}
}

func TestAttachments(t *testing.T) {
	s := New(1)
	p := mustCompile(t, s, nil, udpOnly, Attachment{"a"}, Attachment{"b"})
	again := mustCompile(t, s, nil, udpOnly, Attachment{"c"}, Attachment{"b"})
	if a, b, c := s.Attachment("a"), s.Attachment("b"), s.Attachment("c"); a == 0 || a == b || b == c || c == a {
		t.Errorf("IDs of three attachments are %d, %d, %d", a, b, c)
	}
	if p.places[p.AttachIndex("b")].id != again.places[again.AttachIndex("b")].id {
		t.Error("an ID does not follow its attachment's name")
	}
	if got := []uint16{p.ListenIndex("dns"), p.ListenIndex("gone"), p.AttachIndex("a"), p.AttachIndex("b"), p.AttachIndex("gone")}; !slices.Equal(got, []uint16{0, 1, 2, 3, 4}) {
		t.Errorf("indexes are %d", got)
	}
}

// Names of listeners and attachments are told apart by 16 bits, over all policies of a Shaper: the one
// for which there is no number left is refused, and not taken for another.
func TestNumberOfNames(t *testing.T) {
	s := New(1)
	compile := func(first, n int, attachments ...Attachment) error {
		listeners := make([]Listener, n)
		for i := range listeners {
			listeners[i] = Listener{Name: fmt.Sprint("l", first+i), TCP: true}
		}
		_, err := s.Compile(nil, listeners, attachments, nil, false)
		return err
	}
	wan := Attachment{Name: "wan"}
	for _, err := range []error{compile(0, maxPlaces-1), compile(0, 1, wan), compile(7, 100, wan)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, err := range []error{compile(maxPlaces, 1), compile(0, 1, Attachment{Name: "lan"}), compile(0, maxPlaces)} {
		if err == nil || !strings.Contains(err.Error(), "it takes a restart") {
			t.Errorf("one name too many: %v", err)
		}
	}
	if err := compile(0, maxPlaces-1, wan); err != nil {
		t.Errorf("what is known: %v", err)
	}
	seen := map[uint16]string{}
	for name, l := range s.listeners {
		if other, twice := seen[l.ID]; twice || l.ID == 0 {
			t.Fatalf("%s and %s have the ID %d", name, other, l.ID)
		}
		seen[l.ID] = name
	}
}
