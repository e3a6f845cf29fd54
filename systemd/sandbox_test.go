package systemd

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/test/lab"
)

const (
	sandboxEnv = "SHAPERD_SYSTEMD_SANDBOX"
	nobody     = 65534
)

// sandbox is the environment that a program is started in.
type sandbox struct {
	UID          int
	Capabilities []int    // ambient and bounding set
	Writable     []string // folders under /sys; those with the prefix "-" may be absent
	Filter       []unix.SockFilter
}

var capabilities = map[string]int{
	"CAP_BPF":              unix.CAP_BPF,
	"CAP_NET_ADMIN":        unix.CAP_NET_ADMIN,
	"CAP_NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE,
	"CAP_NET_RAW":          unix.CAP_NET_RAW,
	"CAP_PERFMON":          unix.CAP_PERFMON,
}

func TestMain(m *testing.M) {
	if file := os.Getenv(sandboxEnv); file != "" {
		fmt.Fprintln(os.Stderr, enter(file, os.Args[1:]))
		os.Exit(1)
	}
	runtime.LockOSThread() // tests move threads to other namespaces; /proc/self shows the first thread, which must stay
	os.Exit(m.Run())
}

// enter puts the calling process into the sandbox that file describes, in the same order as
// systemd, and then executes args.
func enter(file string, args []string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var s sandbox
	if err := json.Unmarshal(text, &s); err != nil {
		return err
	}
	// The following applies to this thread, which at the end becomes the process.
	runtime.LockOSThread()
	if err := protectSys(s.Writable); err != nil {
		return fmt.Errorf("make /sys read-only: %w", err)
	}
	bits := s.bits()
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
		{Effective: uint32(bits), Permitted: uint32(bits), Inheritable: uint32(bits)},
		{Effective: uint32(bits >> 32), Permitted: uint32(bits >> 32), Inheritable: uint32(bits >> 32)},
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

// bits returns the capabilities as a bit set.
func (s *sandbox) bits() (set uint64) {
	for _, c := range s.Capabilities {
		set |= 1 << c
	}
	return set
}

// protectSys applies the effect of ProtectKernelTunables and ReadWritePaths on /sys to this
// thread.
func protectSys(writable []string) error {
	err := errors.Join(
		unix.Unshare(unix.CLONE_NEWNS),
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.MountSetattr(unix.AT_FDCWD, "/sys", unix.AT_RECURSIVE, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}),
	)
	for _, dir := range writable {
		dir, optional := strings.CutPrefix(dir, "-")
		if _, absent := os.Stat(dir); optional && absent != nil {
			continue
		}
		err = errors.Join(err,
			unix.Mount(dir, dir, "", unix.MS_BIND, ""),
			unix.MountSetattr(unix.AT_FDCWD, dir, 0, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}),
		)
	}
	return err
}

// TestSandbox runs the daemon through its life cycle with the commands of the unit, as an
// ordinary user with the only capability of the unit, under its system call filter.
func TestSandbox(t *testing.T) {
	s := newTestHost(t, readUnit(t, unitFile), config)
	d := s.start(t)

	large := bytes.Repeat([]byte("shaperd "), 1<<14)
	for _, addr := range []string{"127.0.0.1", "::1", "fe80::1%lo"} {
		tcp := dial(t, "tcp", net.JoinHostPort(addr, "80"))
		exchange(t, tcp, large)
		tcp.Close()
		exchange(t, dial(t, "udp", net.JoinHostPort(addr, "53")), large[:1000])
	}
	if text := testutil.MustScrape(t, lab.MetricsAddr); !strings.Contains(text, "\nprocess_start_time_seconds ") {
		t.Errorf("no start time in the metrics:\n%s", text)
	}
	s.await(t, "WATCHDOG=1")
	s.reload(t, d)
	socket := filepath.Join(s.dir, "run", "control.sock")
	status := exec.Command(filepath.Join(s.dir, "shaperd"), "status", "--control", socket)
	if out, err := status.CombinedOutput(); err != nil || !strings.Contains(string(out), "conformance: ok") {
		t.Errorf("status: %v\n%s", err, out)
	}

	last := dial(t, "tcp", "127.0.0.1:80")
	exchange(t, last, large)
	s.terminate(t, d)
	s.await(t, "WATCHDOG=1")
	exchange(t, last, large)
	last.Close()
	s.end(t, d)
	if _, err := os.Lstat(socket); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the control socket still exists: %v", err)
	}
	if _, err := os.Stat(filepath.Join(s.dir, "state", "state")); err != nil {
		t.Errorf("the state of buckets: %v", err)
	}
}

