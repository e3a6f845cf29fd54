package systemd

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A stage is a network and a bpf file system of its own with the files that the
// unit's commands find, and a TCP and a UDP server that send back what they get.
type stage struct {
	dir    string
	unit   unit
	spec   sandbox
	file   string // that has spec
	notify *net.UnixConn
}

const config = `
[daemon]
metrics = "127.0.0.1:9464"

[asn]
files = ["asn.csv"]

[[listen]]
name       = "web"
address    = ["tcp://0.0.0.0:80", "tcp://[::]:80"]
downstream = ["localhost:7000"]

[[listen]]
name       = "names"
address    = ["udp://0.0.0.0:53", "udp://[::]:53"]
downstream = ["127.0.0.1:7000"]

[[limit]]
name        = "all"
key         = ["source", "asn"]
rate        = "2MB/s"
max_delay   = "1s"
`

// newStage moves the test into a network namespace with nothing but a loopback
// interface, and mounts a bpf file system as systemd does. The namespaces end with
// the test's thread.
func newStage(t *testing.T, u unit, config string) *stage {
	t.Helper()
	runtime.LockOSThread() // and never unlocked: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWNS); err != nil {
		t.Fatalf("make namespaces: %v: run these tests as root", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("bpf", "/sys/fs/bpf", "bpf", 0, "mode=0700"); err != nil {
		t.Fatal(err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		t.Fatal(err)
	}
	addr, err := netlink.ParseAddr("fe80::1/64")
	if err != nil {
		t.Fatal(err)
	}
	addr.Flags = unix.IFA_F_NODAD
	if err := netlink.AddrAdd(lo, addr); err != nil {
		t.Fatal(err)
	}

	// Not the test's own directory: other users cannot enter it.
	dir, err := os.MkdirTemp("", "shaperd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	s := &stage{dir: dir, unit: u, file: filepath.Join(dir, "sandbox.json")}
	s.configure(t, config)
	write(t, filepath.Join(dir, "asn.csv"), "127.0.0.0,127.255.255.255,64500,loopback\n", 0o644)
	// RuntimeDirectory= and StateDirectory=, which systemd makes for the unit's user.
	for name, mode := range map[string]os.FileMode{"run": 0o755, "state": 0o700} {
		if err := os.Mkdir(filepath.Join(dir, name), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(filepath.Join(dir, name), nobody, nobody); err != nil {
			t.Fatal(err)
		}
	}
	s.copyProgram(t, daemonPath(t), "shaperd")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s.copyProgram(t, self, "enter")

	s.spec = sandbox{UID: nobody, Filter: u.seccomp(t), Writable: u.list("ReadWritePaths")}
	ambient := u.list("AmbientCapabilities")
	if bounding := u.list("CapabilityBoundingSet"); !slices.Equal(ambient, bounding) {
		t.Fatalf("the unit's capabilities are %q, and bounded by %q", ambient, bounding)
	}
	for _, name := range ambient {
		c, ok := capabilities[name]
		if !ok {
			t.Fatalf("the tests do not know %s", name)
		}
		s.spec.Capabilities = append(s.spec.Capabilities, c)
	}
	text, err := json.Marshal(s.spec)
	if err != nil {
		t.Fatal(err)
	}
	write(t, s.file, string(text), 0o644)

	socket := filepath.Join(dir, "notify")
	s.notify, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.notify.Close() })
	if err := os.Chmod(socket, 0o777); err != nil {
		t.Fatal(err)
	}
	s.echo(t)
	return s
}

func (s *stage) configure(t *testing.T, config string) {
	t.Helper()
	write(t, filepath.Join(s.dir, "shaperd.toml"), config, 0o644)
}

func (s *stage) copyProgram(t *testing.T, from, name string) {
	t.Helper()
	text, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(s.dir, name), string(text), 0o755)
}

// echo starts the servers. They end with the test.
func (s *stage) echo(t *testing.T) {
	t.Helper()
	ln, err := net.Listen("tcp", ":7000")
	if err != nil {
		t.Fatal(err)
	}
	packets, err := net.ListenPacket("udp", "127.0.0.1:7000")
	if err != nil {
		t.Fatal(err)
	}
	var work sync.WaitGroup
	t.Cleanup(func() {
		ln.Close()
		packets.Close()
		work.Wait()
	})
	work.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			work.Go(func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			})
		}
	})
	work.Go(func() {
		buf := make([]byte, 1<<16)
		for {
			n, from, err := packets.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = packets.WriteTo(buf[:n], from)
		}
	})
}

