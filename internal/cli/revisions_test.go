package cli

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestRollback goes back to configurations whose files have been replaced, also after a restart; a reload reads the files again.
func TestRollback(t *testing.T) {
	t.Parallel()
	listen := testutil.FreeAddr(t, "tcp")
	text := func(rate string) string { return configText(listen, "", "127.0.0.1:9", rate) }
	config := writeConfig(t, "", text("1MB/s"))
	state := filepath.Join(filepath.Dir(config), "state")
	d := startControlled(t, config, "--state", state)
	if out, err := d.verb("rollback"); err == nil || !strings.Contains(err.Error(), "no other configuration is kept") {
		t.Errorf("%v\n%s", err, out)
	}
	for _, rate := range []string{"2MB/s", "3MB/s"} {
		writeConfig(t, config, text(rate))
		d.must("reload")
	}
	writeConfig(t, config, "not TOML")
	if out, err := d.verb("reload"); err == nil {
		t.Errorf("a reload of nonsense:\n%s", out)
	}
	var revisions []string
	testutil.WaitFor(t, "three revisions", func() bool {
		out, err := d.verb("revisions")
		revisions = regexp.MustCompile(`(?m)^[0-9a-f]{12}`).FindAllString(out, -1)
		return err == nil && len(revisions) == 3 && strings.Count(out, "effective") == 1
	})
	d.must("limits per-source", "24Mbit/s")
	d.must("rollback", "Revision "+revisions[1]+" is effective.")
	d.must("limits per-source", "16Mbit/s")
	d.must("status", "ROLLED BACK to revision "+revisions[1]+" of ", " at revision "+revisions[1])
	d.must("rollback "+revisions[2][:6], "Revision "+revisions[2]+" is effective.")
	d.must("limits per-source", "8Mbit/s")
	if out, err := d.verb("rollback", "zz"); err == nil || !strings.Contains(err.Error(), `unknown revision "zz"`) {
		t.Errorf("%v\n%s", err, out)
	}
	writeConfig(t, config, text("3MB/s"))
	d.stop()
	if err := <-d.done; err != nil {
		t.Fatal(err)
	}
	d.done <- nil

	d = startControlled(t, config, "--state", state)
	d.must("limits per-source", "24Mbit/s")
	if out, err := d.verb("status"); err != nil || strings.Contains(out, "ROLLED BACK") {
		t.Errorf("%v\n%s", err, out)
	}
	d.must("rollback", "Revision "+revisions[1]+" is effective.")
	d.must("limits per-source", "16Mbit/s")
	d.must("reload")
	d.must("limits per-source", "24Mbit/s")
	for i := range 12 {
		writeConfig(t, config, text("1MB/s")+strings.Repeat("\n# again", i)+"\n[[limit]]\nname = \"more\"\nmax_connections = "+string(rune('1'+i%9))+"\n")
		d.must("reload")
	}
	testutil.WaitFor(t, "ten revisions", func() bool {
		entries, err := os.ReadDir(state + ".revisions")
		return err == nil && len(entries) == 10
	})
}

// TestRollback_DuringReload goes back while a reload reads files: that is refused, or the reload would undo it.
func TestRollback_DuringReload(t *testing.T) {
	listen := testutil.FreeAddr(t, "tcp")
	config := writeConfig(t, "", configText(listen, "", "127.0.0.1:9", "1MB/s"))
	s := startControlled(t, config, "--state", filepath.Join(filepath.Dir(config), "state"))
	writeConfig(t, config, configText(listen, "", "127.0.0.1:9", "2MB/s"))
	s.must("reload")
	testutil.WaitFor(t, "two revisions", func() bool {
		out, err := s.verb("revisions")
		return err == nil && strings.Count(out, "\n") >= 3
	})
	path, hangs, end := hangInConfD(t, config)
	reloaded := make(chan error, 1)
	go func() {
		_, _, err := command(t, "reload", "--control", s.socket)
		reloaded <- err
	}()
	<-hangs
	if out, err := s.verb("rollback"); err == nil || !strings.Contains(err.Error(), "a reload is reading") {
		t.Errorf("%v\n%s", err, out)
	}
	s.must("limits per-source", "16Mbit/s")
	end()
	if err := <-reloaded; err == nil {
		t.Error("a reload without one of its files succeeded")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	s.must("rollback", "is effective.")
	s.must("limits per-source", "8Mbit/s")
}
