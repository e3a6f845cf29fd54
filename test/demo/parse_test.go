package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCounters(t *testing.T) {
	got := parseCounters("TcpExt: ListenOverflows ListenDrops\nTcpExt: 12 13\nUdp: In Errors\nUdp: 7 8\nUdp: broken\n")
	want := map[string]int{"TcpExt.ListenOverflows": 12, "TcpExt.ListenDrops": 13, "Udp.In": 7, "Udp.Errors": 8}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestRefusals(t *testing.T) {
	got := parseRefusals(`# HELP shaperd_limit_packets_total Datagrams
shaperd_limit_packets_total{limit="sms",mode="enforce",reason="queue-full",verdict="refuse"} 1.2e+03
shaperd_limit_packets_total{limit="sms",mode="enforce",reason="none",verdict="pass"} 7
shaperd_limit_packets_total{limit="new",mode="observe",reason="queue-full",verdict="refuse"} 9
shaperd_limit_connections_total{limit="slots",mode="enforce",reason="wait-timeout",verdict="refuse"} 3
shaperd_limit_connections_total{limit="slots",mode="enforce",reason="none",verdict="refuse"} 0
`)
	want := []refusal{{"sms", "queue-full", "datagrams", 1200}, {"slots", "wait-timeout", "connections", 3}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(refusal{})); diff != "" {
		t.Error(diff)
	}
}
