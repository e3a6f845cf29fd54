package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

// responseTime bounds the time of an answer to an operator, on a busy machine. Tests give up on
// hanging operations after four times as long.
const responseTime = 10 * time.Second

// within fails the test when f takes longer than responseTime.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	begun := time.Now()
	f()
	if took := time.Since(begun); took > responseTime {
		t.Errorf("%s took %v, want %v at most", what, took, responseTime)
	}
}

// hangingFolder mounts a FUSE file system whose server never answers, so that opening a file in it
// hangs, as with NFS or autofs. The channel is closed when a process hangs there; end makes all
// pending calls fail.
func hangingFolder(t *testing.T) (folder string, hangs <-chan struct{}, end func()) {
	t.Helper()
	folder = t.TempDir()
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("hang", folder, "fuse.hang", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)); err != nil {
		t.Fatal(err)
	}
	// Answer the kernel's first request, FUSE_INIT: struct fuse_out_header, fuse_init_out.
	request := make([]byte, 64<<10)
	if _, err := unix.Read(fd, request); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 16+64)
	answer[0] = byte(len(answer))
	copy(answer[8:16], request[8:16]) // unique
	answer[16], answer[20] = 7, 31    // major, minor
	answer[16+20+2] = 1               // max_write: 64 KiB
	if _, err := unix.Write(fd, answer); err != nil {
		t.Fatal(err)
	}
	found := make(chan struct{})
	go func() {
		defer close(found)
		// A request that was not read can be aborted: the process waiting for it can be killed.
		for fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}; ; {
			if _, err := unix.Poll(fds, -1); err != unix.EINTR {
				return
			}
		}
	}()
	end = sync.OnceFunc(func() {
		if err := unix.Unmount(folder, unix.MNT_DETACH|unix.MNT_FORCE); err != nil {
			t.Error(err)
		}
		unix.Close(fd)
		<-found
	})
	t.Cleanup(end)
	return folder, found, end
}

// hangInConfD creates a file in the conf.d next to config on which open hangs.
func hangInConfD(t *testing.T, config string) (path string, hangs <-chan struct{}, end func()) {
	t.Helper()
	folder, hangs, end := hangingFolder(t)
	confD := filepath.Join(filepath.Dir(config), "conf.d")
	if err := os.MkdirAll(confD, 0o755); err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(confD, "10-hangs.toml")
	if err := os.Symlink(filepath.Join(folder, "x"), path); err != nil {
		t.Fatal(err)
	}
	return path, hangs, end
}

// shaperdProcess starts shaperd as a separate process.
func shaperdProcess(t *testing.T, args ...string) (cmd *exec.Cmd, log *testutil.Buffer, ended <-chan error) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	log = new(testutil.Buffer)
	cmd = exec.Command(self, args...)
	cmd.Env = append(os.Environ(), asShaperd+"=1", noRaceSleep)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done, gone := make(chan error, 1), make(chan struct{})
	go func() { done <- cmd.Wait(); close(gone) }()
	t.Cleanup(func() { cmd.Process.Kill(); <-gone })
	return cmd, log, done
}

// TestReload_RejectsIrregularFiles checks that files which might block are rejected.
func TestReload_RejectsIrregularFiles(t *testing.T) {
	config := writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s"))
	s := startControlled(t, config)
	path := filepath.Join(filepath.Dir(config), "conf.d", "10-x.toml")
	if err := os.Mkdir(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, make := range map[string]func() error{
		"FIFO":         func() error { return unix.Mkfifo(path, 0o644) },
		"character":    func() error { return os.Symlink("/dev/zero", path) },
		"folder":       func() error { return os.Mkdir(path, 0o755) },
		"main file":    func() error { return unix.Mkfifo(config, 0o644) },
		"file of ASNs": func() error { return unix.Mkfifo(path+".csv", 0o644) },
	} {
		t.Run(name, func(t *testing.T) {
			switch name {
			case "main file":
				if err := os.Rename(config, config+".kept"); err != nil {
					t.Fatal(err)
				}
				defer os.Rename(config+".kept", config)
			case "file of ASNs":
				writeConfig(t, path, fmt.Sprintf("[asn]\nfiles = [%q]\n", path+".csv"))
			}
			if err := make(); err != nil {
				t.Fatal(err)
			}
			defer os.Remove(path)
			within(t, "reload", func() {
				_, stderr, err := command(t, "reload", "--control", s.socket)
				if err == nil || !strings.Contains(stderr, "not a regular file") {
					t.Errorf("reload: %v\n%s", err, stderr)
				}
			})
			within(t, "bypass", func() { s.must("bypass off") })
		})
	}
	s.must("reload", "reloaded")
}

// TestReload_HangDelaysNothingElse checks that the kill switch, blocks, expiry and SIGTERM work while
// a reload hangs.
func TestReload_HangDelaysNothingElse(t *testing.T) {
	config := writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s"))
	socket := filepath.Join(t.TempDir(), "control.sock")
	daemon, log, ended := shaperdProcess(t, "run", "--config", config, "--control", socket)
	log.WaitFor(t, "msg=ready")
	_, hangs, _ := hangInConfD(t, config)

	reloaded := make(chan error, 1)
	go func() {
		_, err := api.NewClient(socket).Reload(context.Background())
		reloaded <- err
	}()
	<-hangs
	for _, line := range []string{"bypass on", "block 192.0.2.7", "set limit per-source rate=2MB/s --for 50ms", "bypass off"} {
		within(t, line, func() {
			if _, _, err := command(t, append(strings.Fields(line), "--control", socket)...); err != nil {
				t.Errorf("%s: %v", line, err)
			}
		})
	}
	log.WaitFor(t, "override expired")
	within(t, "the end", func() {
		if err := daemon.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("it exited with %v\n%s", err, log)
			}
		case <-time.After(4 * responseTime):
			t.Fatalf("it ignores SIGTERM:\n%s", log)
		}
	})
	if err := <-reloaded; err == nil {
		t.Error("the reload succeeded")
	}
}

