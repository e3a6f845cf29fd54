package cli

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

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

// TestOverrides_SurviveRestart checks that overrides are restored after a restart and a crash.
func TestOverrides_SurviveRestart(t *testing.T) {
	downstream := testutil.ServeTCP(t, testutil.Echo)
	config := writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", downstream, "1MB/s"))
	at := func(name string) string { return filepath.Join(filepath.Dir(config), name) }

	first := startControlled(t, config, "--state", at("first"))
	for _, change := range []string{
		"block 192.0.2.0/24", "block 198.51.100.0/24 --for 1h", "block 203.0.113.0/24", "unblock 203.0.113.0/24",
		"bypass on --for 1h", "downstreams drain " + downstream,
		"set limit per-source rate=2MB/s", "set limit per-source rate=3MB/s --for 1h", "set limit per-source burst=1MB --until-reload",
	} {
		first.must(change)
	}
	var crashed []byte
	testutil.WaitFor(t, "the last persistent override to be in the file", func() (ok bool) { // verbs wait for the disk for a short time only
		var err error
		crashed, err = os.ReadFile(at("first.overrides"))
		return err == nil && strings.Contains(string(crashed), "3MB/s")
	})
	first.stop()
	first.done <- <-first.done
	if err := os.WriteFile(at("second.overrides"), crashed, 0o600); err != nil {
		t.Fatal(err)
	}

	second := startControlled(t, config, "--state", at("second"))
	second.waitLog(`msg="overrides restored after restart" limits=1 blocks=2 bypass=true drained=1`)
	second.must("blocks", "192.0.2.0/24", "198.51.100.0/24")
	if out, _ := second.verb("status"); !strings.Contains(out, "BYPASS IS ON") { // status fails: the only downstream is drained
		t.Errorf("no bypass:\n%s", out)
	}
	second.must("downstreams", "drained")
	if l := second.limit("per-source"); l.Rate != 3e6 || len(l.Override) != 1 {
		t.Errorf("what was set before the restart is not: %+v", l)
	}
	for _, change := range []string{"unset limit per-source", "unblock 192.0.2.0/24", "unblock 198.51.100.0/24", "bypass off", "downstreams enable " + downstream} {
		second.must(change)
	}
	testutil.WaitFor(t, "the file to be removed without overrides", func() bool {
		_, err := os.Stat(at("second.overrides"))
		return errors.Is(err, fs.ErrNotExist)
	})
	second.stop()
	second.done <- <-second.done

	// An override that is invalid for a new configuration is dropped alone.
	if err := os.WriteFile(at("third.overrides"), crashed, 0o600); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	other := writeConfig(t, filepath.Join(t.TempDir(), "other.toml"), strings.ReplaceAll(string(text), "per-source", "each"))
	third := startControlled(t, other, "--state", at("third"))
	third.waitLog(`limit \"per-source\": rate=3MB/s: limit: unknown limit`)
	third.waitLog("limits=0 blocks=2 bypass=true drained=1")
	if kept, err := os.ReadFile(at("third.overrides.bad")); err != nil || string(kept) != string(crashed) {
		t.Errorf("the file was set aside as %q, %v", kept, err)
	}
	third.stop()
	third.done <- <-third.done
	again := startControlled(t, other, "--state", at("third"))
	again.waitLog("limits=0 blocks=2 bypass=true drained=1")
	again.stop()
	again.done <- <-again.done

	// A file that cannot be restored is set aside before the next change replaces it.
	for i, bad := range []string{`{"Blocks":[{"Prefix":"x"}]}`, `{"Blocks":[{}]}`, `{"Blocks":[{"Prefix":"10.0.0.1/8"}]}`, ``} {
		state := at(fmt.Sprint("bad", i))
		if err := os.WriteFile(state+".overrides", []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		s := startControlled(t, config, "--state", state)
		s.waitLog("override not restored after restart")
		s.must("blocks", "No prefix is blocked.")
		s.must("block 192.0.2.1")
		testutil.WaitFor(t, bad+" to be set aside", func() bool { // the verb waits for the disk for a short time only
			kept, err := os.ReadFile(state + ".overrides.bad")
			return err == nil && string(kept) == bad
		})
		s.stop()
		s.done <- <-s.done
	}
}

// TestOverrides_FromNewerVersion checks that a file with overrides of a newer version is set aside
// under a new name each time, and that the overrides in it which are understood are restored.
func TestOverrides_FromNewerVersion(t *testing.T) {
	config := writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s"))
	state := filepath.Join(filepath.Dir(config), "state")
	since := `"Since":"2026-01-02T03:04:05Z"`
	newer := `{"Format":7,"Bypass":{"since":"2026-01-02T03:04:05Z","only":"udp"},
		"Blocks":[{"Prefix":"192.0.2.1/32",` + since + `},{"Prefix":"198.51.100.0/24",` + since + `,"Ports":[53]},{"Prefix":"10.0.0.1/8"}],
		"Overrides":[{"Limit":"per-source","Key":"rate","Value":"2MB/s",` + since + `,"At":"noon"},
			{"Limit":"per-source","Key":"burst","Value":"1MB",` + since + `}],
		"Drained":null,"Paused":["per-source"]}`
	restart := func(change string, logged ...string) {
		t.Helper()
		s := startControlled(t, config, "--state", state)
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
		s.must(change)
		s.stop()
		s.done <- <-s.done
	}
	kept := func(name, want string) {
		t.Helper()
		if text, err := os.ReadFile(state + name); err != nil || string(text) != want {
			t.Errorf("%s is %q, %v", name, text, err)
		}
	}
	if err := os.WriteFile(state+".overrides", []byte(newer), 0o600); err != nil {
		t.Fatal(err)
	}
	restart("status", `err="Blocks[1]: field \"Ports\": unknown to this version of shaperd: start the version that wrote it, or make the change again"`,
		`err="Bypass: field \"only\": `, `err="Overrides[0]: field \"At\": `, `err="Paused: unknown to this version`, `err="Format: unknown to this version`,
		"Blocks: invalid prefix 10.0.0.1/8", "saved_as="+state+".overrides.bad\n")
	kept(".overrides", newer)
	restart("block 192.0.2.2", "saved_as="+state+".overrides.bad\n") // the same name: nothing has changed in the meantime
	kept(".overrides.bad", newer)
	restart("status")

	again := strings.Replace(newer, "noon", "dusk", 1)
	if err := os.WriteFile(state+".overrides.next", []byte(again), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(state+".overrides.next", state+".overrides"); err != nil {
		t.Fatal(err)
	}
	restart("block 192.0.2.2", "saved_as="+state+".overrides.bad.1\n")
	kept(".overrides.bad", newer)
	kept(".overrides.bad.1", again)
}

// TestReload_DropsInvalidOverrides checks that a reload keeps overrides, and drops and reports
// those that are invalid for the new configuration.
func TestReload_DropsInvalidOverrides(t *testing.T) {
	text := configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:1", "1MB/s")
	s := startControlled(t, writeConfig(t, "", text+"[[limit]]\nname = \"other\"\nrate = \"2MB/s\"\n"))
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

// TestOverrides_DiskFailure checks that a disk which is full, or does not answer, delays neither
// changes nor the stop, and that unsaved overrides are reported.
func TestOverrides_DiskFailure(t *testing.T) {
	text := configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s")
	unsaved := func(s *controlledDaemon) string {
		t.Helper()
		var status api.Status
		out, err := s.verb("status", "--json")
		if err == nil {
			err = json.Unmarshal([]byte(out), &status)
		}
		if err != nil {
			t.Fatal(err)
		}
		return status.StateError
	}

	t.Run("full", func(t *testing.T) {
		folder := t.TempDir()
		if err := unix.Mount("full", folder, "tmpfs", 0, "size=64k"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(folder, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
		s := startControlled(t, writeConfig(t, "", text), "--state", filepath.Join(folder, "state"))
		testutil.WaitFor(t, "the configuration to be kept", func() bool {
			kept, err := filepath.Glob(filepath.Join(folder, "state.revisions", "*.json"))
			return err == nil && len(kept) == 1
		})
		if err := os.WriteFile(filepath.Join(folder, "full"), make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
		_, output, err := command(t, "block", "192.0.2.1", "--control", s.socket)
		if err != nil || !strings.Contains(output, "NOT SAVED") {
			t.Errorf("block: %v\n%s", err, output)
		}
		testutil.WaitFor(t, "the reason", func() bool { return strings.Contains(unsaved(s), "no space left on device") })
		s.must("blocks", "192.0.2.1/32")
		s.must("status", "NOT SAVED")
		if err := os.Remove(filepath.Join(folder, "full")); err != nil {
			t.Fatal(err)
		}
		s.must("block 192.0.2.2")
		testutil.WaitFor(t, "the block to be saved", func() bool { return unsaved(s) == "" })
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
		log.WaitFor(t, "msg=ready")
		hanging, hangs, end := hangingFolder(t)
		link(hanging)
		s := &controlledDaemon{process: &process{t: t}, socket: socket}
		s.must("block 192.0.2.1", "192.0.2.1/32")
		<-hangs
		within(t, "bypass", func() {
			if out, _, err := command(t, "bypass", "on", "--control", socket); err != nil || !strings.Contains(out, "BYPASS IS ON") {
				t.Errorf("%v\n%s", err, out)
			}
		})
		testutil.WaitFor(t, "a report", func() bool { return strings.Contains(unsaved(s), "no answer since") })
		if err := daemon.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		log.WaitFor(t, "msg=stopped")
		end()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("it exited with %v\n%s", err, log)
			}
		case <-time.After(20 * time.Second):
			t.Errorf("it ignores SIGTERM:\n%s", log)
		}
	})
}
