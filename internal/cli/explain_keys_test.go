package cli

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/maxmind/mmdbwriter"
	"github.com/maxmind/mmdbwriter/mmdbtype"
)

// TestExplain_Keys asks about flows whose buckets other things than the source tell apart.
func TestExplain_Keys(t *testing.T) {
	file := writeConfig(t, "", `
[[listen]]
name       = "plcs"
address    = ["tcp://127.0.0.1:5020", "tcp://127.0.0.2:5020", "tcp://127.0.0.3:5021"]
downstream = "127.0.0.9:502"
[[listen]]
name       = "web"
address    = "tcp://127.0.0.1:8080"
downstream = ["10.0.0.1:80", "10.0.0.2:80"]
[[attach]]
name      = "plant"
interface = "eth0"
mode      = "police"
[[limit]]
name            = "per-plc"
match           = { listen = "plcs" }
key             = "destination"
max_connections = 2
[[limit]]
name    = "packets-per-plc"
match   = { attach = "plant", port = 502 }
key     = ["destination", "port"]
packets = "100pps"
[[limit]]
name  = "per-server"
match = { listen = ["web", "plcs"], port = 8080 }
key   = "downstream"
rate  = "1MB/s"
[[listen]]
name              = "behind"
address           = "tcp://127.0.0.1:9090"
downstream        = "10.0.0.1:80"
accept_proxy_from = "10.0.0.9"
[[listen]]
name              = "behind2"
address           = "tcp://127.0.0.1:9091"
downstream        = "10.0.0.1:80"
accept_proxy_from = "10.0.0.9"
[[limit]]
name  = "per-address"
match = { listen = "behind2" }
key   = "destination"
rate  = "1MB/s"
[[limit]]
name  = "per-tenant"
match = { listen = "behind" }
key   = ["tlv:0xE0", "port"]
rate  = "1MB/s"
[[limit]]
name  = "voice"
match = { attach = "plant", port = 5060, dscp = ["ef", "af41"] }
rate  = "1Mbit/s"
[[limit]]
name  = "backup"
match = { attach = "plant", port = 873, cgroup = "/system.slice/backup.service" }
rate  = "1Mbit/s"
[[limit]]
name  = "marked"
match = { attach = "plant", port = 5060, mark = "0x10/0xf0" }
rate  = "1Mbit/s"
`)
	for _, tt := range []struct {
		name, args string
		output     string // on stdout, or in the error
	}{
		{"destination named", "--to tcp/127.0.0.2:5020", "destination 127.0.0.2/32"},
		{"only one destination", "--to tcp/5021", "destination 127.0.0.3/32"},
		{"which destination", "--to tcp/5020", `limit "per-plc" has a bucket for each destination: use --to tcp/ADDRESS:5020 to name one`},
		{"destination of packets", "--attach plant --to tcp/502 --destination 10.40.0.7", "destination 10.40.0.7/32, port 502"},
		{"which destination of packets", "--attach plant --to tcp/502", `limit "packets-per-plc" has a bucket for each destination: use --destination to name one`},
		{"no limit by destination", "--attach plant --to tcp/80", "No limit matches"},
		{"which downstream", "--to tcp/8080", `limit "per-server" has a bucket for each downstream: use --downstream to name one`},
		{"downstream", "--to tcp/8080 --downstream 10.0.0.2:80", "downstream 10.0.0.2:80"},
		{"unknown downstream", "--to tcp/8080 --downstream 10.0.0.2", `listener "web" has no downstream "10.0.0.2": it has 10.0.0.1:80, 10.0.0.2:80`},
		{"downstream of packets", "--attach plant --to tcp/502 --downstream 10.0.0.2:80", "--downstream and --attach cannot be combined"},
		{"TLV", "--to tcp/9090 --tlv 0xE0=tenant-7", `port 9090, tlv:0xe0 "tenant-7"`},
		{"TLV of another type", "--to tcp/9090 --tlv 0xE1=tenant-7", "port 9090, tlv:0xe0 none"},
		{"no TLV", "--to tcp/9090", "port 9090, tlv:0xe0 none"},
		{"TLV without a header", "--to tcp/8080 --downstream 10.0.0.2:80 --tlv 0xE0=tenant-7", `--tlv: tcp at listener "web" has no PROXY header`},
		{"destination in a header", "--listener behind2 --to tcp/9091", `limit "per-address" has a bucket for each destination: use --to tcp/ADDRESS:9091 to name one`},
		{"destination in a header named", "--listener behind2 --to tcp/198.51.100.1:9091", "destination 198.51.100.1/32"},
		{"bad TLV", "--to tcp/9090 --tlv tenant-7", `--tlv "tenant-7": must be a type and a value`},
		{"DSCP", "--attach plant --to tcp/5060 --dscp EF", "tcp/5060, dscp ef: attachment"},
		{"limit of a DSCP", "--attach plant --to tcp/5060 --dscp 34", "\nvoice "},
		{"no limit of the default DSCP and mark", "--attach plant --to tcp/5060", "No limit matches"},
		{"limit of a mark", "--attach plant --to tcp/5060 --mark 0x11", "\nmarked "},
		{"mark", "--attach plant --to tcp/5060 --mark 17", "tcp/5060, mark 0x11: attachment"},
		{"process of a control group", "--attach plant --to tcp/873 --cgroup /system.slice/backup.service/sub", "tcp/873, cgroup /system.slice/backup.service/sub: attachment"},
		{"limit of a control group", "--attach plant --to tcp/873 --cgroup /system.slice/backup.service", "\nbackup "},
		{"process of another one", "--attach plant --to tcp/873 --cgroup /system.slice/backup.service2", "No limit matches"},
		{"no local process", "--attach plant --to tcp/873", "No limit matches"},
		{"bad control group", "--attach plant --to tcp/873 --cgroup backup", `--cgroup: "backup" is not the path of a control group`},
		{"bad DSCP", "--attach plant --to tcp/5060 --dscp 64", `--dscp: "64" is not a DSCP`},
		{"bad mark", "--attach plant --to tcp/5060 --mark 0x10/0xff", `--mark "0x10/0xff"`},
		{"DSCP at a listener", "--to tcp/5021 --dscp ef", "--dscp requires --attach"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			args := append([]string{"explain", "--config", file, "--source", "192.0.2.1"}, strings.Fields(tt.args)...)
			out, _, err := command(t, args...)
			if err != nil {
				out = err.Error()
			}
			if !strings.Contains(out, tt.output) {
				t.Errorf("%s: %s\nwant %s", tt.args, out, tt.output)
			}
		})
	}
}

