package shaper

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestValidate(t *testing.T) {
	listeners := []Listener{{Name: "web", TCP: true}, {Name: "dns", UDP: true}}
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
		{"rate too low", Limit{Rate: 7}, `limit "l": rate: 7 bit/s: from 8 to 1e12`},
		{"rate too high", Limit{Rate: 1e12 + 1}, `limit "l": rate: 1000000000001 bit/s: from 8 to 1e12`},
		{"packets of TCP", Limit{Packets: Frequency{1, time.Second}}, `limit "l": packets: listener "web" proxies TCP, which has no packets here: match protocol "udp"`},
		{"packets every nothing", Limit{Packets: Frequency{1, 0}, Match: Match{Protocol: UDP}}, `limit "l": packets: 1 every 0s: every 1ns to 8784h0m0s`},
		{"new connections every nothing", Limit{NewConnections: Frequency{5, -time.Second}}, `limit "l": new_connections: 5 every -1s: every 1ns to 8784h0m0s`},
		{"too many packets", Limit{Packets: Frequency{math.MaxUint64, time.Second}, Match: Match{Protocol: UDP}}, `limit "l": packets: 18446744073709551615 every 1s: at most 1e12`},
		{"negative connections", Limit{Connections: -1}, `limit "l": connections: -1, and max_waiting 0: from 0`},
		{"negative max_waiting", Limit{Connections: 1, MaxWaiting: -2}, `limit "l": connections: 1, and max_waiting -2: from 0`},
		{"max_wait too long", Limit{Connections: 1, MaxWait: 2 * time.Hour}, `limit "l": max_wait: 2h0m0s: from 0 to 1h0m0s`},
		{"unknown listener", Limit{Rate: 8, Match: Match{Listen: []string{"web", "smtp"}}}, `limit "l": match.listen: there is no listener "smtp"`},
		{"no IPv4 prefix", Limit{Rate: 8, Key: KeySource, IPv6Prefix: 64}, `limit "l": ipv4_prefix: /0 and ipv6_prefix /64: from 1 to 32 and from 1 to 128`},
		{"long IPv6 prefix", Limit{Rate: 8, Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 129}, `limit "l": ipv4_prefix: /32 and ipv6_prefix /129: from 1 to 32 and from 1 to 128`},
		{"prefix of no source", Limit{Rate: 8, Key: KeyPort, IPv4Prefix: 99}, ""},
		{"negative max_delay", Limit{Rate: 8, MaxDelay: -1}, `limit "l": max_delay: -1ns: from 0 to 1h0m0s`},
		{"long max_delay", Limit{Rate: 8, MaxDelay: time.Hour + 1}, `limit "l": max_delay: 1h0m0.000000001s: from 0 to 1h0m0s`},
		{"long burst", Limit{Rate: 8, Burst: 1e9}, `limit "l": burst: takes more than 720h0m0s at the rate`},
		{"long burst of packets", Limit{Packets: Frequency{1, time.Hour}, BurstPackets: 721, Match: Match{Protocol: UDP}}, `limit "l": burst: takes more than 720h0m0s at the rate`},
		{"longest burst", Limit{Packets: Frequency{1, time.Hour}, BurstPackets: 719, Match: Match{Protocol: UDP}}, ""},
		{"no such protocol", Limit{Rate: 8, Match: Match{Protocol: 3}}, `limit "l": match: protocol 3, direction 0, excess 0 or key 0x0 is none`},
		{"no such direction", Limit{Rate: 8, Direction: 3}, `limit "l": match: protocol 0, direction 3, excess 0 or key 0x0 is none`},
		{"no such excess", Limit{Rate: 8, Excess: 2}, `limit "l": match: protocol 0, direction 0, excess 2 or key 0x0 is none`},
		{"no such key", Limit{Rate: 8, Key: 32}, `limit "l": match: protocol 0, direction 0, excess 0 or key 0x20 is none`},
		{"no prefix", Limit{Rate: 8, Match: Match{Source: []netip.Prefix{{}}}}, `limit "l": match.source: invalid Prefix is no prefix`},
		{"ports back to front", Limit{Rate: 8, Match: Match{Port: []PortRange{{9, 8}}}}, `limit "l": match.port: 9-8 ends before it begins`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.limit.Name = "l"
			_, err := New(1).Compile([]Limit{tt.limit}, listeners, nil, false)
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
	_, err := New(1).Compile([]Limit{{Name: "a", Rate: 1}, {Name: "b", Rate: 8}, {Name: "b", Rate: 8, MaxDelay: -1}}, udpOnly, nil, false)
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
	if _, err := New(1).Compile(limits, nil, nil, false); fmt.Sprint(err) != "65 limits: at most 64" {
		t.Error(err)
	}
	p := mustCompile(t, New(1), limits[:MaxLimits], udpOnly)
	if got := p.Route(fromIPv4(1)).ToDownstream; got != ^Set(0) {
		t.Errorf("64 limits on everything give the set %x", got)
	}
}
