package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/safefile"
	"shaperd.dev/shaperd/internal/testutil"
)

// otherUser is the ID of an unprivileged user.
const otherUser = 64004

// runAs runs f as another user, on a thread of its own.
func runAs(uid int, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so that Go ends the thread
		_, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid))
		if errno != 0 {
			done <- errno
			return
		}
		done <- f()
	}()
	return <-done
}

// startForSave starts a daemon as root, and returns the file for saved overrides of its limit.
func startForSave(t *testing.T) (s *controlledDaemon, file string) {
	t.Helper()
	path := writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:1", "1MB/s"))
	s = startControlled(t, path)
	return s, filepath.Join(filepath.Dir(path), "conf.d", "90-set-per-source.toml")
}

// save runs a verb with --config.
func (s *controlledDaemon) save(line string, texts ...string) {
	s.must(line+" --config "+s.config, texts...)
}

func (s *controlledDaemon) mustFailToSave(line, text string) {
	s.mustFail(line+" --config "+s.config, text)
}

// mustLoad checks that a daemon would start with the files.
func (s *controlledDaemon) mustLoad() {
	s.t.Helper()
	if r := check(s.config); !r.OK {
		s.t.Errorf("the next start would fail: %v", r.Errors)
	}
}

func mustNotExist(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s exists: %v", path, err)
	}
}

// TestSave_TakesEffect checks that a saved override is effective at once, after a reload, after a
// temporary override has expired, and until it is removed.
func TestSave_TakesEffect(t *testing.T) {
	s, file := startForSave(t)
	is := func(rate float64, connections int) {
		t.Helper()
		if l := s.limit("per-source"); l.Rate != rate || l.MaxConnections != connections || len(l.Override) != 0 {
			t.Errorf("limit is %+v", l)
		}
		s.mustLoad()
	}
	s.must("set limit per-source rate=9MB/s max_connections=3") // runtime override
	s.save("set limit per-source rate=4MB/s --save", "now  32Mbit/s", "saved in "+file)
	if l := s.limit("per-source"); l.Rate != 4e6 || l.MaxConnections != 3 || l.Override["max_connections"] != "3" || l.Override["rate"] != "" {
		t.Errorf("with a runtime override: %+v", l)
	}
	s.must("unset limit per-source", "now  32Mbit/s", "rate is still overridden in "+file+":4")
	is(4e6, 5)
	s.save("set limit per-source max_connections=9 --save") // keeps the other key
	is(4e6, 9)
	s.must("reload")
	is(4e6, 9)
	s.must("set limit per-source rate=5MB/s --for 2s", "now  40Mbit/s") // longer than a stall before the answer
	s.waitLimit("per-source", func(l api.Limit) bool { return l.Override == nil })
	is(4e6, 9)
	s.mustFail("unset limit per-source", "no key is overridden in limit \"per-source\"; max_connections is overridden in "+file+":4; rate is overridden in")
	s.save("unset limit per-source --saved", "now  8Mbit/s", "removed "+file)
	is(1e6, 5)
	mustNotExist(t, file)
	s.mustFailToSave("unset limit per-source --saved", "has no saved overrides")
	s.mustFailToSave("set limit nosuch rate=1MB/s --save", "unknown limit")
	s.mustFailToSave("set limit per-source rate=1MB/s --save --for 1m", "--save is permanent")
}

// TestSave_IgnoresUmask checks that a saved file has the mode and group of the configuration,
// whatever the umask is.
func TestSave_IgnoresUmask(t *testing.T) {
	for _, umask := range []int{0, 0o027, 0o077} {
		s, file := startForSave(t)
		if err := os.Chown(s.config, 0, otherUser); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(s.config, 0o640); err != nil {
			t.Fatal(err)
		}
		old := unix.Umask(umask)
		s.save("set limit per-source rate=4MB/s --save")
		unix.Umask(old)
		for path, want := range map[string]os.FileMode{file: 0o640, filepath.Dir(file): os.ModeDir | 0o755} {
			info, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			if info.Mode() != want {
				t.Errorf("umask %#o: %s has mode %v, want %v", umask, path, info.Mode(), want)
			}
		}
		if got := mustStat(t, file).Gid; got != otherUser {
			t.Errorf("umask %#o: it is of group %d", umask, got)
		}
	}
}

