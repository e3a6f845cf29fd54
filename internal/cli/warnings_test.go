package cli

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/internal/testutil"
)

// TestWarnings checks the warnings of check, doctor and the log.
func TestWarnings(t *testing.T) {
	const listen = "[[listen]]\nname = \"l\"\naddress = [\"tcp://127.0.0.1:1\"]\ndownstream = [\"127.0.0.1:9\"]\n"
	const udp = "[[listen]]\nname = \"l\"\naddress = [\"udp://127.0.0.1:1\"]\ndownstream = [\"127.0.0.1:9\"]\n"
	const limit = "[[limit]]\nname = \"cap\"\nmax_connections = 5\n"
	const attach = "[[attach]]\nname = \"a\"\ninterface = \"lo\"\ndirection = \"ingress\"\nmode = \"shape\"\n" +
		"[[limit]]\nname = \"each\"\nrate = \"1MB/s\"\nkey = [\"source\"]\nmax_delay = \"100ms\"\nmatch = { attach = [\"a\"] }\n" +
		"[[limit]]\nname = \"wide\"\nrate = \"9MB/s\"\nmax_delay = \"50ms\"\nmatch = { attach = [\"a\"] }\n"
	const dual = "[[listen]]\nname = \"l\"\naddress = [\"tcp://127.0.0.1:1\", \"udp://127.0.0.1:1\"]\ndownstream = [\"127.0.0.1:9\"]\nfirst_byte_timeout = \"5s\"\n"
	const bySource = "[[limit]]\nname = \"each\"\nkey = [\"source\"]\nrate = \"1MB/s\"\n"
	const byPort = "[[limit]]\nname = \"reports\"\nrate = \"10kB/s\"\nmatch = { port = [\"1\"] }\n"
	const shared = "[[limit]]\nname = \"total\"\nrate = \"1MB/s\"\nshared = true\n[shared]\nhosts = 2\n"
	for _, tt := range []struct {
		name, text string
		want       []string // prefixes of the warnings
	}{
		{"no warnings", listen + "[[limit]]\nname = \"r\"\nrate = \"1MB/s\"\n", nil},
		{"metrics on all addresses", "[daemon]\nmetrics = \":9464\"\n" + listen, []string{`[daemon] metrics = ":9464": other hosts`}},
		{"dashboard on all addresses", "[daemon]\ndashboard = \"0.0.0.0:9465\"\n" + listen, []string{`[daemon] dashboard = "0.0.0.0:9465": other hosts`}},
		{"dashboard on one address", "[daemon]\ndashboard = \"192.0.2.1:9465\"\n" + listen, []string{`[daemon] dashboard = "192.0.2.1:9465": other hosts`}},
		{"dashboard off", "[daemon]\ndashboard = \"\"\nmetrics = \"[::1]:9464\"\n" + listen, nil},
		{"ledger without TLS", listen + shared + "store = \"redis+sentinel://127.0.0.1:1,10.0.0.9:1/m\"\n", []string{`[shared] store = "redis+sentinel://127.0.0.1:1,10.0.0.9:1/m" is not encrypted`}},
		{"ledger over TLS", listen + shared + "store = \"rediss://10.0.0.9:6379\"\n", nil},
		{"ledger on this host", listen + shared + "store = \"redis://127.0.0.1:6379\"\n", nil},
		{"ledger at a socket", listen + shared + "store = \"unix:///run/redis.sock\"\n", nil},
		{"cap", listen + limit, []string{`listener "l": limit "cap" caps connections`}},
		{"cap of UDP", udp + limit, nil},
		{"cap of another listener", listen + limit + "match = { listen = [\"m\"] }\n" + strings.Replace(udp, `"l"`, `"m"`, 1), nil},
		{"cap, first byte", listen + "first_byte_timeout = \"5s\"\n" + limit, nil},
		{"cap, idle", listen + "tcp_idle_timeout = \"1h\"\n" + limit, nil},
		{"cap of the downstream", strings.Replace(listen, `["127.0.0.1:9"]`, `[{ address = "127.0.0.1:9", max_connections = 5 }]`, 1), []string{`listener "l": a downstream caps connections`}},
		{"cap of both", dual + limit, nil},
		{"cap of each", dual + limit + "match = { protocol = \"udp\" }\n", nil},
		{"cap of a downstream of both", strings.Replace(dual, `["127.0.0.1:9"]`, `[{ address = "127.0.0.1:9", max_connections = 5 }]`, 1), nil},
		{"limits that cross", listen + bySource + byPort, nil},
		{"crossing limits, one without key", listen + bySource + "[[limit]]\nname = \"all\"\nrate = \"1MB/s\"\n", nil},
		{"limits of two directions", listen + bySource + byPort + "direction = \"from-downstream\"\n", nil},
		{"limits for different traffic", strings.Replace(listen, `0.1:1"`, `0.1:1", "tcp://127.0.0.1:2"`, 1) + bySource + "match = { port = [\"2\"] }\n" + byPort, nil},
		{"caps that cross", listen + "first_byte_timeout = \"5s\"\n" + strings.Replace(bySource+byPort, "rate", "max_connections = 1 #", 2), nil},
		{"a limit without key next to one per source, at an attachment", attach, nil},
		{"one per network, at an attachment", attach + "key = [\"source\"]\nipv4_prefix = 16\n", []string{
			`limit "wide": other limits delay its packets differently, so that delayed packets can leave one of its buckets at once, up to 100ms at its rate`,
		}},
		{"a shared limit at an attachment", strings.Replace(attach, `"shape"`, `"police"`, 1) + "shared = true\n[shared]\nhosts = 2\n", []string{`limit "wide": hosts share it, and attachment "a" has on_stop = "open"`}},
		{"a shared limit at an attachment that stays", strings.Replace(attach, `"shape"`, "\"police\"\non_stop = \"keep\"", 1) + "shared = true\n[shared]\nhosts = 2\n", nil},
		{"one per network, at an attachment that polices", strings.Replace(attach, `"shape"`, `"police"`, 1) + "key = [\"source\"]\nipv4_prefix = 16\n", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			text := tt.text
			if !strings.Contains(text, "[[limit]]") {
				text += "[[limit]]\nname = \"r\"\nrate = \"1MB/s\"\n"
			}
			path := writeConfig(t, "", text)
			l, err := plan.Load(path)
			if err != nil {
				t.Fatal(err)
			}
			warnings := l.Warnings()
			if !slices.EqualFunc(warnings, tt.want, strings.HasPrefix) {
				t.Errorf("warnings %q, want %q", warnings, tt.want)
			}
			_, stderr, err := command(t, "check", path)
			for _, want := range tt.want {
				if err != nil || !strings.Contains(stderr, want) {
					t.Errorf("check: %v, want %q\n%s", err, want, stderr)
				}
			}
		})
	}
	// A file with the wrong suffix.
	path := writeConfig(t, "", listen+"[[limit]]\nname = \"r\"\nrate = \"1MB/s\"\n")
	conf := filepath.Join(filepath.Dir(path), "conf.d", "10-x.conf")
	if err := os.Mkdir(filepath.Dir(conf), 0o755); err != nil {
		t.Fatal(err)
	}
	writeConfig(t, conf, "rate = 1")
	if _, stderr, err := command(t, "check", path); err != nil || !strings.Contains(stderr, conf+" is ignored") {
		t.Errorf("check: %v\n%s", err, stderr)
	}
	s := startControlled(t, writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s")))
	s.waitLog("caps connections, and silent clients keep their slots forever")
}
