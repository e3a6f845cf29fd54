package systemd

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/test/lab"
)

// A testHost is a network namespace with a bpf file system, the files that the commands of the
// unit use, and a TCP and a UDP echo server.
type testHost struct {
	dir    string
	unit   unit
	spec   sandbox
	file   string // contains spec
	notify *lab.NotifySocket
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

// newTestHost moves the test into a network namespace with only a loopback interface, and
// mounts a bpf file system as systemd does. The namespaces end with the thread of the test.
func newTestHost(t *testing.T, u unit, config string) *testHost {
	t.Helper()
	runtime.LockOSThread() // never unlocked, so that the thread ends with the test
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

	// Not t.TempDir(): other users cannot enter it.
	dir, err := os.MkdirTemp("", "shaperd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	s := &testHost{dir: dir, unit: u, file: filepath.Join(dir, "sandbox.json")}
	s.configure(t, config)
	write(t, filepath.Join(dir, "asn.csv"), "127.0.0.0,127.255.255.255,64500,loopback\n", 0o644)
	// RuntimeDirectory= and StateDirectory=, which systemd creates for the user of the unit.
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
		t.Fatalf("AmbientCapabilities=%q, but CapabilityBoundingSet=%q", ambient, bounding)
	}
	for _, name := range ambient {
		c, ok := capabilities[name]
		if !ok {
			t.Fatalf("unsupported capability %s", name)
		}
		s.spec.Capabilities = append(s.spec.Capabilities, c)
	}
	text, err := json.Marshal(s.spec)
	if err != nil {
		t.Fatal(err)
	}
	write(t, s.file, string(text), 0o644)

	if s.notify, err = lab.ListenNotify(filepath.Join(dir, "notify")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.notify.Close)
	s.echo(t)
	return s
}

func (s *testHost) configure(t *testing.T, config string) {
	t.Helper()
	write(t, filepath.Join(s.dir, "shaperd.toml"), config, 0o644)
}

func (s *testHost) copyProgram(t *testing.T, from, name string) {
	t.Helper()
	text, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(s.dir, name), string(text), 0o755)
}

// echo starts the echo servers. They end with the test.
func (s *testHost) echo(t *testing.T) {
	t.Helper()
	ln, err := net.Listen("tcp", ":7000")
	if err != nil {
		t.Fatal(err)
	}
	packets, err := net.ListenPacket("udp", "127.0.0.1:7000")
	if err != nil {
		t.Fatal(err)
	}
	testutil.Serve(t, ln.(*net.TCPListener), testutil.Echo)
	testutil.EchoUDP(t, packets.(*net.UDPConn))
}

// command returns the command for a line of the unit. It runs in the sandbox, unless the line
// starts with "+".
func (s *testHost) command(line string, pid int) *exec.Cmd {
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
		"NOTIFY_SOCKET=" + s.notify.Path,
		"WATCHDOG_USEC=600000",
		"SHAPERD_CONTROL=" + filepath.Join(s.dir, "run", "control.sock"),
	}
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	return cmd
}

// await waits for a notification.
func (s *testHost) await(t *testing.T, want string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := s.notify.Await(ctx, want, nil); err != nil {
		t.Fatal(err)
	}
}

// exchange sends data, and checks that the same comes back.
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
		t.Errorf("%s: the reply differs from the request", c.RemoteAddr())
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

// start runs the commands of the unit until the daemon is ready.
func (s *testHost) start(t *testing.T) *lab.Process {
	t.Helper()
	for _, line := range s.unit["Service"]["ExecStartPre"] {
		if out, err := s.command(line, 0).CombinedOutput(); err != nil {
			t.Fatalf("ExecStartPre=%s: %v\n%s", line, err, out)
		}
	}
	d, err := lab.StartProcess((*exec.Cmd).Start, s.command(s.unit.service(t, "ExecStart"), 0))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.Kill()
		if t.Failed() {
			t.Logf("the daemon's log:\n%s", &d.Log)
		}
	})
	s.await(t, "READY=1")

	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.PID()))
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

// reload runs the ExecReload commands of the unit.
func (s *testHost) reload(t *testing.T, d *lab.Process) {
	t.Helper()
	for _, line := range s.unit["Service"]["ExecReload"] {
		if out, err := s.command(line, d.PID()).CombinedOutput(); err != nil {
			t.Fatalf("ExecReload=%s: %v\n%s", line, err, out)
		}
	}
	s.await(t, "RELOADING=1")
	s.await(t, "READY=1")
}

// terminate sends SIGTERM to the daemon.
func (s *testHost) terminate(t *testing.T, d *lab.Process) {
	t.Helper()
	if err := d.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	s.await(t, "STOPPING=1")
}

// end waits until the daemon has exited after SIGTERM, which ends the service.
func (s *testHost) end(t *testing.T, d *lab.Process) {
	t.Helper()
	s.notify.DropStored()
	if err := d.AwaitExit(10 * time.Second); err != nil {
		t.Errorf("the daemon: %v", err)
	}
}
