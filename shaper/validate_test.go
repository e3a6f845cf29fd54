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
	listeners := []Listener{{Name: "web", Addresses: []Address{{Protocol: TCP}}}, {Name: "dns", Addresses: []Address{{Protocol: UDP}}}}
	attachments := []Attachment{{Name: "uplink"}}
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
		{"connections", Limit{MaxConnections: 1}, ""},
		{"new connections", Limit{NewConnections: Frequency{1, time.Minute}}, ""},
		{"no limit", Limit{}, `limit "l": rate: missing: one of rate, packets, connections, new_connections, quota is required`},
		{"blocks always", Limit{Block: true, Always: true}, ""},
		{"always without block", Limit{Rate: 8, Always: true}, `limit "l": block: must be set for a limit that is enforced in every mode`},
		{"shared", Limit{Rate: 8, Shared: true}, ""},
		{"shared block", Limit{Block: true, Shared: true}, `limit "l": shared: cannot be combined with block, or a key of connections`},
		{"shared by connection", Limit{Rate: 8, Shared: true, Key: KeyConnection}, `limit "l": shared: cannot be combined with block, or a key of connections`},
		{"rate too low", Limit{Rate: 7}, `limit "l": rate: 7 bit/s: must be from 8 to 1e12`},
		{"rate too high", Limit{Rate: 1e12 + 1}, `limit "l": rate: 1000000000001 bit/s: must be from 8 to 1e12`},
		{"packets of TCP", Limit{Packets: Frequency{1, time.Second}}, `limit "l": packets: unsupported for TCP, which listener "web" proxies: match protocol "udp"`},
		{"packets without a period", Limit{Packets: Frequency{1, 0}, Match: Match{Protocol: UDP}}, `limit "l": packets: 1 every 0s: period must be from 1ns to 8784h0m0s`},
		{"new connections with a negative period", Limit{NewConnections: Frequency{5, -time.Second}}, `limit "l": new_connections: 5 every -1s: period must be from 1ns to 8784h0m0s`},
		{"too many packets", Limit{Packets: Frequency{math.MaxUint64, time.Second}, Match: Match{Protocol: UDP}}, `limit "l": packets: 18446744073709551615 every 1s: must be at most 1e12`},
		{"negative connections", Limit{MaxConnections: -1}, `limit "l": max_connections: -1: must not be negative`},
		{"negative max_queue", Limit{MaxConnections: 1, MaxQueue: -2}, `limit "l": max_queue: -2: must not be negative`},
		{"queue_timeout too long", Limit{MaxConnections: 1, QueueTimeout: 2 * time.Hour}, `limit "l": queue_timeout: 2h0m0s: must be from 0 to 1h0m0s`},
		{"unknown listener", Limit{Rate: 8, Match: Match{Listen: []string{"web", "smtp"}}}, `limit "l": match.listen: unknown listener "smtp"`},
		{"no IPv4 prefix", Limit{Rate: 8, Key: KeySource, IPv6Prefix: 64}, `limit "l": ipv4_prefix: /0: must be from 1 to 32`},
		{"long IPv6 prefix", Limit{Rate: 8, Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 129}, `limit "l": ipv6_prefix: /129: must be from 1 to 128`},
		{"prefix without source key", Limit{Rate: 8, Key: KeyPort, IPv4Prefix: 99}, ""},
		{"downstream", Limit{Rate: 8, Key: KeyDownstream | KeySource, IPv4Prefix: 32, IPv6Prefix: 64}, ""},
		{"connections by downstream", Limit{MaxConnections: 1, Key: KeyDownstream}, `limit "l": key: downstream: unsupported with max_connections, new_connections and a quota of connections, which are decided before a downstream is chosen`},
		{"downstream at an attachment", Limit{Rate: 8, Key: KeyDownstream, Match: Match{Attach: attach}}, `limit "l": key: downstream: unsupported for attachments`},
		{"TLV at an attachment", Limit{Rate: 8, Key: KeyTLV, TLV: 0xe0, Match: Match{Attach: attach}}, `limit "l": key: tlv: unsupported for attachments`},
		{"type of no TLV", Limit{Rate: 8, TLV: 0xe0}, `limit "l": key: the type of a TLV has no effect without tlv`},
		{"two addresses", Limit{Rate: 8, Key: KeySource | KeyDestination, IPv4Prefix: 32, IPv6Prefix: 64}, `limit "l": key: "source" and "destination" cannot be combined: a key has one address`},
		{"no prefix of a destination", Limit{Rate: 8, Key: KeyDestination, IPv6Prefix: 64}, `limit "l": ipv4_prefix: /0: must be from 1 to 32`},
		{"negative max_delay", Limit{Rate: 8, MaxDelay: -1}, `limit "l": max_delay: -1ns: must be from 0 to 1h0m0s`},
		{"long max_delay", Limit{Rate: 8, MaxDelay: time.Hour + 1}, `limit "l": max_delay: 1h0m0.000000001s: must be from 0 to 1h0m0s`},
		{"long burst", Limit{Rate: 8, Burst: 1e9}, `limit "l": burst: takes more than 720h0m0s at the rate`},
		{"long burst of packets", Limit{Packets: Frequency{1, time.Hour}, BurstPackets: 721, Match: Match{Protocol: UDP}}, `limit "l": burst: takes more than 720h0m0s at the rate`},
		{"longest burst", Limit{Packets: Frequency{1, time.Hour}, BurstPackets: 719, Match: Match{Protocol: UDP}}, ""},
		{"invalid protocol", Limit{Rate: 8, Match: Match{Protocol: 4}}, `limit "l": match.protocol: invalid value 4`},
		{"invalid direction", Limit{Rate: 8, Direction: 3}, `limit "l": direction: invalid value 3`},
		{"invalid excess", Limit{Rate: 8, RefuseWith: 5}, `limit "l": refuse_with: invalid value 5`},
		{"invalid share", Limit{Rate: 8, Scheduling: 2}, `limit "l": scheduling: invalid value 2`},
		{"invalid key", Limit{Rate: 8, Key: 1 << 15}, `limit "l": key: invalid value 32768`},
		{"invalid source", Limit{Rate: 8, Match: Match{Source: []netip.Prefix{{}}}}, `limit "l": match.source: invalid Prefix`},
		{"reversed port range", Limit{Rate: 8, Match: Match{Port: []PortRange{{9, 8}}}}, `limit "l": match.port: invalid range 9-8`},
		{"overhead of UDP", Limit{Rate: 8, Overhead: 1000, Match: Match{Protocol: UDP}}, ""},
		{"overhead of TCP", Limit{Rate: 8, Overhead: 38}, `limit "l": overhead: unsupported for TCP, which listener "web" proxies: match protocol "udp"`},
		{"negative overhead", Limit{Rate: 8, Overhead: -1, Match: Match{Protocol: UDP}}, `limit "l": overhead: -1 bytes: must be from 0 to 1000`},
		{"large overhead", Limit{Rate: 8, Overhead: 1001, Match: Match{Protocol: UDP}}, `limit "l": overhead: 1001 bytes: must be from 0 to 1000`},
		{"destination at listeners", Limit{Rate: 8, Match: Match{Destination: ten}}, `limit "l": match.destination: unsupported for listeners`},
		{"ICMP at listeners", Limit{Rate: 8, Match: Match{Protocol: ICMP}}, `limit "l": match.protocol: unsupported for listeners`},
		{"attach key at listeners", Limit{Rate: 8, Key: KeyAttach}, `limit "l": key: unsupported for listeners`},
		{"ECN at listeners", Limit{Rate: 8, ECNMark: 50}, `limit "l": ecn_mark: unsupported for listeners`},
		{"drop at listeners", Limit{MaxConnections: 1, RefuseWith: RefuseDrop}, `limit "l": refuse_with: unsupported for listeners`},

		{"everything at an attachment", Limit{
			Rate: 8, Packets: Frequency{1, time.Second}, Overhead: 38, ECNMark: 100, Key: KeyAttach,
			MaxConnections: 1, NewConnections: Frequency{1, time.Second}, RefuseWith: RefuseDrop,
			Match: Match{Attach: attach, Protocol: TCP, Destination: ten, Port: []PortRange{{1, 2}}},
		}, ""},
		{"ICMP", Limit{Rate: 8, Match: Match{Attach: attach, Protocol: ICMP}}, ""},
		{"shared", Limit{Rate: 8, Shared: true, Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64}, ""},
		{"shared block", Limit{Block: true, Shared: true}, `limit "l": shared: cannot be combined with block, or a key of connections`},
		{"shared per connection", Limit{Rate: 8, Shared: true, Key: KeyConnection}, `limit "l": shared: cannot be combined with block, or a key of connections`},
		{"both planes", Limit{Rate: 8, Match: Match{Attach: attach, Listen: []string{"web"}}}, `limit "l": match.attach: cannot be combined with match.listen: a limit's buckets live in one plane`},
		{"unknown attachment", Limit{Rate: 8, Match: Match{Attach: []string{"uplink", "downlink"}}}, `limit "l": match.attach: unknown attachment "downlink"`},
		{"invalid destination", Limit{Rate: 8, Match: Match{Attach: attach, Destination: []netip.Prefix{{}}}}, `limit "l": match.destination: invalid Prefix`},
		{"control groups", Limit{Rate: 8, Match: Match{Attach: attach, Cgroup: []string{"/", "/a/b"}}}, ""},
		{"relative control group", Limit{Rate: 8, Match: Match{Attach: attach, Cgroup: []string{"a"}}}, `limit "l": match.cgroup: "a": must be an absolute path without ".."`},
		{"connections by control group", Limit{MaxConnections: 1, Match: Match{Attach: attach, Cgroup: []string{"/a"}}}, `limit "l": match.cgroup: unsupported with max_connections and new_connections: not every packet of a connection has it`},
		{"control group at listeners", Limit{Rate: 8, Match: Match{Cgroup: []string{"/a"}}}, `limit "l": match.cgroup: unsupported for listeners`},
		{"DSCP and marks", Limit{Rate: 8, Match: Match{Attach: attach, DSCP: []DSCP{0, 63}, Mark: []Mark{{0, 1}, {AnyMark, AnyMark}}}}, ""},
		{"DSCP out of range", Limit{Rate: 8, Match: Match{Attach: attach, DSCP: []DSCP{64}}}, `limit "l": match.dscp: 64: must be from 0 to 63`},
		{"mark outside its mask", Limit{Rate: 8, Match: Match{Attach: attach, Mark: []Mark{{3, 1}}}}, `limit "l": match.mark: 0x3/0x1: the mask must not be 0, and must have all bits of the value`},
		{"no mask", Limit{Rate: 8, Match: Match{Attach: attach, Mark: []Mark{{}}}}, `limit "l": match.mark: 0x0/0x0: the mask must not be 0, and must have all bits of the value`},
		{"connections by DSCP", Limit{MaxConnections: 1, Match: Match{Attach: attach, DSCP: []DSCP{46}}}, `limit "l": match.dscp: unsupported with max_connections and new_connections: not every packet of a connection has it`},
		{"new connections by mark", Limit{NewConnections: Frequency{1, time.Second}, Match: Match{Attach: attach, Mark: []Mark{{1, 1}}}}, `limit "l": match.mark: unsupported with max_connections and new_connections: not every packet of a connection has it`},
		{"DSCP at listeners", Limit{Rate: 8, Match: Match{DSCP: []DSCP{46}}}, `limit "l": match.dscp: unsupported for listeners`},
		{"mark at listeners", Limit{Rate: 8, Match: Match{Mark: []Mark{{1, 1}}}}, `limit "l": match.mark: unsupported for listeners`},
		{"ports of ICMP", Limit{Rate: 8, Match: Match{Attach: attach, Protocol: ICMP, Port: []PortRange{{1, 2}}}}, `limit "l": match.port: unsupported for icmp`},
		{"connections of UDP", Limit{MaxConnections: 1, Match: Match{Attach: attach, Protocol: UDP}}, `limit "l": max_connections: unsupported for udp: only TCP connections are counted`},
		{"new connections of ICMP", Limit{NewConnections: Frequency{1, time.Second}, Match: Match{Attach: attach, Protocol: ICMP}}, `limit "l": new_connections: unsupported for icmp: only TCP connections are counted`},
		{"both directions at an attachment", Limit{Rate: 8, Direction: Both, Match: Match{Attach: attach}}, `limit "l": direction: both: unsupported for attachments, which have one direction`},
		{"listen key at attachments", Limit{Rate: 8, Key: KeyListen, Match: Match{Attach: attach}}, `limit "l": key: listen: unsupported for attachments`},
		{"close at attachments", Limit{MaxConnections: 1, RefuseWith: RefuseClose, Match: Match{Attach: attach}}, `limit "l": refuse_with: close: unsupported for attachments`},
		{"ECN over 100 %", Limit{Rate: 8, ECNMark: 101, Match: Match{Attach: attach}}, `limit "l": ecn_mark: 101 %: must be from 0 to 100`},
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

