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
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	sandboxEnv = "SHAPERD_SYSTEMD_SANDBOX"
	nobody     = 65534
)

// A sandbox is what a program is started in.
type sandbox struct {
	UID          int
	Capabilities []int // ambient, and the bound
	Filter       []unix.SockFilter
}

func TestMain(m *testing.M) {
	if file := os.Getenv(sandboxEnv); file != "" {
		fmt.Fprintln(os.Stderr, enter(file, os.Args[1:]))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// enter puts the calling process into the sandbox that file describes and runs
// args in its place, in the order in which systemd does it.
func enter(file string, args []string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var s sandbox
	if err := json.Unmarshal(text, &s); err != nil {
		return err
	}
	// All that follows is of this thread, which takes the process over at the end.
	runtime.LockOSThread()
	var bits [2]uint32
	for _, c := range s.Capabilities {
		bits[c/32] |= 1 << (c % 32)
	}
	for c := 0; ; c++ {
		if slices.Contains(s.Capabilities, c) {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err == unix.EINVAL {
			break
		} else if err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_KEEPCAPS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("keep capabilities: %w", err)
	}
	id := uintptr(s.UID)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); errno != 0 {
		return fmt.Errorf("drop groups: %w", errno)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, id, id, id); errno != 0 {
		return fmt.Errorf("change group: %w", errno)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, id, id, id); errno != 0 {
		return fmt.Errorf("change user: %w", errno)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{
		{Effective: bits[0], Permitted: bits[0], Inheritable: bits[0]},
		{Effective: bits[1], Permitted: bits[1], Inheritable: bits[1]},
	}
	if err := unix.Capset(&header, &data[0]); err != nil {
		return fmt.Errorf("set capabilities: %w", err)
	}
	for _, c := range s.Capabilities {
		if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, uintptr(c), 0, 0); err != nil {
			return fmt.Errorf("raise capability %d: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	path, err := exec.LookPath(args[0])
	if err != nil {
		return err
	}
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, sandboxEnv) })
	program := unix.SockFprog{Len: uint16(len(s.Filter)), Filter: &s.Filter[0]}
	if _, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&program))); errno != 0 {
		return fmt.Errorf("install system call filter: %w", errno)
	}
	return fmt.Errorf("run %s: %w", path, unix.Exec(path, args, env))
}

