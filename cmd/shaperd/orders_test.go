package main

import (
	"errors"
	"fmt"
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

	// What cannot be restored is kept, whatever is ordered then.
	for i, bad := range []string{`{"Blocks":[{"Prefix":"x"}]}`, `{"Blocks":[{}]}`, `{"Blocks":[{"Prefix":"10.0.0.1/8"}]}`, ``} {
		state := at(fmt.Sprint("bad", i))
		if err := os.WriteFile(state+".orders", []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		s := startSteered(t, config, "--state", state)
		s.waitLog("what operators ordered before the restart is not restored")
		s.must("blocks", "Nothing is blocked.")
		s.must("block 192.0.2.1")
		if kept, err := os.ReadFile(state + ".orders.bad"); err != nil || string(kept) != bad {
			t.Errorf("%s is kept as %q, %v", bad, kept, err)
		}
		s.stop()
		s.ended <- <-s.ended
	}
}