func TestValidate_ReportsAllErrors(t *testing.T) {
	_, err := New(1).Compile([]Limit{{Name: "a", Rate: 1}, {Name: "b", Rate: 8}, {Name: "b", Rate: 8, MaxDelay: -1}}, udpOnly, nil, nil, false)
	want := strings.Join([]string{
		`limit "a": rate: 1 bit/s: must be from 8 to 1e12`,
		`limit "b": name: duplicate name`,
		`limit "b": max_delay: -1ns: must be from 0 to 1h0m0s`,
	}, "\n")
	if diff := cmp.Diff(want, fmt.Sprint(err)); diff != "" {
		t.Error(diff)
	}
}

func TestCompile_MaxLimits(t *testing.T) {
	limits := make([]Limit, MaxLimits+1)
	for i := range limits {
		limits[i] = Limit{Name: fmt.Sprint(i), Rate: 8}
	}
	if _, err := New(1).Compile(limits, nil, nil, nil, false); fmt.Sprint(err) != "too many limits: 65 (maximum 64)" {
		t.Error(err)
	}
	p := mustCompile(t, New(1), limits[:MaxLimits], udpOnly)
	if got := p.Route(fromIPv4(1)).ToDownstream; got != ^Set(0) {
		t.Errorf("64 limits without a match: route has the set %x", got)
	}
}