// A stage is a network of its own with the files that the unit's commands find,
// and a TCP and a UDP server that send back what they get.
type stage struct {
	dir     string
	unit    unit
	sandbox string // file
	notify  *net.UnixConn
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
// interface. The namespace ends with the test's thread.
func newStage(t *testing.T, u unit) *stage {
	t.Helper()
	runtime.LockOSThread() // and never unlocked: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace: %v: run these tests as root", err)
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
	s := &stage{dir: dir, unit: u, sandbox: filepath.Join(dir, "sandbox.json")}
	write(t, filepath.Join(dir, "shaperd.toml"), config, 0o644)
	write(t, filepath.Join(dir, "asn.csv"), "127.0.0.0,127.255.255.255,64500,loopback\n", 0o644)
	s.copyProgram(t, daemonPath(t), "shaperd")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s.copyProgram(t, self, "enter")

	spec := sandbox{UID: nobody, Filter: u.seccomp(t)}
	if got := u.service(t, "AmbientCapabilities") + u.service(t, "CapabilityBoundingSet"); got != "CAP_NET_BIND_SERVICECAP_NET_BIND_SERVICE" {
		t.Fatalf("the unit's capabilities are %s", got)
	}
	spec.Capabilities = []int{unix.CAP_NET_BIND_SERVICE}
	text, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	write(t, s.sandbox, string(text), 0o644)

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

// command returns a command line of the unit, ready to be run in the sandbox.
func (s *stage) command(line string, pid int) *exec.Cmd {
	line = strings.NewReplacer(
		"/usr/bin/shaperd", filepath.Join(s.dir, "shaperd"),
		"/etc/shaperd", s.dir,
		"$MAINPID", fmt.Sprint(pid),
	).Replace(line)
	cmd := exec.Command(filepath.Join(s.dir, "enter"), strings.Fields(line)...)
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"),
		sandboxEnv + "=" + s.sandbox,
		"NOTIFY_SOCKET=" + filepath.Join(s.dir, "notify"),
		"WATCHDOG_USEC=600000",
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

// TestSandbox takes the daemon through its life by the unit's own commands, as an
// ordinary user with the unit's one capability, under the unit's system call
// filter.
func TestSandbox(t *testing.T) {
	u := readUnit(t)
	s := newStage(t, u)

	before, err := s.command(u.service(t, "ExecStartPre"), 0).CombinedOutput()
	if err != nil {
		t.Fatalf("ExecStartPre: %v\n%s", err, before)
	}
	var log bytes.Buffer
	daemon := s.command(u.service(t, "ExecStart"), 0)
	daemon.Stdout, daemon.Stderr = &log, &log
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan error, 1)
	go func() { exited <- daemon.Wait() }()
	stopped := false
	t.Cleanup(func() {
		if !stopped {
			_ = daemon.Process.Kill()
			<-exited
		}
		if t.Failed() {
			t.Logf("the daemon's log:\n%s", log.Bytes())
		}
	})
	s.await(t, "READY=1")

	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", daemon.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		fmt.Sprintf("Uid:\t%d\t%[1]d\t%[1]d\t%[1]d", nobody),
		"Groups:\t ",
		fmt.Sprintf("CapEff:\t%016x", 1<<unix.CAP_NET_BIND_SERVICE),
		fmt.Sprintf("CapBnd:\t%016x", 1<<unix.CAP_NET_BIND_SERVICE),
		"NoNewPrivs:\t1",
		"Seccomp:\t2",
	} {
		if !strings.Contains(string(status), want+"\n") {
			t.Errorf("the daemon is not in its sandbox, want %q:\n%s", want, status)
		}
	}

	large := bytes.Repeat([]byte("shaperd "), 1<<14)
	for _, addr := range []string{"127.0.0.1", "::1", "fe80::1%lo"} {
		tcp := dial(t, "tcp", net.JoinHostPort(addr, "80"))
		exchange(t, tcp, large)
		tcp.Close()
		exchange(t, dial(t, "udp", net.JoinHostPort(addr, "53")), large[:1000])
	}
	metrics := dial(t, "tcp", "127.0.0.1:9464")
	if _, err := io.WriteString(metrics, "GET /metrics HTTP/1.0\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	answer, err := http.ReadResponse(bufio.NewReader(metrics), nil)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK || !bytes.Contains(text, []byte("\nprocess_start_time_seconds ")) {
		t.Errorf("metrics: %s, %v:\n%s", answer.Status, err, text)
	}
	s.await(t, "WATCHDOG=1")

	for _, line := range u["Service"]["ExecReload"] {
		if out, err := s.command(line, daemon.Process.Pid).CombinedOutput(); err != nil {
			t.Fatalf("ExecReload=%s: %v\n%s", line, err, out)
		}
	}
	s.await(t, "RELOADING=1")
	s.await(t, "READY=1")

	last := dial(t, "tcp", "127.0.0.1:80")
	exchange(t, last, large)
	if err := daemon.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	s.await(t, "STOPPING=1")
	s.await(t, "WATCHDOG=1")
	exchange(t, last, large)
	last.Close()
	select {
	case err := <-exited:
		stopped = true
		if err != nil {
			t.Errorf("the daemon ended with %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the daemon did not end")
	}
}

// TestSandboxReload has a configuration with an error fail the reload before the
// daemon hears of it.
func TestSandboxReload(t *testing.T) {
	u := readUnit(t)
	s := newStage(t, u)
	write(t, filepath.Join(s.dir, "shaperd.toml"), strings.Replace(config, "2MB/s", "2mbps", 1), 0o644)
	out, err := s.command(u["Service"]["ExecReload"][0], 0).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "2mbps") {
		t.Errorf("the first ExecReload: %v\n%s", err, out)
	}
}

// TestSandboxHolds takes something away from the unit that the daemon needs.
func TestSandboxHolds(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(service map[string][]string)
	}{
		{"system call", func(service map[string][]string) {
			service["SystemCallFilter"] = append(service["SystemCallFilter"], "~epoll_pwait2")
		}},
		{"address family", func(service map[string][]string) {
			service["RestrictAddressFamilies"] = []string{"AF_UNIX"}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			u := readUnit(t)
			tt.change(u["Service"])
			s := newStage(t, u)
			var out bytes.Buffer
			cmd := s.command(u.service(t, "ExecStart"), 0)
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			late := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
			defer late.Stop()
			err := cmd.Wait()
			if err == nil || !strings.Contains(out.String(), "SIGSYS") {
				t.Errorf("the daemon ended with %v, want SIGSYS:\n%s", err, out.String())
			}
		})
	}
}
