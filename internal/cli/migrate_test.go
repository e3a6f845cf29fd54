package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// Overrides that an earlier version saved at its end have the current keys at the next start.
func TestPersistedOverrides_EarlierVersion(t *testing.T) {
	config := writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s"))
	state := filepath.Join(filepath.Dir(config), "state")
	setting := func(key, value string) string {
		return `{"Limit":"per-source","Key":"` + key + `","Value":"` + value + `","Since":"2026-01-02T03:04:05Z","Until":null}`
	}
	saved := `{"Settings":[` + strings.Join([]string{
		setting("connections", "7"), setting("max_wait", "3s"), setting("mode", "observe"), setting("rate", "2MB/s"), setting("mode", "both"),
	}, ",") + `]}`
	if err := os.WriteFile(state+".orders", []byte(saved), 0o600); err != nil {
		t.Fatal(err)
	}
	s := startControlled(t, config, "--state", state)
	for _, want := range []string{
		`limit=per-source old="connections=7" new="max_connections=7"`,
		`limit=per-source old="max_wait=3s" new="queue_timeout=3s"`,
		`limit=per-source old="mode=observe" new="observe=true"`,
		`limit \"per-source\": mode=both: `, // reported as not restored
	} {
		s.waitLog(want)
	}
	if l := s.limit("per-source"); l.MaxConnections != 7 || l.QueueTimeout != 3 || l.Mode != shaper.Observe.String() || l.Rate != 2e6 || l.Override["observe"] != "true" {
		t.Errorf("limit is %+v", l)
	}
	testutil.WaitFor(t, "the file has the current keys", func() bool {
		text, err := os.ReadFile(state + ".overrides")
		return err == nil && strings.Contains(string(text), "max_connections") && !strings.Contains(string(text), "max_wait")
	})
}

// A file that an earlier version saved loads with the current keys, and is written with them.
func TestSaved_RenamedKeys(t *testing.T) {
	text := configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:1", "1MB/s")
	path := writeConfig(t, "", text)
	file := filepath.Join(filepath.Dir(path), "conf.d", "90-set-per-source.toml")
	const header = "# Written by \"shaperd set limit --save\": do not edit it. \"shaperd unset limit per-source --saved\" removes it.\n"
	write := func(text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	const old = "[[override]]\nlimit = \"per-source\"\nconnections = 9\nmax_wait = \"3s\"\nmode = \"observe\"\n"
	write(header + old)
	s := startControlled(t, path)
	s.waitLog("90-set-per-source.toml has keys of an earlier version")
	if l := s.limit("per-source"); l.MaxConnections != 9 || l.QueueTimeout != 3 || l.Mode != shaper.Observe.String() {
		t.Errorf("limit is %+v", l)
	}
	s.save("set limit per-source rate=2MB/s --save")
	want := header + "[[override]]\nlimit = \"per-source\"\nmax_connections = 9\nobserve = true\nqueue_timeout = \"3s\"\nrate = \"2MB/s\"\n"
	if got, err := os.ReadFile(file); err != nil || string(got) != want {
		t.Errorf("saved are %q, %v", got, err)
	}
	s.save("unset limit per-source --saved")
	mustNotExist(t, file)

	// A file that was edited is the user's.
	write(header + old + "# why\n")
	s.mustFail("reload", "has errors")
	s.waitLog(`override of limit \"per-source\": max_wait was renamed to queue_timeout`)
}

// What is set by the command line and the API has the current keys.
func TestSetLimit_RenamedKeys(t *testing.T) {
	s := startControlled(t, writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:1", "1MB/s")))
	for set, want := range map[string]string{
		"max_wait=5s":   "max_wait was renamed to queue_timeout",
		"connections=5": "connections was renamed to max_connections",
		"mode=observe":  `mode = "observe" is now observe = true`,
		"observe=maybe": "true or false",
	} {
		s.mustFail("set limit per-source "+set, want)
	}
	s.mustFail("unset limit per-source max_wait", "max_wait was renamed to queue_timeout")
	if l := s.limit("per-source"); l.Override != nil {
		t.Errorf("limit is %+v", l)
	}
}
