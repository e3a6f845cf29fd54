package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd/control"
)

// What operators ordered is in effect after a restart, and after a crash.
func TestOrdersOutliveDaemon(t *testing.T) {
	downstream := echoServer(t)
	config := writeConfig(t, "", configText(freePort(t), "", downstream, "1MB/s"))
	at := func(name string) string { return filepath.Join(filepath.Dir(config), name) }

	first := startSteered(t, config, "--state", at("first"))
	for _, order := range []string{
		"block 192.0.2.0/24", "block 198.51.100.0/24 --for 1h", "block 203.0.113.0/24", "unblock 203.0.113.0/24",
		"bypass on --for 1h", "downstreams drain " + downstream,
		"set limit per-source rate=2MB/s", "set limit per-source rate=3MB/s --for 1h", "set limit per-source burst=1MB --until-reload",
	} {
		first.must(order)
	}
	var crashed []byte
	await(t, "the last order that outlives it to be in the file", func() (ok bool) { // it waits for its disk, but not for long
		var err error
		crashed, err = os.ReadFile(at("first.orders"))
		return err == nil && strings.Contains(string(crashed), "3MB/s")
	})
	first.stop()
	first.ended <- <-first.ended
	if err := os.WriteFile(at("second.orders"), crashed, 0o600); err != nil {
		t.Fatal(err)
	}

	second := startSteered(t, config, "--state", at("second"))
	second.waitLog(`msg="what operators ordered before the restart is in force" limits=1 blocks=2 bypass=true drained=1`)
	second.must("blocks", "192.0.2.0/24", "198.51.100.0/24")
	if out, _ := second.verb("status"); !strings.Contains(out, "BYPASS IS ON") { // it fails: what is drained serves nobody
		t.Errorf("no bypass:\n%s", out)
	}
	second.must("downstreams", "drained")
	if l := second.limit("per-source"); l.Rate != 3e6 || len(l.Override) != 1 {
		t.Errorf("what was set before the restart is not: %+v", l)
	}
	for _, order := range []string{"unset limit per-source", "unblock 192.0.2.0/24", "unblock 198.51.100.0/24", "bypass off", "downstreams enable " + downstream} {
		second.must(order)
	}
	await(t, "a file of no orders to be gone", func() bool {
		_, err := os.Stat(at("second.orders"))
		return errors.Is(err, fs.ErrNotExist)
	})
	second.stop()
	second.ended <- <-second.ended

	// What does not go with the configuration any more takes nothing else with it.
	if err := os.WriteFile(at("third.orders"), crashed, 0o600); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	other := writeConfig(t, filepath.Join(t.TempDir(), "other.toml"), strings.ReplaceAll(string(text), "per-source", "each"))
	third := startSteered(t, other, "--state", at("third"))
	third.waitLog(`limit \"per-source\": rate=3MB/s: limit: unknown limit`)
	third.waitLog("limits=0 blocks=2 bypass=true drained=1")
	if kept, err := os.ReadFile(at("third.orders.bad")); err != nil || string(kept) != string(crashed) {
		t.Errorf("what was not restored is kept as %q, %v", kept, err)
	}
	third.stop()
	third.ended <- <-third.ended
	again := startSteered(t, other, "--state", at("third"))
	again.waitLog("limits=0 blocks=2 bypass=true drained=1")
	again.stop()
	again.ended <- <-again.ended

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

// Orders that only a newer version understands are kept aside, by a name of their own each time:
// they are neither lost with the next order nor taken for others. Those beside them are restored.
func TestOrdersOfNewerVersion(t *testing.T) {
	config := writeConfig(t, "", configText(freePort(t), "", "127.0.0.1:9", "1MB/s"))
	state := filepath.Join(filepath.Dir(config), "state")
	since := `"Since":"2026-01-02T03:04:05Z"`
	newer := `{"Format":7,"Bypass":{"since":"2026-01-02T03:04:05Z","only":"udp"},
		"Blocks":[{"Prefix":"192.0.2.1/32",` + since + `},{"Prefix":"198.51.100.0/24",` + since + `,"Ports":[53]},{"Prefix":"10.0.0.1/8"}],
		"Settings":[{"Limit":"per-source","Key":"rate","Value":"2MB/s",` + since + `,"At":"noon"},
			{"Limit":"per-source","Key":"burst","Value":"1MB",` + since + `}],
		"Drained":null,"Paused":["per-source"]}`
	restart := func(order string, logged ...string) {
		t.Helper()
		s := startSteered(t, config, "--state", state)
		for _, text := range logged {
			s.waitLog(text)
		}
		s.must("blocks", "192.0.2.1/32")
		if out, _ := s.verb("blocks"); strings.Contains(out, "198.51.100") {
			t.Errorf("a block of port 53 is one of all:\n%s", out)
		}
		if out, _ := s.verb("status"); strings.Contains(out, "BYPASS") {
			t.Errorf("a bypass of UDP is one of all:\n%s", out)
		}
		if l := s.limit("per-source"); l.Rate != 1e6 || l.Override["burst"] == "" {
			t.Errorf("limit is %+v", l)
		}
		s.must(order)
		s.stop()
		s.ended <- <-s.ended
	}
	kept := func(name, want string) {
		t.Helper()
		if text, err := os.ReadFile(state + name); err != nil || string(text) != want {
			t.Errorf("%s is %q, %v", name, text, err)
		}
	}
	if err := os.WriteFile(state+".orders", []byte(newer), 0o600); err != nil {
		t.Fatal(err)
	}
	restart("status", `err="Blocks[1]: field \"Ports\": this version of shaperd does not know it: start the version that wrote it, or give the order again"`,
		`err="Bypass: field \"only\": `, `err="Settings[0]: field \"At\": `, `err="Paused: this version`, `err="Format: this version`,
		"Blocks: 10.0.0.1/8 is no prefix to block", "kept="+state+".orders.bad\n")
	kept(".orders", newer)
	restart("block 192.0.2.2", "kept="+state+".orders.bad\n") // once more: nothing was ordered meanwhile
	kept(".orders.bad", newer)
	restart("status")

	again := strings.Replace(newer, "noon", "dusk", 1)
	if err := os.WriteFile(state+".orders.next", []byte(again), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(state+".orders.next", state+".orders"); err != nil {
		t.Fatal(err)
	}
	restart("block 192.0.2.2", "kept="+state+".orders.bad.1\n")
	kept(".orders.bad", newer)
	kept(".orders.bad.1", again)
}

// A reload keeps what operators have set, and drops, and tells, what does not go with the
// configuration any more.
func TestReloadDropsWhatDoesNotFit(t *testing.T) {
	text := configText(freePort(t), "", "127.0.0.1:1", "1MB/s")
	s := startSteered(t, writeConfig(t, "", text+"[[limit]]\nname = \"other\"\nrate = \"2MB/s\"\n"))
	s.must("set limit other rate=3MB/s")
	s.must("set limit per-source burst=1MB rate=4MB/s")
	s.must("unset limit per-source rate")
	writeConfig(t, s.config, strings.Replace(text, "rate = \"1MB/s\"\n", "", 1)+"[[limit]]\nname = \"other\"\nrate = \"2MB/s\"\n")
	_, errors, err := command(t, "reload", "--control", s.socket)
	if err != nil || !strings.Contains(errors, `limit "per-source": burst=1MB: burst: `) {
		t.Errorf("reload: %v\n%s", err, errors)
	}
	if l := s.limit("per-source"); l.Override != nil || l.Rate != 0 {
		t.Errorf("limit is %+v", l)
	}
	if l := s.limit("other"); l.Rate != 3e6 {
		t.Errorf("limit is %+v", l)
	}
}

// A disk that is full, or does not answer, holds up no order, nor the end; that orders are not
// written down is told.
func TestOrdersWithoutDisk(t *testing.T) {
	text := configText(freePort(t), "", "127.0.0.1:9", "1MB/s")
	unsaved := func(s *steered) string {
		t.Helper()
		var status control.Status
		out, err := s.verb("status", "--json")
		if err == nil {
			err = json.Unmarshal([]byte(out), &status)
		}
		if err != nil {
			t.Fatal(err)
		}
		return status.Unsaved
	}

	t.Run("full", func(t *testing.T) {
		folder := t.TempDir()
		if err := unix.Mount("full", folder, "tmpfs", 0, "size=4k"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(folder, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
		s := startSteered(t, writeConfig(t, "", text), "--state", filepath.Join(folder, "state"))
		if err := os.WriteFile(filepath.Join(folder, "full"), make([]byte, 4096), 0o600); err != nil {
			t.Fatal(err)
		}
		_, told, err := command(t, "block", "192.0.2.1", "--control", s.socket)
		if err != nil || !strings.Contains(told, "NOT SAVED") || !strings.Contains(told, "no space left on device") {
			t.Errorf("block: %v\n%s", err, told)
		}
		s.must("blocks", "192.0.2.1/32")
		s.must("status", "NOT SAVED")
		if err := os.Remove(filepath.Join(folder, "full")); err != nil {
			t.Fatal(err)
		}
		s.must("block 192.0.2.2")
		if why := unsaved(s); why != "" {
			t.Errorf("it is told still: %s", why)
		}
	})

	t.Run("without an answer", func(t *testing.T) {
		config, socket := writeConfig(t, "", text), filepath.Join(t.TempDir(), "control.sock")
		folder := filepath.Join(t.TempDir(), "state")
		link := func(to string) {
			t.Helper()
			if err := errors.Join(os.Symlink(to, folder+".next"), os.Rename(folder+".next", folder)); err != nil {
				t.Fatal(err)
			}
		}
		link(t.TempDir())
		daemon, log, ended := shaperdProcess(t, "run", "--config", config, "--control", socket, "--state", filepath.Join(folder, "state"))
		await(t, "ready", func() bool { return strings.Contains(log.String(), "msg=ready") })
		hanging, hangs, end := hangingFolder(t)
		link(hanging)
		s := &steered{process: &process{t: t}, socket: socket}
		s.must("block 192.0.2.1", "192.0.2.1/32")
		<-hangs
		within(t, "bypass", func() {
			if out, _, err := command(t, "bypass", "on", "--control", socket); err != nil || !strings.Contains(out, "BYPASS IS ON") {
				t.Errorf("%v\n%s", err, out)
			}
		})
		if why := unsaved(s); !strings.Contains(why, "no answer since") {
			t.Errorf("it is told as %q", why)
		}
		if err := daemon.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		await(t, "the end", func() bool { return strings.Contains(log.String(), "msg=stopped") })
		end()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("it ended with %v\n%s", err, log)
			}
		case <-time.After(20 * time.Second):
			t.Errorf("it goes on after SIGTERM:\n%s", log)
		}
	})
}