// Countries are read from an MMDB when a limit has to do with them.
func TestExplain_Countries(t *testing.T) {
	tree, err := mmdbwriter.New(mmdbwriter.Options{DatabaseType: "Example-Country", IncludeReservedNetworks: true})
	if err != nil {
		t.Fatal(err)
	}
	_, network, _ := net.ParseCIDR("192.0.2.0/24")
	if err := tree.Insert(network, mmdbtype.Map{"country": mmdbtype.Map{"iso_code": mmdbtype.String("DE")}}); err != nil {
		t.Fatal(err)
	}
	db, err := os.Create(filepath.Join(t.TempDir(), "country.mmdb"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := tree.WriteTo(db); err != nil {
		t.Fatal(err)
	}
	file := writeConfig(t, "", `
[asn]
files = "`+db.Name()+`"
[[listen]]
name       = "web"
address    = "tcp://127.0.0.1:8080"
downstream = "10.0.0.1:80"
[[limit]]
name = "per-country"
key  = "country"
rate = "1MB/s"
[[limit]]
name  = "abroad"
match = { country = "unknown" }
rate  = "1MB/s"
`)
	for source, want := range map[string][]string{
		"192.0.2.7":    {"country DE\n", "per-country  country DE "},
		"198.51.100.1": {"unknown AS\n", "per-country  country unknown ", "abroad "},
	} {
		out, _, err := command(t, "explain", "--config", file, "--source", source, "--to", "tcp/8080")
		for _, text := range want {
			if err != nil || !strings.Contains(out, text) {
				t.Errorf("%v, %q is not in:\n%s", err, text, out)
			}
		}
		if is := strings.Contains(out, "abroad"); is != slices.Contains(want, "abroad ") {
			t.Errorf("limit abroad: %v for %s", is, source)
		}
	}
}
