package cli

import (
	"net"
	"path/filepath"
	"strings"
	"testing"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

// TestHold holds a listener over a restart, and resumes it: the client that waits is served then.
func TestHold(t *testing.T) {
	t.Parallel()
	listen := testutil.FreeAddr(t, "tcp")
	config := writeConfig(t, "", configText(listen, "", testutil.ServeTCP(t, testutil.Echo), "1MB/s"))
	state := filepath.Join(filepath.Dir(config), "state")
	first := startControlled(t, config, "--state", state)
	first.must("hold db --for 1h", "HELD: new connections of db have been held for ", "for another 1h", "; 0 waiting.")
	if out, err := first.verb("hold", "bd"); exitCode(err) != exitUsage || !strings.Contains(err.Error(), `unknown listener "bd"; listeners of this daemon: db`) {
		t.Errorf("%v\n%s", err, out)
	}
	first.must("hold db --end-idle", "0 idle connections closed.\n", `until "shaperd resume db"`)
	first.stop()
	first.done <- <-first.done

	second := startControlled(t, config, "--state", state)
	second.waitLog("held=1")
	c, err := net.Dial("tcp4", listen)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	testutil.WaitFor(t, "the client to wait", func() bool {
		out, err := second.verb("status")
		return err == nil && strings.Contains(out, `HELD: new connections of db have been held for `) && strings.Contains(out, "; 1 waiting.")
	})
	second.must("explain --source 192.0.2.1 --to tcp/"+port(listen), "HELD: new connections of db have been held")
	second.must("resume db", "RAMP: new connections of db are admitted at 10/s, and the rate grows; ")
	if err := ping(c); err != nil {
		t.Fatal(err)
	}
	second.must("resume db")
	second.stop()
	second.done <- <-second.done
	third := startControlled(t, config, "--state", state)
	third.must("resume db", "db is not held.")
}

func port(addr string) string { return addr[strings.LastIndexByte(addr, ':')+1:] }

func TestHoldText(t *testing.T) {
	for _, tt := range []struct {
		waiting int
		hold    api.Hold
		want    string
	}{
		{3, api.Hold{State: "down", For: 12}, "DOWN: new connections of db have waited for 12s, until a downstream can be reached; 3 waiting."},
		{400, api.Hold{State: "ramp", Rate: 22.5, LastServed: 9}, "RAMP: new connections of db are admitted at 22.5/s, and the rate grows; 400 waiting, the last of them for another 9s."},
		{7, api.Hold{State: "held", For: 1, Left: 60, LastServed: 61}, "HELD: new connections of db have been held for 1s, for another 1m; 7 waiting, the last of them for another 1m1s."},
	} {
		if got := holdText("db", tt.waiting, &tt.hold); got != tt.want {
			t.Errorf("%q, want %q", got, tt.want)
		}
	}
}
