package cli

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestTry opens more connections than a limit lets in: some pass, some wait, and some are refused.
func TestTry(t *testing.T) {
	t.Parallel()
	listen, downstream := testutil.FreeAddr(t, "tcp"), testutil.ServeTCP(t, testutil.Echo)
	config, _, _ := strings.Cut(configText(listen, "", downstream, "1MB/s"), limitPerSource[:10])
	d := startControlled(t, writeConfig(t, "", config+`
[[limit]]
name = "few"
max_connections = 10
max_queue = 5
queue_timeout = "1m"
refuse_with = "reply"
reply = "http-429"
`))
	try := func(args ...string) map[string]tryResult {
		t.Helper()
		var results []tryResult
		out, err := d.verb(append([]string{"try", "--to", "tcp/" + listen, "--for", "2s", "--json"}, args...)...)
		if err == nil {
			err = json.Unmarshal([]byte(out), &results)
		}
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		all := map[string]tryResult{}
		for _, r := range results {
			if r.First > r.Last || r.Last > 30 {
				t.Errorf("%+v", r)
			}
			all[r.Result] = r
		}
		return all
	}
	got := try("-n", "20", "--source", "127.0.0.9")
	for result, want := range map[string]int{"passed to " + downstream: 10, `waits for limit "few"`: 5, `closed, reply "HTTP/1.1 429 Too Many Requests"`: 5} {
		if got[result].Connections != want {
			t.Errorf("%q: %d, want %d: %+v", result, got[result].Connections, want, got)
		}
	}
	out, _, err := command(t, "try", "--to", "tcp/"+listen, "-n", "3", "--for", "200ms", "--control", "/nowhere")
	if err != nil || !strings.Contains(out, "3  open") {
		t.Errorf("without the daemon's socket: %v\n%s", err, out)
	}
	for want, args := range map[string][]string{
		"only connections can be tried": {"--to", "udp/53"},
		"must be from 1 to 5000":        {"--to", "tcp/53", "-n", "5001"},
		"must be an IPv4":               {"--to", "tcp/53", "--source", "localhost"},
		"must be more than 0":           {"--to", "tcp/53", "--for", "0s"},
		"such as tcp/5432":              {},
	} {
		if out, err := d.verb(append([]string{"try"}, args...)...); err == nil || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%v: %v, want %s\n%s", args, err, want, out)
		}
	}
}
