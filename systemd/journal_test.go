package systemd

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
)

// startJournal starts a journal of its own in a mount namespace, with the catalog of shaperd. Both
// end with the test.
func startJournal(t *testing.T) {
	t.Helper()
	runtime.LockOSThread() // never unlocked, so that the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		t.Fatalf("make a mount namespace: %v: run these tests as root", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	catalog := readFile(t, "shaperd.catalog")
	for _, path := range []string{"/run", "/var/log", "/var/lib/systemd", "/usr/lib/systemd/catalog"} {
		if err := unix.Mount("tmpfs", path, "tmpfs", 0, ""); err != nil {
			t.Fatalf("mount %s: %v", path, err)
		}
	}
	write(t, "/usr/lib/systemd/catalog/shaperd.catalog", catalog, 0o644)
	run(t, "journalctl", "--update-catalog")
	// One with a namespace leaves the kernel's log and audit alone.
	journald := exec.Command("/lib/systemd/systemd-journald", "test")
	journald.Stderr = os.Stderr
	if err := journald.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = journald.Process.Kill()
		_ = journald.Wait()
	})
	testutil.WaitFor(t, "the journal", func() bool {
		_, err := os.Stat("/run/systemd/journal.test/socket")
		return err == nil
	})
	if err := os.Symlink("journal.test", "/run/systemd/journal"); err != nil {
		t.Fatal(err)
	}
}

// entries returns the entries of the journal that match, as journalctl reads them.
func entries(t *testing.T, match ...string) (all []map[string]any) {
	t.Helper()
	run(t, "journalctl", "--namespace=test", "--sync")
	out, _ := run(t, "journalctl", append([]string{"--namespace=test", "-o", "json"}, match...)...)
	for _, line := range strings.Split(strings.TrimSpace(out), "\n") {
		var e map[string]any
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%v in %q", err, line)
		}
		all = append(all, e)
	}
	return all
}

// TestJournal checks what an operator finds in the journal of systemd.
func TestJournal(t *testing.T) {
	startJournal(t)
	dir := t.TempDir()
	stderr, err := os.Create(filepath.Join(dir, "stderr"))
	if err != nil {
		t.Fatal(err)
	}
	defer stderr.Close()
	info, err := stderr.Stat()
	if err != nil {
		t.Fatal(err)
	}
	st := info.Sys().(*syscall.Stat_t)
	listen := testutil.FreeAddr(t, "tcp")
	file := filepath.Join(dir, "shaperd.toml")
	text := fmt.Sprintf("[daemon]\nmetrics = \"\"\ndashboard = \"\"\npin_path = \"/nowhere/pins\"\n"+
		"[[listen]]\nname = \"db\"\naddress = \"tcp://%s\"\ndownstream = %q\n"+
		"[[limit]]\nname = \"each\"\nkey = \"source\"\nmax_connections = 1\nqueue_timeout = \"0s\"\n", listen, testutil.ServeTCP(t, testutil.Echo))
	write(t, file, text, 0o644)

	d := exec.Command(daemonPath(t), "run", "--config", file, "--control", "")
	d.Stderr, d.Env = stderr, []string{fmt.Sprintf("JOURNAL_STREAM=%d:%d", st.Dev, st.Ino)}
	if err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = d.Process.Kill()
		_ = d.Wait()
	})
	await := func(match string) map[string]any {
		t.Helper()
		var found []map[string]any
		testutil.WaitFor(t, match, func() bool {
			if out, _, _ := try(t, "journalctl", "--namespace=test", "-q", "-o", "json", match); out == "" {
				return false
			}
			found = entries(t, match)
			return true
		})
		return found[0]
	}
	const ready = "MESSAGE_ID=01f3331b0e1942f18dfa4cad4515ee72"
	if e := await(ready); e["SHAPERD_CONFIG"] != file || e["_PID"] != fmt.Sprint(d.Process.Pid) || e["_TRANSPORT"] != "journal" {
		t.Errorf("ready: %v", e)
	}

	c, err := net.Dial("tcp", listen)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if second, err := net.Dial("tcp", listen); err == nil { // or it is reset already
		defer second.Close()
	}
	e := await("SHAPERD_SOURCE=127.0.0.1")
	for field, want := range map[string]string{
		"PRIORITY": "4", "SYSLOG_IDENTIFIER": "shaperd", "SYSLOG_FACILITY": "3", "SHAPERD_LIMIT": "each", "SHAPERD_LISTENER": "db",
		"MESSAGE_ID": "56154cd7023f4723b8e141c2edd49315",
	} {
		if e[field] != want {
			t.Errorf("%s=%v, want %s", field, e[field], want)
		}
	}
	if msg, _ := e["MESSAGE"].(string); !strings.HasPrefix(msg, `level=WARN msg="connection refused: `) {
		t.Errorf("refused: %v", e)
	}
	write(t, file, text+strings.Repeat("x\n", 3), 0o644)
	if err := d.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	if e := await("MESSAGE_ID=1d7bff04ee0c4ed38dab6b67127bd212"); e["PRIORITY"] != "3" || !strings.Contains(fmt.Sprint(e["SHAPERD_ERR"]), file+":14:") {
		t.Errorf("reload: %v", e)
	}
	if out, _ := run(t, "journalctl", "--namespace=test", "-x", "-t", "shaperd", "-p", "warning", "SHAPERD_LIMIT=each"); !strings.Contains(out, " Subject: Limit each has refused a connection of 127.0.0.1\n") ||
		!strings.Contains(out, ` "shaperd explain --source 127.0.0.1 --to tcp/PORT" shows`) {
		t.Errorf("with the catalog:\n%s", out)
	}
	if info, err := stderr.Stat(); err != nil || info.Size() > 0 {
		t.Errorf("%d bytes went to stderr too, %v", info.Size(), err)
	}
}
