package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// What operators ordered is in force after a restart, and after a crash: it is in its file
// as soon as it is.
func TestOrdersOutliveDaemon(t *testing.T) {
	downstream := echoServer(t)
	config := writeConfig(t, "", configText(freePort(t), "", downstream, "1MB/s"))
	at := func(name string) string { return filepath.Join(filepath.Dir(config), name) }

	first := startSteered(t, config, "--state", at("first"))
	for _, order := range []string{
		"block 192.0.2.0/24", "block 198.51.100.0/24 --for 1h", "block 203.0.113.0/24", "unblock 203.0.113.0/24",
		"bypass on --for 1h", "downstreams drain " + downstream, "set limit per-source rate=2MB/s",
	} {
		first.must(order)
	}
	crashed, err := os.ReadFile(at("first.orders"))
	if err != nil {
		t.Fatal(err)
	}
	first.stop()
	first.ended <- <-first.ended
	if err := os.WriteFile(at("second.orders"), crashed, 0o600); err != nil {
		t.Fatal(err)
	}

	second := startSteered(t, config, "--state", at("second"))
	second.waitLog(`msg="what operators ordered before the restart is in force" blocks=2 bypass=true drained=1`)
	second.must("blocks", "192.0.2.0/24", "198.51.100.0/24")
	second.must("status", "BYPASS IS ON")
	second.must("downstreams", "drained")
	if l := second.limit("per-source"); l.Override != nil {
		t.Errorf("a restart has set a limit, where a reload does not: %+v", l)
	}
	for _, order := range []string{"unblock 192.0.2.0/24", "unblock 198.51.100.0/24", "bypass off", "downstreams enable " + downstream} {
		second.must(order)
	}
	if _, err := os.Stat(at("second.orders")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("nothing is ordered any more: %v", err)
	}
	second.stop()
	second.ended <- <-second.ended

	if err := os.WriteFile(at("third.orders"), []byte(`{"Blocks":[{"Prefix":"x"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	third := startSteered(t, config, "--state", at("third"))
	third.waitLog("what operators ordered before the restart is forgotten")
	third.must("blocks", "Nothing is blocked.")
	third.stop()
	third.ended <- <-third.ended

	// What does not go with the configuration any more takes nothing else with it.
	if err := os.WriteFile(at("fourth.orders"), crashed, 0o600); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	text = append(text, "[[limit]]\nname = \"blocked-by-operator\"\nrate = \"1MB/s\"\n"...)
	writeConfig(t, config, string(text))
	fourth := startSteered(t, config, "--state", at("fourth"))
	fourth.waitLog("what operators blocked before the restart is not blocked any more")
	fourth.waitLog(`is in force" blocks=0 bypass=true drained=1`)
	fourth.must("downstreams", "drained")
}
