package config

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const agreed = `
[[listen]]
name       = "db"
address    = ["tcp://0.0.0.0:5432", "udp://[::]:8000-8010"]
downstream = ["10.0.0.5:5432"]
[[limit]]
name            = "total"
match           = { listen = ["db"], protocol = "tcp", source = ["10.0.0.0/8", "192.0.2.0/24"], port = [5432, 8000] }
key             = ["source", "port"]
rate            = "80Mbit/s"
max_connections = 100
shared          = true
[[limit]]
name    = "datagrams"
match   = { protocol = "udp" }
packets = "5000pps"
shared  = true
[[limit]]
name = "local"
rate = "1Gbit/s"
[shared]
hosts = 4
name  = "gw1"
store = "redis://10.0.0.9:6379"
`

// TestSharedLimits pins the lines, and their hash: where they change from one version to the next,
// hosts disagree while a group is upgraded.
func TestSharedLimits(t *testing.T) {
	c := mustLoad(t, agreed)
	want := map[string]string{
		"total": "match listen db; match protocol tcp; match source 10.0.0.0/8, 192.0.2.0/24; match port 5432, 8000; key source, port; " +
			"source prefix /32 of IPv4, /64 of IPv6; direction to-downstream; rate 80Mbit/s = 10MB/s; burst 0B; max_delay 200ms; " +
			"max_connections 100; queue_timeout 2s; observe false",
		"datagrams": "match protocol udp; key one bucket for all; direction to-downstream; packets 5000pps; burst_packets 0; max_delay 200ms; observe false",
		"[shared]":  "hosts 4; group default; prefix shaperd; lease 1s; failover fast",
	}
	if diff := cmp.Diff(want, c.SharedLimits()); diff != "" {
		t.Error(diff)
	}
	if got := c.SharedDigest(); got != 0xa09b8115763be18e {
		t.Errorf("digest is %#x", got)
	}
	if none := mustLoad(t, listenDB).SharedLimits(); len(none) != 0 {
		t.Errorf("without shared limits: %v", none)
	}
}

// TestSharedDigest changes one thing at a time, on one host.
func TestSharedDigest(t *testing.T) {
	was := mustLoad(t, agreed)
	order := []string{`"10.0.0.0/8", "192.0.2.0/24"`, `"192.0.2.0/24", "10.0.0.0/8"`}
	for _, test := range []struct {
		name    string
		change  []string // old and new
		changed string   // the line that tells it; "" if hosts may differ
	}{
		{"order of elements", order, ""},
		{"order of ports", []string{"[5432, 8000]", `["8000", "5432"]`}, ""},
		{"order of attributes", []string{`["source", "port"]`, `["port", "source"]`}, ""},
		{"spelling", []string{`"80Mbit/s"`, `"10 MB/s"`}, ""},
		{"default written out", []string{"shared  = true", "shared = true\nmax_delay = \"200ms\""}, ""},
		{"name of the host", []string{`"gw1"`, `"gw2"`}, ""},
		{"way to the ledger", []string{"redis://10.0.0.9:6379", "unix:///run/redis.sock"}, ""},
		{"interval", []string{"hosts = 4", "hosts = 4\ninterval = \"50ms\""}, ""},
		{"local limit", []string{"1Gbit/s", "2Gbit/s"}, ""},
		{"address of a listener", []string{"0.0.0.0:5432", "10.0.0.1:5432"}, ""},
		{"answer to the refused", []string{"max_connections = 100", "max_connections = 100\nrefuse_with = \"close\""}, ""},
		{"length of the queue", []string{"max_connections = 100", "max_connections = 100\nmax_queue = 5"}, ""},

		{"rate", []string{"80Mbit/s", "81Mbit/s"}, "total"},
		{"delay", []string{"shared  = true", "shared = true\nmax_delay = \"1s\""}, "datagrams"},
		{"burst", []string{"shared  = true", "shared = true\nburst_packets = 1"}, "datagrams"},
		{"cap", []string{"max_connections = 100", "max_connections = 101"}, "total"},
		{"what slots are for", []string{"max_connections = 100", "max_connections = 100\nslot_for = \"turn\""}, "total"},
		{"key", []string{`["source", "port"]`, `["source"]`}, "total"},
		{"prefix of the key", []string{"max_connections = 100", "max_connections = 100\nipv6_prefix = 56"}, "total"},
		{"match", []string{"192.0.2.0/24", "192.0.2.0/25"}, "total"},
		{"match of another name", []string{`listen = ["db"], `, ""}, "total"},
		{"dry run", []string{"shared  = true", "shared = true\nobserve = true"}, "datagrams"},
		{"new name", []string{`"datagrams"`, `"udp"`}, "datagrams"},
		{"not shared any more", []string{"shared  = true", "shared = false"}, "datagrams"},
		{"another shared limit", []string{`"1Gbit/s"`, "\"1Gbit/s\"\nshared = true"}, "local"},
		{"override in a file", []string{"[shared]", "[[override]]\nlimit = \"total\"\nrate = \"1MB/s\"\n[shared]"}, "total"},
		{"hosts", []string{"hosts = 4", "hosts = 5"}, "[shared]"},
		{"group", []string{"hosts = 4", "hosts = 4\ngroup = \"a\""}, "[shared]"},
		{"prefix of keys", []string{"hosts = 4", "hosts = 4\nprefix = \"a\""}, "[shared]"},
		{"lease", []string{"hosts = 4", "hosts = 4\nlease = \"2s\""}, "[shared]"},
		{"failover", []string{"hosts = 4", "hosts = 4\nfailover = \"strict\""}, "[shared]"},
	} {
		text := strings.Replace(agreed, test.change[0], test.change[1], 1)
		if text == agreed {
			t.Errorf("%s: nothing changed", test.name)
		}
		is := mustLoad(t, text)
		if same := is.SharedDigest() == was.SharedDigest(); same != (test.changed == "") {
			t.Errorf("%s: same digest: %t", test.name, same)
		}
		if a, b := was.SharedLimits()[test.changed], is.SharedLimits()[test.changed]; test.changed != "" && a == b {
			t.Errorf("%s: same line: %s", test.name, a)
		}
	}
}

// TestSharedDigest_Overrides checks that an override on one host shows, and that removing it
// restores agreement; and a dry run of the daemon, which passes everything.
func TestSharedDigest_Overrides(t *testing.T) {
	was := mustLoad(t, agreed)
	with, err := was.With(0, Override{Source: "override", Limit: "total", Values: map[string]Value{"max_connections": ParseValue("max_connections", "50")}})
	if err != nil {
		t.Fatal(err)
	}
	if a, b := was.SharedDigest(), with.SharedDigest(); a == b {
		t.Error("an override does not show")
	}
	if again, err := with.With(0); err != nil || again.SharedDigest() != was.SharedDigest() {
		t.Errorf("without the override: another digest, %v", err)
	}
	observes := mustLoad(t, "[daemon]\nobserve = true\n"+agreed)
	if line := observes.SharedLimits()["total"]; !strings.HasSuffix(line, "observe true") || observes.SharedDigest() == was.SharedDigest() {
		t.Errorf("a daemon that observes: %s", line)
	}
	local, err := was.With(0, Override{Source: "override", Limit: "local", Values: map[string]Value{"rate": ParseValue("rate", "1MB/s")}})
	if err != nil || local.SharedDigest() != was.SharedDigest() {
		t.Errorf("an override of a limit that is not shared: another digest, %v", err)
	}
}