// TestSandbox_StopKeepsBlocks checks that a block survives "systemctl stop", which removes RuntimeDirectory=.
func TestSandbox_StopKeepsBlocks(t *testing.T) {
	u := readUnit(t, unitFile)
	s := newTestHost(t, u, config)
	verb := func(args ...string) string {
		t.Helper()
		args = append(args, "--control", filepath.Join(s.dir, "run", "control.sock"))
		out, err := exec.Command(filepath.Join(s.dir, "shaperd"), args...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", args, err, out)
		}
		return string(out)
	}
	d := s.start(t)
	verb("block", "192.0.2.0/24")
	s.terminate(t, d)
	s.end(t, d)
	left, err := filepath.Glob(filepath.Join(s.dir, "run", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range left {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
	d = s.start(t)
	if out := verb("blocks"); !strings.Contains(out, "192.0.2.0/24") {
		t.Errorf("the block is missing:\n%s", out)
	}
	s.terminate(t, d)
	s.end(t, d)

	state := "--state /var/lib/" + u.service(t, "StateDirectory") + "/"
	if line := u.service(t, "ExecStart"); !strings.Contains(line, state) {
		t.Errorf("ExecStart=%s: only StateDirectory= survives a stop: want %s", line, state)
	}
}

// TestSandbox_ReloadRejectsInvalidConfig checks that an invalid configuration fails the reload before it reaches
// the daemon.
func TestSandbox_ReloadRejectsInvalidConfig(t *testing.T) {
	s := newTestHost(t, readUnit(t, unitFile), strings.Replace(config, "2MB/s", "2mbps", 1))
	out, err := s.command(s.unit["Service"]["ExecReload"][0], 0).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "2mbps") {
		t.Errorf("the first ExecReload: %v\n%s", err, out)
	}
}

// TestSandbox_MissingPermissions removes permissions that the daemon needs from the unit or the drop-in, and
// checks the error.
func TestSandbox_MissingPermissions(t *testing.T) {
	unit, both := []string{unitFile}, []string{unitFile, dropIn}
	lacks := func(what string) string {
		return "shaperd: the packet plane lacks " + what + ": run shaperd as root, or copy " +
			"/usr/share/doc/shaperd/examples/packet-plane.conf to /etc/systemd/system/shaperd.service.d/ " +
			`and run "systemctl daemon-reload"` + "\n"
	}
	for _, tt := range []struct {
		name     string
		files    []string
		old, new string // what to replace in them
		want     string // of what the daemon prints
	}{
		{"system call", unit, "@setuid", "@setuid epoll_pwait2", "SIGSYS"},
		{"address family", unit, "AF_INET AF_INET6 AF_NETLINK ", "", "SIGSYS"},
		{"drop-in", unit, "", "", lacks("CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON")},
		{"CAP_BPF", both, "=CAP_BPF", "=", lacks("CAP_BPF")},
		{"CAP_NET_ADMIN", both, "CAP_NET_ADMIN ", "", lacks("CAP_NET_ADMIN")},
		{"CAP_PERFMON", both, " CAP_PERFMON", "", lacks("CAP_PERFMON")},
		{"bpf", both, "SystemCallFilter=bpf\n", "", "SIGSYS"},
		{"access to pins", both, "ExecStartPre=+/bin/chmod", "#", "permission denied: the packet plane lacks the system call bpf, or"},
		{"pins", both, "ExecStartPre=+/usr/bin/install", "#", "read-only file system: the packet plane lacks the system call bpf, or"},
		{"write access to pins", both, "ReadWritePaths=", "#", "read-only file system: the packet plane lacks the system call bpf, or"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			text := ""
			for _, file := range tt.files {
				text += readFile(t, file)
			}
			changed := strings.ReplaceAll(text, tt.old, tt.new)
			if tt.old != "" && changed == text {
				t.Fatalf("the files do not have %q", tt.old)
			}
			u := parseUnit(t, changed)
			s := newTestHost(t, u, config+attachment)
			for _, line := range u["Service"]["ExecStartPre"][1:] { // without the "check"
				if out, err := s.command(line, 0).CombinedOutput(); err != nil {
					t.Fatalf("ExecStartPre=%s: %v\n%s", line, err, out)
				}
			}
			var out bytes.Buffer
			cmd := s.command(u.service(t, "ExecStart"), 0)
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			late := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
			defer late.Stop()
			if err := cmd.Wait(); err == nil || !strings.Contains(out.String(), tt.want) {
				t.Errorf("the daemon ended with %v, want %q:\n%s", err, tt.want, out.String())
			}
		})
	}
}
