package main

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParse(t *testing.T) {
	ip := func(proto byte, length byte, transport ...byte) []byte {
		return append([]byte{0x45, 0, 0, length, 0, 0, 0, 0, 64, proto, 0, 0, 10, 1, 1, 10, 10, 2, 0, 5}, transport...)
	}
	ports := []byte{0x10, 0, 0x0a, 0xd7} // 4096 to 2775
	tcp := append(append([]byte{}, ports...), 0, 0, 0, 1, 0, 0, 0, 2, 0x60, flagSYN|flagACK, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 'A')
	udp := append(append([]byte{}, ports...), 0, 10, 0, 0, 'G', 'x')
	for _, test := range []struct {
		name     string
		packet   []byte
		outgoing bool
		want     arrival
		ok       bool
	}{
		{"tcp, cut short", ip(6, 20+24+100, tcp...), false, arrival{
			peer: netip.MustParseAddrPort("10.1.1.10:4096"), tcp: true, flags: flagSYN | flagACK, payload: 100, first: 'A',
		}, true},
		{"outgoing", ip(6, 20+24, tcp...), true, arrival{
			peer: netip.MustParseAddrPort("10.2.0.5:2775"), tcp: true, flags: flagSYN | flagACK, outgoing: true,
		}, true},
		{"udp", ip(17, 20+10, udp...), false, arrival{
			peer: netip.MustParseAddrPort("10.1.1.10:4096"), payload: 2, first: 'G',
		}, true},
		{"icmp", ip(1, 28, ports...), false, arrival{}, false},
		{"short", ip(6, 40, ports...), false, arrival{}, false},
		{"ipv6", []byte{0x60, 0, 0, 0}, false, arrival{}, false},
		{"nothing", nil, false, arrival{}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, ok := parse(test.packet, test.outgoing)
			if ok != test.ok {
				t.Fatalf("ok is %v", ok)
			}
			if ok && got != test.want {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}

func TestCounters(t *testing.T) {
	got := parseCounters("TcpExt: ListenOverflows ListenDrops\nTcpExt: 12 13\nUdp: In Errors\nUdp: 7 8\nUdp: broken\n")
	want := map[string]int{"TcpExt.ListenOverflows": 12, "TcpExt.ListenDrops": 13, "Udp.In": 7, "Udp.Errors": 8}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestRefusals(t *testing.T) {
	got := parseRefusals(`# HELP shaperd_limit_packets_total Datagrams
shaperd_limit_packets_total{limit="sms",mode="enforce",reason="queue_full",verdict="refuse"} 1.2e+03
shaperd_limit_packets_total{limit="sms",mode="enforce",reason="none",verdict="pass"} 7
shaperd_limit_packets_total{limit="new",mode="observe",reason="queue_full",verdict="refuse"} 9
shaperd_limit_connections_total{limit="slots",mode="enforce",reason="wait_over",verdict="refuse"} 3
shaperd_limit_connections_total{limit="slots",mode="enforce",reason="none",verdict="refuse"} 0
`)
	want := []refusal{{"sms", "queue_full", "datagrams", 1200}, {"slots", "wait_over", "connections", 3}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(refusal{})); diff != "" {
		t.Error(diff)
	}
}

func TestOwner(t *testing.T) {
	for name, want := range map[string]int{
		"shaperd-demo-12-client": 12,
		"shaperd-demo-12":        0,
		"shaperd-demo-x-client":  0,
		"shaperd-demo--1-client": 0,
		"shaperd-12-1-client":    0,
	} {
		if pid, ok := owner(name); ok != (want > 0) || ok && pid != want {
			t.Errorf("%s belongs to %d, %v", name, pid, ok)
		}
	}
}

// TestSweep removes what belongs to a process that is gone, and nothing else.
func TestSweep(t *testing.T) {
	gone := exec.Command("true")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	crashed := fmt.Sprintf("%s%d-client", prefix, gone.Process.Pid)
	for _, name := range []string{crashed, "other", "shaperd-demo-1-client", "shaperd-demo-x-client"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var removed []string
	err := sweep(dir, func(path string) error {
		removed = append(removed, filepath.Base(path))
		return nil
	})
	if diff := cmp.Diff([]string{crashed}, removed); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
}
