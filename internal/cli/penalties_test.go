package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

const limitWithPenalty = `
[[limit]]
name = "logins"
key = ["source"]
max_connections = 1
max_queue = 0
[[penalty]]
limit = "logins"
after = "3/h"
block = "1h"
`

// connectsFrom reports whether a connection from an address of this host gets an answer. The caller closes it.
func connectsFrom(t *testing.T, source, listen string) (net.Conn, bool) {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}, Timeout: 10 * time.Second}
	c, err := d.Dial("tcp4", listen)
	if errors.Is(err, syscall.ECONNRESET) { // before the client had seen that it is connected
		return nil, false
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c, ping(c) == nil
}

// TestPenalties has a source blocked that is refused three times, over a crash of the daemon, until an operator ends its penalty.
func TestPenalties(t *testing.T) {
	const scanner, other = "127.0.0.2", "127.0.0.3"
	honest := 10
	listen := testutil.FreeAddr(t, "tcp")
	text, _, _ := strings.Cut(configText(listen, "", testutil.ServeTCP(t, testutil.Echo), "1MB/s"), limitPerSource[:10])
	config := writeConfig(t, "", text+limitWithPenalty)
	at := func(name string) string { return filepath.Join(filepath.Dir(config), name) }
	s := startControlled(t, config, "--state", at("first"))
	s.must("penalties", "No source is penalized.")
	open, ok := connectsFrom(t, scanner, listen)
	if !ok {
		t.Fatal("the first connection is refused")
	}
	explain := "explain --source " + scanner + " --to tcp/" + listen
	for i := range 3 {
		if i == 2 {
			s.must(explain, `Penalty of limit "logins": refused 2 of 3 times, for another`)
		}
		if _, ok := connectsFrom(t, scanner, listen); ok {
			t.Fatal("a second connection at a time")
		}
	}
	s.must("penalties", scanner+"/32", "logins", "blocked")
	if err := ping(open); err != nil {
		t.Errorf("the connection that was open has ended: %v", err)
	}
	open.Close()
	refuses := func() {
		t.Helper()
		if _, ok := connectsFrom(t, scanner, listen); ok {
			t.Error("a blocked source gets through")
		}
		honest++ // another one each time: the last connection may not have ended yet
		c, ok := connectsFrom(t, fmt.Sprint("127.0.0.", honest), listen)
		if !ok {
			t.Fatal("another source is blocked")
		}
		c.Close()
	}
	refuses()
	s.must("status", `Penalties block 1 source: see "shaperd penalties".`)
	s.must(explain, `PENALIZED by limit "logins" until `, `New traffic would be refused: limit "logins", blocked.`)
	s.must("explain --source "+other+" --to tcp/"+listen, "New traffic passes")
	s.must("limits logins", "penalty", "1 blocked, 0 would be; 1 blocks imposed")
	s.must("events --kind penalty", "source penalized", "source="+scanner+"/32", "times=1", "for=1h0m0s")
	if out, _ := s.verb("events", "--kind", "penalty"); strings.Count(out, "\n") != 1 {
		t.Errorf("not one event of the penalty:\n%s", out)
	}
	s.mustFail("unblock "+scanner, `127.0.0.2/32 is blocked by the penalty of limit "logins", not by an operator: use "shaperd penalties end 127.0.0.2/32"`)
	s.must("bypass on")
	s.must("penalties", "would be blocked")
	s.must("status", "Penalties would block 1 source")
	c, ok := connectsFrom(t, scanner, listen)
	if !ok {
		t.Fatal("blocked while limits are bypassed")
	}
	c.Close()
	s.must("bypass off")
	s.must("reload")
	refuses()

	var crashed []byte
	testutil.WaitFor(t, "the penalty to be in the file", func() bool {
		var err error
		crashed, err = os.ReadFile(at("first.penalties"))
		return err == nil
	})
	s.stop()
	s.done <- <-s.done
	if err := os.WriteFile(at("second.penalties"), crashed, 0o600); err != nil {
		t.Fatal(err)
	}
	s = startControlled(t, config, "--state", at("second"))
	refuses()
	var all []api.Penalty
	out, err := s.verb("penalties", "--json")
	if err == nil {
		err = json.Unmarshal([]byte(out), &all)
	}
	if left := time.Until(all[0].Until); err != nil || len(all) != 1 || left > time.Hour || left < 50*time.Minute || all[0].Times != 1 || all[0].Mode != "enforce" {
		t.Errorf("%v: %+v", err, all)
	}
	s.mustFail("penalties end "+other, "127.0.0.3/32 is not penalized")
	s.mustFail("penalties end "+scanner+" --limit no", `no limit "no" with a penalty`)
	s.must("penalties end "+scanner+" --limit logins", "No source is penalized.")
	s.waitLog(`msg="penalty ended by operator" source=127.0.0.2/32 limit=logins`)
	if _, ok := connectsFrom(t, scanner, listen); !ok {
		t.Error("blocked after the end of its penalty")
	}
	testutil.WaitFor(t, "the file to be removed", func() bool {
		_, err := os.Stat(at("second.penalties"))
		return errors.Is(err, fs.ErrNotExist)
	})
}

