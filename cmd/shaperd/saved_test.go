package main

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

	"shaperd/control"
)

// stranger is a user that hardly any host has.
const stranger = 64004

// as runs f as a user, on a thread of its own that ends with it.
func as(uid int, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for ever: Go ends the thread
		_, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid))
		if errno != 0 {
			done <- errno
			return
		}
		done <- f()
	}()
	return <-done
}

// savesTo is a daemon of root's, and the file that is to hold what is saved of its limit.
func savesTo(t *testing.T) (s *steered, file string) {
	t.Helper()
	path := writeConfig(t, "", configText(freePort(t), "", "127.0.0.1:1", "1MB/s"))
	s = startSteered(t, path)
	return s, filepath.Join(filepath.Dir(path), "conf.d", "90-set-per-source.toml")
}

// save runs a verb with --config.
func (s *steered) save(line string, texts ...string) { s.must(line+" --config "+s.config, texts...) }

func (s *steered) mustNotSave(line, text string) { s.mustFail(line+" --config "+s.config, text) }

// mustLoad checks that the files are those of a configuration that a daemon would start by.
func (s *steered) mustLoad() {
	s.t.Helper()
	if r := check(s.config); !r.OK {
		s.t.Errorf("the next start would fail: %v", r.Errors)
	}
}

func mustBeGone(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is there: %v", path, err)
	}
}

// What is saved is what is effective: at once, after a reload, when what was set for a time
// ends, and until it is taken back.
func TestSavedIsEffective(t *testing.T) {
	s, file := savesTo(t)
	is := func(rate float64, connections int) {
		t.Helper()
		if l := s.limit("per-source"); l.Rate != rate || l.Connections != connections || len(l.Override) != 0 {
			t.Errorf("limit is %+v", l)
		}
		s.mustLoad()
	}
	s.must("set limit per-source rate=9MB/s max_connections=3") // in memory
	s.save("set limit per-source rate=4MB/s --save", "now  32Mbit/s", "saved in "+file)
	if l := s.limit("per-source"); l.Rate != 4e6 || l.Connections != 3 || l.Override["max_connections"] != "3" || l.Override["rate"] != "" {
		t.Errorf("beside what is set in memory: %+v", l)
	}
	s.must("unset limit per-source", "now  32Mbit/s", "rate is still set by "+file+":4")
	is(4e6, 5)
	s.save("set limit per-source max_connections=9 --save") // each key by itself
	is(4e6, 9)
	s.must("reload")
	is(4e6, 9)
	s.must("set limit per-source rate=5MB/s --for 100ms", "now  40Mbit/s")
	s.until("per-source", func(l control.Limit) bool { return l.Override == nil })
	is(4e6, 9)
	s.mustFail("unset limit per-source", "nothing is set in limit \"per-source\" since it was loaded; max_connections is set by "+file+":4; rate is set by")
	s.save("unset limit per-source --saved", "now  8Mbit/s", "removed "+file)
	is(1e6, 5)
	mustBeGone(t, file)
	s.mustNotSave("unset limit per-source --saved", "nothing is saved")
	s.mustNotSave("set limit nosuch rate=1MB/s --save", "there is no limit")
	s.mustNotSave("set limit per-source rate=1MB/s --save --for 1m", "--save lasts")
}