func mustStat(t *testing.T, path string) (s unix.Stat_t) {
	t.Helper()
	if err := unix.Lstat(path, &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// TestSave_RejectsInvalidConfig checks that an override which does not load, or which the daemon
// rejects, leaves no trace.
func TestSave_RejectsInvalidConfig(t *testing.T) {
	for _, tt := range []struct {
		name string
		file string // of conf.d
		text string
		edit func(config string) string
		set  string
		want string
	}{
		{"overridden before", "10-tune.toml", "[[override]]\nlimit = \"per-source\"\nrate = \"3MB/s\"\n", nil, "rate=4MB/s", "duplicate override"},
		{"overridden behind", "99-tune.toml", "[[override]]\nlimit = \"per-source\"\nrate = \"3MB/s\"\n", nil, "rate=4MB/s", "duplicate override"},
		{"limit gone", "", "", func(c string) string { return strings.ReplaceAll(c, "per-source", "other") }, "rate=4MB/s", `unknown limit "per-source"`},
		{"no value", "", "", nil, "burst=$(reboot)", "burst"},
		{"no key", "", "", nil, "name=x", `unknown key "name"`},
		{"a mistake elsewhere", "10-x.toml", "[[limti]]\n", nil, "rate=4MB/s", "limti"},
		{"requires a restart", "", "", func(c string) string { return strings.Replace(c, "[daemon]", "[daemon]\nmax_buckets = 2000", 1) }, "rate=4MB/s", "requires a restart"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, file := startForSave(t)
			if tt.file != "" {
				if err := os.Mkdir(filepath.Dir(file), 0o755); err != nil {
					t.Fatal(err)
				}
				writeConfig(t, filepath.Join(filepath.Dir(file), tt.file), tt.text)
			}
			if tt.edit != nil {
				text, err := os.ReadFile(s.config)
				if err != nil {
					t.Fatal(err)
				}
				writeConfig(t, s.config, tt.edit(string(text)))
			}
			s.mustFailToSave("set limit per-source "+tt.set+" --save", tt.want)
			mustNotExist(t, file)
			mustNotExist(t, file+".next")
			if l := s.limit("per-source"); l.Rate != 1e6 || l.Override != nil {
				t.Errorf("limit is %+v", l)
			}
		})
	}
}

// TestSave_RestoresFileOnFailure checks that a rejected save restores the file byte for byte.
func TestSave_RestoresFileOnFailure(t *testing.T) {
	s, file := startForSave(t)
	s.save("set limit per-source rate=4MB/s --save")
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(s.config)
	if err != nil {
		t.Fatal(err)
	}
	writeConfig(t, s.config, strings.Replace(string(text), "[daemon]", "[daemon]\nmax_buckets = 2000", 1))
	for _, line := range []string{"set limit per-source max_connections=7 --save", "unset limit per-source --saved"} {
		s.mustFailToSave(line, "requires a restart")
		if after, err := os.ReadFile(file); err != nil || string(after) != string(before) {
			t.Errorf("%s: %q, %v", line, after, err)
		}
	}
	// The saved overrides of a removed limit can be removed.
	writeConfig(t, s.config, strings.ReplaceAll(string(text), "per-source", "each"))
	s.mustFail("reload", "has errors")
	s.save("unset limit per-source --saved", "removed "+file)
	mustNotExist(t, file)
	if l := s.limit("each"); l.Rate != 1e6 {
		t.Errorf("limit is %+v", l)
	}
}

// TestSave_Concurrent checks that each of several concurrent saves either succeeds and is in the
// file, or fails and is not. The first two try until they succeed.
func TestSave_Concurrent(t *testing.T) {
	s, _ := startForSave(t)
	sets := []string{"rate=4MB/s", "burst=1MB", "new_connections=50/s", "max_delay=1s", "max_connections=7", "queue_timeout=3s", "max_queue=9", "observe=true"}
	saved := make([]bool, len(sets))
	var all sync.WaitGroup
	for i, set := range sets {
		all.Go(func() {
			for try := 0; try < 50 || i < 2; try++ {
				_, _, err := command(t, "set", "limit", "per-source", set, "--save", "--config", s.config, "--control", s.socket)
				saved[i] = err == nil
				if saved[i] || !errors.Is(err, safefile.ErrBusy) && !strings.Contains(err.Error(), "has changed in the meantime") {
					if err != nil {
						t.Error(set, err)
					}
					break
				}
				time.Sleep(time.Duration(i+1) * time.Millisecond)
			}
		})
	}
	all.Wait()
	s.mustLoad()
	s.must("reload")
	in, n := s.limit("per-source").FileOverride, 0
	for i, set := range sets {
		key, _, _ := strings.Cut(set, "=")
		if saved[i] != (in[key] != "") {
			t.Errorf("%s: saved %v, and in the file %q", set, saved[i], in[key])
		}
		if saved[i] {
			n++
		}
	}
	if n < 2 {
		t.Errorf("%d of %d were saved", n, len(sets))
	}
}

// TestSave_RejectsForeignFiles checks that a file with other contents, or one that others could have
// modified, is neither used nor overwritten.
func TestSave_RejectsForeignFiles(t *testing.T) {
	const other = "\n[[override]]\nlimit = \"per-source\"\nburst = \"1MB\"\n"
	for _, tt := range []struct {
		name string
		mess func(file string) error
		want string
	}{
		{"another override", func(file string) error { return appendTo(file, other) }, "was edited"},
		{"a limit", func(file string) error { return appendTo(file, "[[limit]]\nname = \"x\"\nrate = \"1MB/s\"\n") }, "was edited"},
		{"a comment", func(file string) error { return appendTo(file, "# why\n") }, "was edited"},
		{"of another user", func(file string) error { return os.Chown(file, otherUser, 0) }, "belongs to user"},
		{"writable", func(file string) error { return os.Chmod(file, 0o666) }, "is writable by others"},
		{"folder of another user", func(file string) error { return os.Chown(filepath.Dir(file), otherUser, 0) }, "belongs to user"},
		{"writable folder", func(file string) error { return os.Chmod(filepath.Dir(file), 0o1777) }, "is writable by others"},
		{"writable folder above", func(file string) error { return os.Chmod(filepath.Dir(filepath.Dir(file)), 0o775) }, "is writable by others"},
		{"pipe", func(file string) error { return errors.Join(os.Remove(file), unix.Mkfifo(file, 0o644)) }, "not a regular file"},
		{"link", func(file string) error {
			return errors.Join(os.Rename(file, file+".moved"), os.Symlink(file+".moved", file))
		}, "symbolic link"},
		{"hard link", func(file string) error { return os.Link(file, file+".too") }, "not a regular file with a single link"},
		{"linked folder", func(file string) error {
			d := filepath.Dir(file)
			return errors.Join(os.Rename(d, d+".moved"), os.Symlink(d+".moved", d))
		}, "symbolic link"},
		{"left behind", func(file string) error { return os.Symlink("/etc/passwd", file+".next") }, "already exists"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, file := startForSave(t)
			s.save("set limit per-source rate=4MB/s --save")
			if err := tt.mess(file); err != nil {
				t.Fatal(err)
			}
			was := fmt.Sprintf("%+v", mustStat(t, file).Mtim)
			passwd := mustStat(t, "/etc/passwd")
			s.mustFailToSave("set limit per-source max_connections=7 --save", tt.want)
			if now := fmt.Sprintf("%+v", mustStat(t, file).Mtim); now != was {
				t.Error("the file was written")
			}
			if mustStat(t, "/etc/passwd") != passwd {
				t.Error("another file was written")
			}
			if l := s.limit("per-source"); l.MaxConnections != 5 || l.Rate != 4e6 {
				t.Errorf("limit is %+v", l)
			}
		})
	}
}