// TestPenalties_Restore restores what of a file can be: a clock that was set does not prolong a block, nor does one end a start.
func TestPenalties_Restore(t *testing.T) {
	config := writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s")+limitWithPenalty)
	state := filepath.Join(filepath.Dir(config), "state")
	now := time.Now()
	saved := func(source string, since, until time.Duration, limit string) string {
		b, _ := json.Marshal(map[string]any{"Limit": limit, "Source": source, "Since": now.Add(since), "Until": now.Add(until), "Times": 2})
		return string(b)
	}
	text := fmt.Sprintf(`{"Penalties":[%s,%s,%s,%s,%s]}`,
		saved("192.0.2.1/32", 23*time.Hour, 24*time.Hour, "logins"), // by a clock that was a day ahead
		saved("192.0.2.2/32", -2*time.Hour, -time.Hour, "logins"),
		saved("192.0.2.3/32", -time.Hour, time.Hour, "other"),
		saved("192.0.2.0/24", -time.Hour, time.Hour, "logins"), // of another prefix length
		saved("192.0.2.4/32", -48*time.Hour, -30*time.Hour, "logins"))
	if err := os.WriteFile(state+".penalties", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s := startControlled(t, config, "--state", state)
	var all []api.Penalty
	out, err := s.verb("penalties", "--json")
	if err == nil {
		err = json.Unmarshal([]byte(out), &all)
	}
	if err != nil || len(all) != 2 || all[0].Source != "192.0.2.1/32" || !all[0].Active || time.Until(all[0].Until) > time.Hour || all[1].Source != "192.0.2.2/32" || all[1].Active {
		t.Errorf("%v: %+v", err, all)
	}
	s.must("penalties --all", "192.0.2.2/32", "ended")
	s.stop()
	s.done <- <-s.done
	if err := os.WriteFile(state+".penalties", []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	s = startControlled(t, config, "--state", state)
	s.waitLog("penalties not restored")
	s.must("penalties", "No source is penalized.")
}

// TestPenalties_Observe says whom a penalty would block, and blocks nobody.
func TestPenalties_Observe(t *testing.T) {
	listen := testutil.FreeAddr(t, "tcp")
	text, _, _ := strings.Cut(configText(listen, "", testutil.ServeTCP(t, testutil.Echo), "1MB/s"), limitPerSource[:10])
	s := startControlled(t, writeConfig(t, "", text+limitWithPenalty+"observe = true\nexcept = { source = [\"127.0.0.3\"] }\n"))
	for _, source := range []string{"127.0.0.2", "127.0.0.3"} {
		open, _ := connectsFrom(t, source, listen)
		for range 4 {
			connectsFrom(t, source, listen)
		}
		open.Close()
		testutil.WaitFor(t, "a connection", func() bool {
			_, ok := connectsFrom(t, source, listen)
			return ok
		})
	}
	s.must("penalties", "127.0.0.2/32", "would be blocked")
	s.must("status", "Penalties would block 1 source")
	s.must("explain --source 127.0.0.2 --to tcp/"+listen, `Would be penalized by limit "logins"`)
	s.must("explain --source 127.0.0.3 --to tcp/"+listen, `Excepted from the penalty of limit "logins"`)
	s.must("events", "source would be penalized", "source=127.0.0.2/32")
	s.must("explain --config "+s.config+" --source 127.0.0.3 --to tcp/"+listen, `Excepted from the penalty of limit "logins"`)
	if out, _ := s.verb("penalties"); strings.Contains(out, "127.0.0.3") {
		t.Errorf("an excepted source is listed:\n%s", out)
	}
}
