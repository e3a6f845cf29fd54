package cli

import (
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestQuota uses up a quota of connections; the verbs tell, and a reset gives it again.
func TestQuota(t *testing.T) {
	t.Parallel()
	listen := testutil.FreeAddr(t, "tcp")
	config := func(quota string) string {
		return `
[daemon]
metrics = ""
dashboard = ""
pin_path = "/nowhere/pins"
[[listen]]
name = "db"
address = ["tcp://` + listen + `"]
downstream = ["` + testutil.ServeTCP(t, testutil.Echo) + `"]
[[limit]]
name = "logins"
key = ["source"]
` + quota + `
[[limit]]
name = "cap"
max_connections = 5
`
	}
	path := writeConfig(t, "", config(`quota = "3connections/day UTC"`))
	d := startControlled(t, path, "--state", filepath.Join(filepath.Dir(path), "state"))
	passes := func() bool {
		c, err := net.Dial("tcp4", listen)
		if err != nil {
			return false
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(20 * time.Second))
		_, err = c.Write([]byte("x"))
		if err == nil {
			_, err = io.ReadFull(c, make([]byte, 1))
		}
		return err == nil
	}
	d.must("quota", "No quota is in use.")
	for i, want := range []bool{true, true, true, false} {
		if passes() != want {
			t.Fatalf("connection %d: %v", i, !want)
		}
	}
	d.must("quota", "source=127.0.0.1/32", "100%", "day UTC", "refuse", "1 of 1 used up.")
	d.must("quota logins --top 1", "logins")
	d.must("explain --source 127.0.0.1 --to tcp/"+listen[strings.LastIndexByte(listen, ':')+1:],
		`New traffic would be refused: limit "logins", quota.`, `Quota of limit "logins": 3 of 3 used, per day UTC; the period ends in `)
	d.must("quota reset logins --source 127.0.0.1", "The quota of limit logins is reset for 127.0.0.1.")
	if !passes() {
		t.Error("none passes after a reset")
	}
	for line, want := range map[string]string{
		"quota login":                         `unknown limit "login"`,
		"quota reset logins":                  "name one with --source",
		"quota reset cap":                     "has no quota",
		"quota reset login --source ::1":      `unknown limit "login"`,
		"quota reset logins --source ::1 now": "unexpected",
	} {
		if out, err := d.verb(strings.Fields(line)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q\n%s", line, err, want, out)
		}
	}
	d.waitLog(`msg="quota reset by operator" limit=logins source=127.0.0.1`)
	writeConfig(t, path, config(`quota = "2connections/month UTC"`))
	d.must("reload")
	for i, want := range []bool{true, false} {
		if passes() != want {
			t.Errorf("connection %d of two in a month, of which one has passed: %v", i, !want)
		}
	}
}

// A quota needs a file, and one that is damaged is told, not begun again.
func TestQuota_File(t *testing.T) {
	t.Parallel()
	path := writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:1", "1MB/s")+"[[limit]]\nname = \"day\"\nquota = \"1GB/day\"\n")
	if _, _, err := command(t, "run", "--config", path); err == nil || !strings.Contains(err.Error(), `limit "day": quota: needs --state`) {
		t.Errorf("without --state: %v", err)
	}
	state := filepath.Join(filepath.Dir(path), "state")
	writeConfig(t, state+".quotas", "what is this\n")
	if _, _, err := command(t, "run", "--config", path, "--state", state); err == nil || !strings.Contains(err.Error(), state+".quotas: line 1 is damaged") {
		t.Errorf("with a damaged file: %v", err)
	}
}