func appendTo(path, text string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// startRogueDaemon starts a fake daemon of a user. It reports an arbitrary configuration path, and
// accepts everything.
func startRogueDaemon(t *testing.T, uid int, config string) (socket string) {
	t.Helper()
	folder, err := os.MkdirTemp("", "lying")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	if err := os.Chown(folder, uid, uid); err != nil {
		t.Fatal(err)
	}
	socket = filepath.Join(folder, "control.sock")
	var l net.Listener
	err = runAs(uid, func() (err error) {
		l, err = net.Listen("unix", socket)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	h := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		switch {
		case strings.HasSuffix(q.URL.Path, "/status"):
			respond(w, 200, api.Status{Config: config})
		case strings.HasSuffix(q.URL.Path, "/reload"):
			respond(w, 200, api.ReloadStatus{OK: true})
		default:
			respond(w, 200, api.Limit{Name: "x", Override: map[string]string{"rate": "1MB/s"}})
		}
	})}
	go h.Serve(l)
	t.Cleanup(func() { h.Close() })
	return socket
}

// TestSave_SymlinkAttack saves as root while another user, who runs the daemon, plants links to a
// file of root wherever root could be led to write: in folders that the daemon names, that the
// command line names, or that are replaced by links at any moment. No link is ever followed.
func TestSave_SymlinkAttack(t *testing.T) {
	const rounds = 150
	victim := filepath.Join(t.TempDir(), "victim")
	const precious = "#!/bin/sh\necho precious\n"
	if err := os.WriteFile(victim, []byte(precious), 0o755); err != nil {
		t.Fatal(err)
	}
	home, err := os.MkdirTemp("", "planter")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(home) })
	if err := os.Chmod(home, 0o777|os.ModeSticky); err != nil { // like /tmp
		t.Fatal(err)
	}
	text := strings.ReplaceAll(configText("127.0.0.1:1", "", "127.0.0.1:2", "1MB/s"), "per-source", "x")
	honest := writeConfig(t, "", text)
	evil := filepath.Join(home, "etc", "shaperd.toml")
	refusals := map[string]int{}
	stop, planted := make(chan struct{}), make(chan int)
	go runAs(otherUser, func() error {
		confd := filepath.Join(home, "etc", "conf.d")
		file := filepath.Join(confd, "90-set-x.toml")
		for n := 0; ; n++ {
			select {
			case <-stop:
				planted <- n
				return nil
			default:
			}
			// Some calls fail because of earlier files.
			_ = os.MkdirAll(confd, 0o755)
			_ = os.WriteFile(evil, []byte(text), 0o644)
			_ = os.WriteFile(file, []byte("[[override]]\nlimit = \"x\"\nburst = \"$(touch /pwned)\"\n"), 0o644)
			for range 200 { // to hit the moment between a removal and a creation
				_ = os.Symlink(victim, file+".next")
			}
			if n%8 != 0 {
				continue
			}
			_ = os.Remove(file + ".next")
			_ = os.Remove(file)
			_ = os.Symlink(victim, file)
			_ = os.Rename(filepath.Join(home, "etc"), filepath.Join(home, "was"))
			_ = os.Symlink(filepath.Dir(honest), filepath.Join(home, "etc"))
			_ = os.Remove(filepath.Join(home, "etc"))
			_ = os.Rename(filepath.Join(home, "was"), filepath.Join(home, "etc"))
			_ = os.Remove(file)
		}
	})
	for _, tt := range []struct {
		name   string
		uid    int // of the daemon
		config string
		want   string
	}{
		{"the daemon is another's", otherUser, honest, "runs as user"},
		{"the daemon names the folder", 0, honest, "the daemon runs with"},
		{"the command line names the folder", 0, evil, ""},
	} {
		socket := startRogueDaemon(t, tt.uid, evil)
		for range rounds {
			_, _, err := command(t, "set", "limit", "x", "rate=2MB/s", "--save", "--config", tt.config, "--control", socket)
			if err == nil || tt.want != "" && !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("%s: %v, want %q", tt.name, err, tt.want)
			}
			refusals[strings.ReplaceAll(err.Error(), home, "")]++
		}
		if got, err := os.ReadFile(victim); err != nil || string(got) != precious {
			t.Fatalf("%s: root has written %q", tt.name, got)
		}
	}
	close(stop)
	for text, n := range refusals {
		t.Logf("%d times: %s", n, text)
	}
	if n := <-planted; n < 10 {
		t.Errorf("the attacker had only %d rounds", n)
	}
	mustNotExist(t, filepath.Join(filepath.Dir(honest), "conf.d"))
}