func TestRun_SIGTERMDuringHangingStart(t *testing.T) {
	config := writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s"))
	_, hangs, _ := hangInConfD(t, config)
	daemon, log, ended := shaperdProcess(t, "run", "--config", config)
	<-hangs
	within(t, "the end", func() {
		if err := daemon.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-ended:
			if err != nil || !strings.Contains(log.String(), "stopped before ready") {
				t.Errorf("it exited with %v\n%s", err, log)
			}
		case <-time.After(4 * responseTime):
			t.Fatalf("it ignores SIGTERM:\n%s", log)
		}
	})
}

// TestReload_TimesOut checks that a hanging reload times out and names the file, and that only one
// reload hangs at a time.
func TestReload_TimesOut(t *testing.T) {
	config := writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s"))
	socket := filepath.Join(t.TempDir(), "control.sock")
	log := new(testutil.Buffer)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		e := env{stdout: io.Discard, stderr: log, reload: make(chan os.Signal), force: make(chan os.Signal), loadTimeout: 2 * time.Second} // longer than a stall before the file that hangs
		ended <- run(ctx, e, []string{"run", "--config", config, "--control", socket})
	}()
	log.WaitFor(t, "msg=ready")
	path, _, end := hangInConfD(t, config)
	reload := func(want string) {
		t.Helper()
		_, stderr, err := command(t, "reload", "--control", socket)
		if (err == nil) != (want == "") || !strings.Contains(stderr, want) {
			t.Errorf("reload: %v\n%s\nwant %q", err, stderr, want)
		}
	}
	reload("timed out after 2s, at " + path)
	reload("an earlier reload is still waiting for " + path)
	end()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	testutil.WaitFor(t, "a reload succeeds", func() bool {
		_, _, err := command(t, "reload", "--control", socket)
		return err == nil
	})
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestReload_Concurrent checks that after a reload the file written before it is effective, however
// many others reload.
func TestReload_Concurrent(t *testing.T) {
	config := writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s"))
	s := startControlled(t, config)
	text, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 10 {
		rate := fmt.Sprintf("rate = \"%dMB/s\"", i+2)
		next := config + ".next"
		writeConfig(t, next, strings.Replace(string(text), `rate = "1MB/s"`, rate, 1))
		var others sync.WaitGroup
		for range 3 {
			others.Go(func() { _, _ = api.NewClient(s.socket).Reload(context.Background()) })
		}
		if err := os.Rename(next, config); err != nil {
			t.Fatal(err)
		}
		if _, err := api.NewClient(s.socket).Reload(t.Context()); err != nil {
			t.Fatal(err)
		}
		if l := s.limit("per-source"); l.Rate != float64(i+2)*1e6 {
			t.Errorf("rate %v after a reload of %s", l.Rate, rate)
		}
		others.Wait()
	}
}

// TestVerbs_Interruptible checks that a signal ends a verb that waits for a file.
func TestVerbs_Interruptible(t *testing.T) {
	for _, verb := range []string{"check", "explain --source 192.0.2.1 --to tcp/1 --config", "rules --config", "doctor --config"} {
		for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
			t.Run(fmt.Sprint(verb, signal), func(t *testing.T) {
				t.Parallel()
				path := filepath.Join(t.TempDir(), "fifo")
				if err := unix.Mkfifo(path, 0o644); err != nil {
					t.Fatal(err)
				}
				cmd, log, ended := shaperdProcess(t, append(strings.Fields(verb), path)...)
				w, err := os.OpenFile(path, os.O_WRONLY, 0) // blocks until the verb has opened the pipe
				if err != nil {
					t.Fatal(err)
				}
				defer w.Close()
				within(t, "the end", func() {
					if err := cmd.Process.Signal(signal); err != nil {
						t.Fatal(err)
					}
					select {
					case <-ended:
					case <-time.After(4 * responseTime):
						t.Fatalf("it is still running:\n%s", log)
					}
				})
				if got := cmd.ProcessState.Sys().(syscall.WaitStatus).Signal(); got != signal {
					t.Errorf("it exited with %v, want %v\n%s", got, signal, log)
				}
			})
		}
	}
}
