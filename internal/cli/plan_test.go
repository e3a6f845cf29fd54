package cli

import (
	"encoding/json"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestPlan compares files with a running daemon that has connections of two sources, of which one has values of its own.
func TestPlan(t *testing.T) {
	t.Parallel()
	listen, downstream := testutil.FreeAddr(t, "tcp"), testutil.ServeTCP(t, testutil.Echo)
	base := configText(listen, "", downstream, "1MB/s")
	d := startControlled(t, writeConfig(t, "", base))
	for _, source := range []string{"127.0.0.2", "127.0.0.3", "127.0.0.3"} {
		c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}).Dial("tcp4", listen)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if err := ping(c); err != nil {
			t.Fatal(err)
		}
	}
	d.must("plan "+writeConfig(t, "", base+"\n# a comment\n"), "Nothing changes")

	next := writeConfig(t, filepath.Join(t.TempDir(), "shaperd.toml"), strings.ReplaceAll(base, "1MB/s", "3MB/s")+`
for.gold.rate = "5MB/s"
[[group]]
name = "gold"
source = ["127.0.0.3"]
[[limit]]
name = "more"
max_connections = 7
`)
	d.must("plan "+next,
		"limit per-source\n", "8Mbit/s = 1MB/s  ->  24Mbit/s = 3MB/s", "limit more  is added\n", "group gold  is added\n", "of 2 in all",
		"127.0.0.2, at listener \"db\", with 1:\n    per-source  8Mbit/s", "127.0.0.3, at listener \"db\", with 2:\n    per-source  8Mbit/s", "more  applies: 7 connections")
	var changes planChanges
	out, err := d.verb("plan", next, "--json")
	if err == nil {
		err = json.Unmarshal([]byte(out), &changes)
	}
	if err != nil || len(changes.Changed) != 2 || changes.Changed[0].Connections != 2 || changes.Changed[0].Sources[0] != "127.0.0.3" {
		t.Errorf("%v, %+v\n%s", err, changes, out)
	}
	d.must("limits per-source", "8Mbit/s") // as it was

	for want, file := range map[string]string{
		"requires a restart":           strings.Replace(base, "[daemon]", "[daemon]\nmax_buckets = 2000", 1),
		"the configuration has errors": strings.ReplaceAll(base, "1MB/s", "1MB"),
	} {
		if out, err := d.verb("plan", writeConfig(t, "", file)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s\n%s", err, want, out)
		}
	}
	d.must("plan "+writeConfig(t, "", strings.Replace(base, "name = \"db\"", "name = \"renamed\"", 1)), "listener", "For the 2 sources", "nothing changes")
	d.must("plan "+writeConfig(t, "", fmt.Sprintf(strings.Replace(base, listen, "%s", 1), testutil.FreeAddr(t, "tcp"))), "listener \"db\" is removed, or no longer accepts")
}