// command returns a command line of the unit, ready to be run: in the sandbox,
// unless it begins with "+".
func (s *stage) command(line string, pid int) *exec.Cmd {
	line, privileged := strings.CutPrefix(line, "+")
	args := strings.Fields(strings.NewReplacer(
		"/usr/bin/shaperd", filepath.Join(s.dir, "shaperd"),
		"/etc/shaperd", s.dir,
		"/run/shaperd", filepath.Join(s.dir, "run"),
		"/var/lib/shaperd", filepath.Join(s.dir, "state"),
		"-o shaperd -g shaperd", fmt.Sprintf("-o %d -g %[1]d", nobody),
		"$MAINPID", fmt.Sprint(pid),
	).Replace(line))
	if !privileged {
		args = slices.Insert(args, 0, filepath.Join(s.dir, "enter"))
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"),
		sandboxEnv + "=" + s.file,
		"NOTIFY_SOCKET=" + filepath.Join(s.dir, "notify"),
		"WATCHDOG_USEC=600000",
		"SHAPERD_CONTROL=" + filepath.Join(s.dir, "run", "control.sock"),
	}
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	return cmd
}

// await reads notifications until one has the line want.
func (s *stage) await(t *testing.T, want string) {
	t.Helper()
	if err := s.notify.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4096)
	for {
		n, err := s.notify.Read(buf)
		if err != nil {
			t.Fatalf("the daemon did not say %s: %v", want, err)
		}
		if slices.Contains(strings.Split(string(buf[:n]), "\n"), want) {
			return
		}
	}
}

// exchange sends data and wants it back.
func exchange(t *testing.T, c net.Conn, data []byte) {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(data); err != nil {
		t.Fatal(err)
	}
	back := make([]byte, len(data))
	if _, err := io.ReadFull(c, back); err != nil {
		t.Fatalf("%s: %v", c.RemoteAddr(), err)
	}
	if !bytes.Equal(back, data) {
		t.Errorf("%s: what came back is not what was sent", c.RemoteAddr())
	}
}

func dial(t *testing.T, network, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// A daemon is one that runs in the sandbox.
type daemon struct {
	*exec.Cmd
	log    bytes.Buffer
	exited chan error // its end, once
}

// start runs the unit's commands until the daemon is ready.
func (s *stage) start(t *testing.T) *daemon {
	t.Helper()
	for _, line := range s.unit["Service"]["ExecStartPre"] {
		if out, err := s.command(line, 0).CombinedOutput(); err != nil {
			t.Fatalf("ExecStartPre=%s: %v\n%s", line, err, out)
		}
	}
	d := &daemon{Cmd: s.command(s.unit.service(t, "ExecStart"), 0), exited: make(chan error, 1)}
	d.Stdout, d.Stderr = &d.log, &d.log
	if err := d.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		d.exited <- d.Wait()
		close(d.exited)
	}()
	t.Cleanup(func() {
		_ = d.Process.Kill()
		for range d.exited {
		}
		if t.Failed() {
			t.Logf("the daemon's log:\n%s", d.log.Bytes())
		}
	})
	s.await(t, "READY=1")

	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		fmt.Sprintf("Uid:\t%d\t%[1]d\t%[1]d\t%[1]d", nobody),
		"Groups:\t ",
		fmt.Sprintf("CapEff:\t%016x", s.spec.bits()),
		fmt.Sprintf("CapBnd:\t%016x", s.spec.bits()),
		"NoNewPrivs:\t1",
		"Seccomp:\t2",
	} {
		if !strings.Contains(string(status), want+"\n") {
			t.Errorf("the daemon is not in its sandbox, want %q:\n%s", want, status)
		}
	}
	return d
}

// reload runs the unit's commands for it.
func (s *stage) reload(t *testing.T, d *daemon) {
	t.Helper()
	for _, line := range s.unit["Service"]["ExecReload"] {
		if out, err := s.command(line, d.Process.Pid).CombinedOutput(); err != nil {
			t.Fatalf("ExecReload=%s: %v\n%s", line, err, out)
		}
	}
	s.await(t, "RELOADING=1")
	s.await(t, "READY=1")
}

// terminate begins the daemon's end.
func (s *stage) terminate(t *testing.T, d *daemon) {
	t.Helper()
	if err := d.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	s.await(t, "STOPPING=1")
}

// end waits for the daemon's end.
func (d *daemon) end(t *testing.T) {
	t.Helper()
	select {
	case err := <-d.exited:
		if err != nil {
			t.Errorf("the daemon ended with %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the daemon did not end")
	}
}

// metrics returns what the daemon's metrics say.
func metrics(t *testing.T) string {
	t.Helper()
	c := dial(t, "tcp", "127.0.0.1:9464")
	if _, err := io.WriteString(c, "GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	answer, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		t.Errorf("metrics: %s, %v", answer.Status, err)
	}
	return string(text)
}