func TestCompile_MaxAttachments(t *testing.T) {
	if _, err := New(1).Compile(nil, nil, make([]Attachment, MaxAttachments+1), nil, false); fmt.Sprint(err) != "too many attachments: 65 (maximum 64)" {
		t.Error(err)
	}
	limits := make([]Limit, MaxConnectionLimits+2)
	for i := range limits {
		limits[i] = Limit{Name: fmt.Sprint(i), MaxConnections: 1, Match: Match{Attach: []string{"up", "down", "up"}}}
	}
	limits[1].Match.Attach = []string{"down"}
	_, err := New(1).Compile(limits, nil, []Attachment{{Name: "up"}, {Name: "down"}}, nil, false)
	want := strings.Join([]string{
		`limit "4": max_connections: too many limits with max_connections match attachment "down" (maximum 4)`,
		`limit "5": max_connections: too many limits with max_connections match attachment "up" (maximum 4)`,
		`limit "5": max_connections: too many limits with max_connections match attachment "down" (maximum 4)`,
	}, "\n")
	if diff := cmp.Diff(want, fmt.Sprint(err)); diff != "" {
		t.Error(diff)
	}
}

func TestCompile_AttachmentIDs(t *testing.T) {
	s := New(1)
	p := mustCompile(t, s, nil, udpOnly, Attachment{Name: "a"}, Attachment{Name: "b"})
	again := mustCompile(t, s, nil, udpOnly, Attachment{Name: "c"}, Attachment{Name: "b"})
	if a, b, c := s.AttachmentID("a"), s.AttachmentID("b"), s.AttachmentID("c"); a == 0 || a == b || b == c || c == a {
		t.Errorf("IDs of three attachments are %d, %d, %d", a, b, c)
	}
	if p.origins[p.AttachmentIndex("b")].id != again.origins[again.AttachmentIndex("b")].id {
		t.Error("an ID does not follow its attachment's name")
	}
	if got := []uint16{p.ListenerIndex("dns"), p.ListenerIndex("gone"), p.AttachmentIndex("a"), p.AttachmentIndex("b"), p.AttachmentIndex("gone")}; !slices.Equal(got, []uint16{0, 1, 2, 3, 4}) {
		t.Errorf("indexes are %d", got)
	}
}

