package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"shaperd.dev/shaperd/shaper"
)

const listenDB = `
[[listen]]
name       = "db"
address    = ["tcp://0.0.0.0:5432", "udp://[::]:8000-8010"]
downstream = ["10.0.0.5:5432"]
`

// write creates a folder of files, given as pairs of names and texts, and returns it.
func write(t *testing.T, files ...string) string {
	t.Helper()
	folder := t.TempDir()
	for i := 0; i < len(files); i += 2 {
		path := filepath.Join(folder, files[i])
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(files[i+1]), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// equalConfigs makes cmp compare the exported fields of a Config.
var equalConfigs = cmp.Options{
	cmpopts.IgnoreUnexported(Config{}),
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

func mustLoad(t *testing.T, text string) *Config {
	t.Helper()
	c, err := Load(filepath.Join(write(t, "shaperd.toml", text), "shaperd.toml"))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// notShared has the defaults of [shared].
var notShared = Shared{Group: "default", Prefix: "shaperd", Lease: time.Second, Interval: 100 * time.Millisecond}

func TestLoad(t *testing.T) {
	for _, test := range []struct {
		name, text string
		want       Config
	}{
		{"defaults", listenDB + "[[limit]]\nname = \"l\"\nrate = \"10Mbit/s\"\n", Config{
			Transparent: Transparent{Mark: 21320}, Shared: notShared,
			Daemon: Daemon{Metrics: "127.0.0.1:9464", Dashboard: "127.0.0.1:9465", MaxBuckets: 1048576, PinPath: "/sys/fs/bpf/shaperd"},
			Listen: []shaper.Listener{{
				Name: "db",
				Addresses: []shaper.Address{
					{Protocol: shaper.TCP, Addr: netip.IPv4Unspecified(), Ports: shaper.PortRange{First: 5432, Last: 5432}},
					{Protocol: shaper.UDP, Addr: netip.IPv6Unspecified(), Ports: shaper.PortRange{First: 8000, Last: 8010}},
				},
				Downstream:        []shaper.Downstream{{Host: "10.0.0.5", Port: 5432, Weight: 1}},
				ConnectTimeout:    5 * time.Second,
				UDPIdleTimeout:    time.Minute,
				MaxFlows:          4096,
				Instances:         1,
				MaxFlowsPerSource: 1024,
				Amplification:     3,
				EjectAfter:        3,
				EjectFor:          10 * time.Second,
				Ramp:              shaper.Frequency{N: 10, Per: time.Second},
				HoldTimeout:       time.Minute,
				MaxQueue:          1000,
			}},
			Limits: []shaper.Limit{{
				Name: "l", IPv4Prefix: 32, IPv6Prefix: 64, Rate: 10e6,
				MaxDelay: 200 * time.Millisecond, QueueTimeout: 2 * time.Second, MaxQueue: 1000,
			}},
		}},
		{"everything", `
daemon = { observe = true, metrics = "", dashboard = "", max_buckets = 4096, loops = 4, pin_path = "/run/bpf/x/" }
asn.files = ["/usr/share/asn.csv"]
[[listen]]
name             = "sms"
address          = ["udp://[::ffff:192.0.2.1]:53", "tcp://[2001:db8::1]:53"]
access_log       = true
downstream       = ["[fd00::5]:5353", "[::ffff:10.0.0.1]", "db.local", "Under_Score.:1"]
connect_timeout  = "1s"
udp_idle_timeout = "1m30s"
max_flows        = 7
[[limit]]
name            = "bytes"
match           = { listen = ["sms"], protocol = "", source = ["::ffff:10.0.0.0/104", "2001:db8::/32"], asn = [64500], port = [53, "50-60"] }
key             = ["source", "asn", "port", "listen"]
ipv4_prefix     = 24
ipv6_prefix     = 56
direction       = "both"
rate            = "5MiB/s"
burst           = "64KiB"
max_delay       = "1s"
max_connections = 5
new_connections = "5/min"
queue_timeout   = "0s"
max_queue       = 0
refuse_with     = "close"
observe         = true
[[limit]]
name          = "packets"
match         = { protocol = "udp" }
key           = ["connection"]
packets       = "2000pps"
burst_packets = 3
direction     = "from-downstream"
overhead      = "0B"
[[limit]]
name         = "blocked"
match.source = ["192.0.2.0/24"]
key          = []
block        = true
refuse_with  = "reject"
`, Config{
			Transparent: Transparent{Mark: 21320}, Shared: notShared,
			Daemon: Daemon{Observe: true, MaxBuckets: 4096, Loops: 4, PinPath: "/run/bpf/x"},
			ASN:    ASN{Files: []string{"/usr/share/asn.csv"}},
			Listen: []shaper.Listener{{
				Name: "sms",
				Addresses: []shaper.Address{
					{Protocol: shaper.UDP, Addr: netip.MustParseAddr("192.0.2.1"), Ports: shaper.PortRange{First: 53, Last: 53}},
					{Protocol: shaper.TCP, Addr: netip.MustParseAddr("2001:db8::1"), Ports: shaper.PortRange{First: 53, Last: 53}},
				},
				Downstream:        []shaper.Downstream{{Host: "fd00::5", Port: 5353, Weight: 1}, {Host: "10.0.0.1", Weight: 1}, {Host: "db.local", Weight: 1}, {Host: "Under_Score.", Port: 1, Weight: 1}},
				ConnectTimeout:    time.Second,
				UDPIdleTimeout:    90 * time.Second,
				MaxFlows:          7,
				Instances:         1,
				AccessLog:         true,
				MaxFlowsPerSource: 1,
				Amplification:     3,
				EjectAfter:        3,
				EjectFor:          10 * time.Second,
				Ramp:              shaper.Frequency{N: 10, Per: time.Second},
				HoldTimeout:       time.Minute,
				MaxQueue:          1000,
			}},
			Limits: []shaper.Limit{
				{
					Name: "bytes",
					Match: shaper.Match{
						Listen: []string{"sms"},
						Source: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("2001:db8::/32")},
						ASN:    []uint32{64500},
						Port:   []shaper.PortRange{{First: 53, Last: 53}, {First: 50, Last: 60}},
					},
					Key:        shaper.KeySource | shaper.KeyASN | shaper.KeyPort | shaper.KeyListen,
					IPv4Prefix: 24, IPv6Prefix: 56, Direction: shaper.Both,
					Rate: 5 << 23, Burst: 65536, MaxDelay: time.Second,
					MaxConnections: 5, NewConnections: shaper.Frequency{N: 5, Per: time.Minute},
					RefuseWith: shaper.RefuseClose, Observe: true,
				},
				{
					Name: "packets", Match: shaper.Match{Protocol: shaper.UDP}, Key: shaper.KeyConnection,
					IPv4Prefix: 32, IPv6Prefix: 64, Direction: shaper.FromDownstream,
					Packets: shaper.Frequency{N: 2000, Per: time.Second}, BurstPackets: 3, MaxDelay: 200 * time.Millisecond,
					QueueTimeout: 2 * time.Second, MaxQueue: 1000, RefuseWith: shaper.RefuseDrop,
				},
				{
					Name: "blocked", Match: shaper.Match{Source: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}},
					IPv4Prefix: 32, IPv6Prefix: 64, MaxDelay: 200 * time.Millisecond, QueueTimeout: 2 * time.Second, MaxQueue: 1000,
					Block: true, RefuseWith: shaper.RefuseReject,
				},
			},
		}},
		{"defaults of an attachment", "[[attach]]\nname = \"uplink\"\ninterface = \"eth0\"\n" +
			"[[limit]]\nname = \"l\"\nrate = \"10Mbit/s\"\nmatch.attach = [\"uplink\"]\n", Config{
			Transparent: Transparent{Mark: 21320}, Shared: notShared,
			Daemon: Daemon{Metrics: "127.0.0.1:9464", Dashboard: "127.0.0.1:9465", MaxBuckets: 1048576, PinPath: "/sys/fs/bpf/shaperd"},
			Attach: []shaper.Attachment{{Name: "uplink", Interfaces: []string{"eth0"}, Queue: 100000, IdleTimeout: time.Hour}},
			Limits: []shaper.Limit{{
				Name: "l", Match: shaper.Match{Attach: []string{"uplink"}}, IPv4Prefix: 32, IPv6Prefix: 64,
				Rate: 10e6, MaxDelay: 200 * time.Millisecond, ECNMark: 50, QueueTimeout: 2 * time.Second,
			}},
		}},
		{"everything of attachments", `
[[attach]]
name             = "up"
interface        = ["eth0", "wg[0-9]", "tap-with-a-long-name-*"]
mode             = "shape"
direction        = "egress"
hook             = "clsact"
on_stop          = "keep"
queue            = 1000
tcp_idle_timeout = "240h"
[[attach]]
name      = "down"
interface = ["eth0"]
direction = "ingress"
mode      = "police"
hook      = "xdp"
[[attach]]
name      = "watch"
interface = "*"
observe   = true
hook      = "tcx"
on_stop   = "open"
[[limit]]
name            = "tcp"
match           = { attach = ["up", "down"], protocol = "tcp", source = ["fd00::/8"], destination = ["::ffff:10.0.0.5/128", "fd01::/16"], port = ["22"] }
key             = ["source", "port", "attach", "connection"]
direction       = "to-downstream"
rate            = "5MB/s"
overhead        = "1kB"
packets         = "100pps"
ecn_mark        = "1%"
[[limit]]
name            = "connections"
match.attach    = ["up"]
max_connections = 5
new_connections = "5/min"
queue_timeout   = "0s"
refuse_with     = "drop"
[[limit]]
name     = "icmp"
match    = { attach = ["up"], protocol = "icmp" }
packets  = "10pps"
ecn_mark = "100%"
`, Config{
			Transparent: Transparent{Mark: 21320}, Shared: notShared,
			Daemon: Daemon{Metrics: "127.0.0.1:9464", Dashboard: "127.0.0.1:9465", MaxBuckets: 1048576, PinPath: "/sys/fs/bpf/shaperd"},
			Attach: []shaper.Attachment{
				{
					Name: "up", Interfaces: []string{"eth0", "wg[0-9]", "tap-with-a-long-name-*"},
					Hook: shaper.HookClsact, OnStop: shaper.StopKeep, Queue: 1000, IdleTimeout: 240 * time.Hour,
				},
				{
					Name: "down", Interfaces: []string{"eth0"}, Direction: shaper.Ingress, Mode: shaper.AttachPolice, Hook: shaper.HookXDP,
					Queue: 100000, IdleTimeout: time.Hour,
				},
				{Name: "watch", Interfaces: []string{"*"}, Observe: true, Hook: shaper.HookTCX, Queue: 100000, IdleTimeout: time.Hour},
			},
			Limits: []shaper.Limit{
				{
					Name: "tcp",
					Match: shaper.Match{
						Attach: []string{"up", "down"}, Protocol: shaper.TCP,
						Source:      []netip.Prefix{netip.MustParsePrefix("fd00::/8")},
						Destination: []netip.Prefix{netip.MustParsePrefix("10.0.0.5/32"), netip.MustParsePrefix("fd01::/16")},
						Port:        []shaper.PortRange{{First: 22, Last: 22}},
					},
					Key:        shaper.KeySource | shaper.KeyPort | shaper.KeyAttach | shaper.KeyConnection,
					IPv4Prefix: 32, IPv6Prefix: 64, Rate: 40e6, Overhead: 1000,
					Packets: shaper.Frequency{N: 100, Per: time.Second}, MaxDelay: 200 * time.Millisecond, ECNMark: 1,
					QueueTimeout: 2 * time.Second,
				},
				{
					Name: "connections", Match: shaper.Match{Attach: []string{"up"}}, IPv4Prefix: 32, IPv6Prefix: 64,
					MaxDelay: 200 * time.Millisecond, ECNMark: 50,
					MaxConnections: 5, NewConnections: shaper.Frequency{N: 5, Per: time.Minute}, RefuseWith: shaper.RefuseDrop,
				},
				{
					Name: "icmp", Match: shaper.Match{Attach: []string{"up"}, Protocol: shaper.ICMP}, IPv4Prefix: 32, IPv6Prefix: 64,
					Packets: shaper.Frequency{N: 10, Per: time.Second}, MaxDelay: 200 * time.Millisecond, ECNMark: 100,
					QueueTimeout: 2 * time.Second,
				},
			},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := mustLoad(t, test.text)
			if diff := cmp.Diff(&test.want, got, equalConfigs...); diff != "" {
				t.Error("-want +got:\n", diff)
			}
			compile(t, got)
		})
	}
}

// TestLoad_SingleValues checks that a single value equals an array of it, and that all
// spellings of a value are equal.
func TestLoad_SingleValues(t *testing.T) {
	load := func(path string) (*Config, string) {
		c, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		compile(t, c)
		text, err := json.Marshal(c.Canonical())
		if err != nil {
			t.Fatal(err)
		}
		return c, string(text)
	}
	arrays, want := load("testdata/arrays.toml")
	single, got := load("testdata/single.toml")
	if diff := cmp.Diff(arrays, single, equalConfigs...); diff != "" {
		t.Error("-arrays +single:\n", diff)
	}
	if got != want {
		t.Errorf("canonical is\n%s, want\n%s", got, want)
	}
}

func TestString_RoundTrip(t *testing.T) {
	for _, s := range []string{"10.0.0.5", "10.0.0.5:1", "[fd00::5]", "[fd00::5]:65535", "db.local", "db.local.:5432"} {
		if d, err := parseDownstream(s); err != nil || d.String() != s {
			t.Errorf("downstream %q is written %q, %v", s, d, err)
		}
	}
	for _, s := range []string{"tcp://0.0.0.0:1", "udp://[::]:65535", "udp://[2001:db8::1]:1-65535"} {
		if a, err := parseAddress(s); err != nil || a.String() != s {
			t.Errorf("address %q is written %q, %v", s, a, err)
		}
	}
}

func TestIsHostname(t *testing.T) {
	for s, want := range map[string]bool{
		"a": true, "db-1.example.com": true, "xn--bcher-kva.example": true, "a.b.": true, "1a": true, "1.example": true,
		strings.Repeat("a", 63): true, strings.Repeat("a", 64): false, strings.Repeat("a.", 126) + "a": true, strings.Repeat("a.", 127) + "a": false,
		"": false, ".": false, "a..b": false, "-a": false, "a-": false, "a b": false, "10.0.0.256": false, "1": false, "bücher": false, "a:b": false,
	} {
		if got := isHostname(s); got != want {
			t.Errorf("isHostname(%q) is %t", s, got)
		}
	}
}

// compile checks that a loaded configuration compiles.
func compile(t interface{ Fatalf(string, ...any) }, c *Config) {
	if _, err := shaper.New(1024).CompileRules(shaper.Rules{
		Limits: c.Limits, Listeners: c.Listen, Attachments: c.Attach, Observe: c.Daemon.Observe, Groups: groupsOf(c), Classes: c.Classes,
	}); err != nil {
		t.Fatalf("loads, but does not compile: %v", err)
	}
}

func groupsOf(c *Config) (all []shaper.Group) {
	for _, g := range c.Groups {
		all = append(all, g.Group)
	}
	return all
}

func TestLoad_ConfD(t *testing.T) {
	folder := write(t,
		"shaperd.toml", "[asn]\nfiles = [\"asn.csv\"]\n[daemon]\nmetrics = \"\"\n"+listenDB,
		"conf.d/20-more.toml", "[asn]\nfiles = [\"more.csv\"]\n[[limit]]\nname = \"second\"\nrate = \"1MB/s\"\nmatch.listen = [\"web\"]\n",
		"conf.d/10-first.toml", "[daemon]\nobserve = true\n[[limit]]\nname = \"first\"\nrate = \"1MB/s\"\n[[listen]]\nname = \"web\"\naddress = [\"tcp://[::]:80\"]\ndownstream = [\"web.local\"]\n",
		"conf.d/.hidden.toml", "not TOML",
		"conf.d/30-other.conf", "not TOML",
		"conf.d/40-saved.toml~", "not TOML",
	)
	c, err := Load(filepath.Join(folder, "shaperd.toml"))
	if err != nil {
		t.Fatal(err)
	}
	want := Daemon{Observe: true, Metrics: "", Dashboard: "127.0.0.1:9465", MaxBuckets: 1048576, PinPath: "/sys/fs/bpf/shaperd"}
	if c.Daemon != want {
		t.Errorf("daemon is %v, want %v", c.Daemon, want)
	}
	var names []string
	for _, l := range c.Limits {
		names = append(names, l.Name)
	}
	for _, l := range c.Listen {
		names = append(names, l.Name)
	}
	if want := []string{"first", "second", "db", "web"}; !slices.Equal(names, want) {
		t.Errorf("limits and listeners are %v, want %v", names, want)
	}
	if want := []string{folder + "/asn.csv", folder + "/conf.d/more.csv"}; !slices.Equal(c.ASN.Files, want) {
		t.Errorf("ASN files are %v, want %v", c.ASN.Files, want)
	}
}

func TestLoad_ErrorsAcrossFiles(t *testing.T) {
	for _, test := range []struct {
		name  string
		files []string
		want  []string
	}{
		{"daemon key", []string{"[daemon]\nobserve = true\n" + listenDB, "[daemon]\nobserve = false\nmax_buckets = 2048\n", "\n[daemon]\nmax_buckets = 2048\n"}, []string{
			`conf.d/1.toml:2:1: observe: duplicate key, already set at shaperd.toml:2: a key of [daemon] may be in one file only`,
			`conf.d/2.toml:3:1: max_buckets: duplicate key, already set at conf.d/1.toml:3: a key of [daemon] may be in one file only`,
		}},
		{"names", []string{listenDB, strings.ReplaceAll(listenDB, "::", "::1"), "[[limit]]\nname = \"l\"\nrate = \"1MB/s\"\n", "[[limit]]\nrate = \"1MB/s\"\nname = \"l\"\n"}, []string{
			`conf.d/1.toml:3:1: name: duplicate name "db": first in [[listen]] at shaperd.toml:3`,
			`conf.d/1.toml:4:15: address: "tcp://0.0.0.0:5432" overlaps "tcp://0.0.0.0:5432" at shaperd.toml:4`,
			`conf.d/1.toml:4:37: address: "udp://[::1]:8000-8010" overlaps "udp://[::]:8000-8010" at shaperd.toml:4`,
			`conf.d/3.toml:3:1: name: duplicate name "l": first in [[limit]] at conf.d/2.toml:2`,
		}},
		{"ASN file", []string{listenDB + "[asn]\nfiles = [\"conf.d/asn.csv\"]", "[asn]\nfiles = [\"asn.csv\"]"}, []string{
			`conf.d/1.toml:2:10: files: duplicate "asn.csv", already named at shaperd.toml:7`,
		}},
		// Names that a broken file may hold are not reported as unknown.
		{"syntax", []string{listenDB, "[[listen]]\nname = \"web\"\n[", "[[limit]]\nname = \"l\"\nrate = \"1M\"\nmatch.listen = [\"web\"]\n"}, []string{
			`conf.d/1.toml:3:2: TOML syntax: unexpected end of table name (table names cannot be empty)`,
			`conf.d/2.toml:3:1: rate: "1M" says neither bits nor bytes: write "1Mbit/s" or "1MB/s"`,
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			files := []string{"shaperd.toml", test.files[0]}
			for i, text := range test.files[1:] {
				files = append(files, fmt.Sprintf("conf.d/%d.toml", i+1), text)
			}
			folder := write(t, files...)
			_, err := Load(filepath.Join(folder, "shaperd.toml"))
			got := strings.ReplaceAll(fmt.Sprint(err), folder+"/", "")
			if diff := cmp.Diff(test.want, strings.Split(got, "\n")); diff != "" {
				t.Error("-want +got:\n", diff)
			}
		})
	}
}

func TestLoad_UnreadableFiles(t *testing.T) {
	folder := write(t, "shaperd.toml", listenDB, "conf.d/folder.toml/x", "", "other/shaperd.toml", listenDB, "other/conf.d", "")
	for path, want := range map[string]error{
		"absent.toml":        fs.ErrNotExist,
		"shaperd.toml":       nil, // conf.d/folder.toml is a folder
		"other/shaperd.toml": nil, // conf.d is a file
		".":                  nil,
	} {
		_, err := Load(filepath.Join(folder, path))
		if err == nil || want != nil && !errors.Is(err, want) {
			t.Errorf("%s: error is %v, want %v", path, err, want)
		} else if !strings.HasPrefix(err.Error(), "read configuration: ") {
			t.Errorf("%s: error is %v", path, err)
		}
	}
}

func TestConfig_ErrorPosition(t *testing.T) {
	c := mustLoad(t, listenDB+`
[[limit]]
name = "first"
rate = "1MB/s"

[[limit]]
name = "second"
match = { protocol = "tcp", listen = ["db"] }
rate = "1MB/s"
`)
	for key, want := range map[string]string{
		"rate":           "14:1",
		"match.listen":   "13:29",
		"match.protocol": "13:11",
		"match.source":   "13:1",
		"packets":        "11:1",
		"":               "11:1",
	} {
		e := c.Error(1, key, "is bad")
		if got := fmt.Sprintf("%d:%d", e.Line, e.Column); got != want || filepath.Base(e.File) != "shaperd.toml" {
			t.Errorf("error at %q is %v, want %s", key, e, want)
		}
	}
}

func TestErrorsAs(t *testing.T) {
	_, err := Load("testdata/bad/several.toml")
	var first *Error
	if !errors.As(err, &first) || first.Line != 2 {
		t.Errorf("the first error is %v", first)
	}
}