// What is saved can be read by whoever can read the configuration, whatever root's umask is.
func TestSaveWithUmask(t *testing.T) {
	for _, umask := range []int{0, 0o027, 0o077} {
		s, file := savesTo(t)
		if err := os.Chown(s.config, 0, stranger); err != nil {
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
		if got := mustStat(t, file).Gid; got != stranger {
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

// What would not load, or what the daemon does not take, is refused, and leaves no trace.
func TestSaveRefuses(t *testing.T) {
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
		{"takes a restart", "", "", func(c string) string { return strings.Replace(c, "[daemon]", "[daemon]\nmax_buckets = 2000", 1) }, "rate=4MB/s", "takes a restart"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, file := savesTo(t)
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
			s.mustNotSave("set limit per-source "+tt.set+" --save", tt.want)
			mustBeGone(t, file)
			mustBeGone(t, file+".next")
			if l := s.limit("per-source"); l.Rate != 1e6 || l.Override != nil {
				t.Errorf("limit is %+v", l)
			}
		})
	}
}

// What was saved before is there again, byte for byte, when the daemon refuses more.
func TestSavePutsBack(t *testing.T) {
	s, file := savesTo(t)
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
		s.mustNotSave(line, "takes a restart")
		if after, err := os.ReadFile(file); err != nil || string(after) != string(before) {
			t.Errorf("%s: %q, %v", line, after, err)
		}
	}
	// A limit that goes takes what was saved with it, at the operator's word.
	writeConfig(t, s.config, strings.ReplaceAll(string(text), "per-source", "each"))
	s.mustFail("reload", "has errors")
	s.save("unset limit per-source --saved", "removed "+file)
	mustBeGone(t, file)
	if l := s.limit("each"); l.Rate != 1e6 {
		t.Errorf("limit is %+v", l)
	}
}

// Of several who save at once, each is told that it has, and has, or is told that it has not.
func TestSaveAtOnce(t *testing.T) {
	s, _ := savesTo(t)
	sets := []string{"rate=4MB/s", "burst=1MB", "new_connections=50/s", "max_delay=1s", "max_connections=7", "queue_timeout=3s", "max_queue=9", "observe=true"}
	saved := make([]bool, len(sets))
	var all sync.WaitGroup
	for i, set := range sets {
		all.Go(func() {
			for range 50 {
				_, _, err := command(t, "set", "limit", "per-source", set, "--save", "--config", s.config, "--control", s.socket)
				saved[i] = err == nil
				if saved[i] || !errors.Is(err, errBusy) && !strings.Contains(err.Error(), "changed meanwhile") {
					if err != nil {
						t.Error(set, err)
					}
					break
				}
				time.Sleep(time.Duration(i) * time.Millisecond)
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

// A file that holds anything else, or that others may have had their hands on, is neither
// taken over nor lost.
func TestSaveLeavesOthersFilesAlone(t *testing.T) {
	const other = "\n[[override]]\nlimit = \"per-source\"\nburst = \"1MB\"\n"
	for _, tt := range []struct {
		name string
		mess func(file string) error
		want string
	}{
		{"another override", func(file string) error { return appendTo(file, other) }, "was edited"},
		{"a limit", func(file string) error { return appendTo(file, "[[limit]]\nname = \"x\"\nrate = \"1MB/s\"\n") }, "was edited"},
		{"a comment", func(file string) error { return appendTo(file, "# why\n") }, "was edited"},
		{"of a stranger", func(file string) error { return os.Chown(file, stranger, 0) }, "belongs to user"},
		{"writable", func(file string) error { return os.Chmod(file, 0o666) }, "others may write"},
		{"folder of a stranger", func(file string) error { return os.Chown(filepath.Dir(file), stranger, 0) }, "belongs to user"},
		{"writable folder", func(file string) error { return os.Chmod(filepath.Dir(file), 0o1777) }, "others may write"},
		{"writable folder above", func(file string) error { return os.Chmod(filepath.Dir(filepath.Dir(file)), 0o775) }, "others may write"},
		{"pipe", func(file string) error { return errors.Join(os.Remove(file), unix.Mkfifo(file, 0o644)) }, "no regular file"},
		{"link", func(file string) error {
			return errors.Join(os.Rename(file, file+".moved"), os.Symlink(file+".moved", file))
		}, "symbolic link"},
		{"hard link", func(file string) error { return os.Link(file, file+".too") }, "no regular file of one name"},
		{"linked folder", func(file string) error {
			d := filepath.Dir(file)
			return errors.Join(os.Rename(d, d+".moved"), os.Symlink(d+".moved", d))
		}, "symbolic link"},
		{"left behind", func(file string) error { return os.Symlink("/etc/passwd", file+".next") }, "is there already"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, file := savesTo(t)
			s.save("set limit per-source rate=4MB/s --save")
			if err := tt.mess(file); err != nil {
				t.Fatal(err)
			}
			was := fmt.Sprintf("%+v", mustStat(t, file).Mtim)
			passwd := mustStat(t, "/etc/passwd")
			s.mustNotSave("set limit per-source max_connections=7 --save", tt.want)
			if now := fmt.Sprintf("%+v", mustStat(t, file).Mtim); now != was {
				t.Error("the file was written")
			}
			if mustStat(t, "/etc/passwd") != passwd {
				t.Error("another file was written")
			}
			if l := s.limit("per-source"); l.Connections != 5 || l.Rate != 4e6 {
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

// lyingDaemon is a daemon of a user, who names any folder as that of its configuration, and
// agrees to everything.
func lyingDaemon(t *testing.T, uid int, config string) (socket string) {
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
	err = as(uid, func() (err error) {
		l, err = net.Listen("unix", socket)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	h := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		switch {
		case strings.HasSuffix(q.URL.Path, "/status"):
			answer(w, 200, control.Status{Config: config})
		case strings.HasSuffix(q.URL.Path, "/reload"):
			answer(w, 200, control.ReloadStatus{OK: true})
		default:
			answer(w, 200, control.Limit{Name: "x", Override: map[string]string{"rate": "1MB/s"}})
		}
	})}
	go h.Serve(l)
	t.Cleanup(func() { h.Close() })
	return socket
}

// TestSaveAgainstPlanter has root save while another user, whose daemon answers, plants links
// to a file of root's wherever root may be led to write: in folders that the daemon names, that
// the command line names, or that are swapped for links at any moment. None is ever followed.
func TestSaveAgainstPlanter(t *testing.T) {
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
	if err := os.Chmod(home, 0o777|os.ModeSticky); err != nil { // as /tmp is
		t.Fatal(err)
	}
	text := strings.ReplaceAll(configText("127.0.0.1:1", "", "127.0.0.1:2", "1MB/s"), "per-source", "x")
	honest := writeConfig(t, "", text)
	evil := filepath.Join(home, "etc", "shaperd.toml")
	refusals := map[string]int{}
	stop, planted := make(chan struct{}), make(chan int)
	go as(stranger, func() error {
		confd := filepath.Join(home, "etc", "conf.d")
		file := filepath.Join(confd, "90-set-x.toml")
		for n := 0; ; n++ {
			select {
			case <-stop:
				planted <- n
				return nil
			default:
			}
			// Some of it fails, as something else is there from before.
			_ = os.MkdirAll(confd, 0o755)
			_ = os.WriteFile(evil, []byte(text), 0o644)
			_ = os.WriteFile(file, []byte("[[override]]\nlimit = \"x\"\nburst = \"$(touch /pwned)\"\n"), 0o644)
			for range 200 { // in the moment between a removal and a creation
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
		{"the daemon is another's", stranger, honest, "is of user"},
		{"the daemon names the folder", 0, honest, "the daemon runs by"},
		{"the command line names the folder", 0, evil, ""},
	} {
		socket := lyingDaemon(t, tt.uid, evil)
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
		t.Errorf("the planter had %d turns: nobody was raced", n)
	}
	mustBeGone(t, filepath.Join(filepath.Dir(honest), "conf.d"))
}