// IDs of listeners and attachments have 16 bits, over all policies of a Shaper: when they
// are exhausted a new name is an error, and does not share the ID of another.
func TestCompile_MaxOrigins(t *testing.T) {
	s := New(1)
	compile := func(first, n int, attachments ...Attachment) error {
		listeners := make([]Listener, n)
		for i := range listeners {
			listeners[i] = Listener{Name: fmt.Sprint("l", first+i), Addresses: []Address{{Protocol: TCP}}}
		}
		_, err := s.Compile(nil, listeners, attachments, nil, false)
		return err
	}
	wan := Attachment{Name: "wan"}
	for _, err := range []error{compile(0, maxOrigins-1), compile(0, 1, wan), compile(7, 100, wan)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, err := range []error{compile(maxOrigins, 1), compile(0, 1, Attachment{Name: "lan"}), compile(0, maxOrigins)} {
		if err == nil || !strings.Contains(err.Error(), "restart the daemon") {
			t.Errorf("one name too many: %v", err)
		}
	}
	if err := compile(0, maxOrigins-1, wan); err != nil {
		t.Errorf("known names: %v", err)
	}
	seen := map[uint16]string{}
	for name, l := range s.listeners {
		if other, duplicate := seen[l.ID]; duplicate || l.ID == 0 {
			t.Fatalf("%s and %s have the ID %d", name, other, l.ID)
		}
		seen[l.ID] = name
	}
}
