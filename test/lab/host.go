package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// prefix starts the name of every namespace and directory. The ID of the creating process follows.
const prefix = "shaperd-"

var hosts atomic.Int32

// A Host is a network namespace. Its methods are safe for concurrent use.
type Host struct {
	Name    string
	home    netns.NsHandle // the program's own namespace
	ns      netns.NsHandle
	Links   *netlink.Handle // netlink handle in the namespace
	starts  chan func()
	started sync.WaitGroup
}

// NewHost creates a namespace with the role in its name.
func NewHost(role string) (*Host, error) {
	h := &Host{
		Name: fmt.Sprintf("%s%d-%d-%s", prefix, os.Getpid(), hosts.Add(1), role),
		home: netns.None(), ns: netns.None(), starts: make(chan func()),
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var err error
	if h.home, err = netns.Get(); err != nil {
		return nil, fmt.Errorf("open own namespace: %w", err)
	}
	if err = ensureMount(netnsDir); err == nil {
		h.ns, err = netns.NewNamed(h.Name)
		h.leave()
	}
	if err != nil {
		h.home.Close()
		return nil, fmt.Errorf("create network namespace %s: %w", h.Name, err)
	}
	h.started.Go(h.launch)
	if h.Links, err = netlink.NewHandleAt(h.ns); err == nil {
		err = h.Up("lo")
	}
	if err = errors.Join(err, h.setDefaults()); err != nil {
		h.Remove()
		return nil, fmt.Errorf("set up %s: %w", h.Name, err)
	}
	return h, nil
}

// setDefaults makes addresses usable at once, and selects a congestion control that does
// not pace: pacing senders would smooth traffic that the program under test does not.
func (h *Host) setDefaults() error {
	control := "reno"
	var available []byte
	err := h.Do(func() (err error) {
		available, err = os.ReadFile("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
		return err
	})
	if slices.Contains(strings.Fields(string(available)), "cubic") {
		control = "cubic"
	}
	return errors.Join(err,
		h.Sysctl("net/ipv6/conf/all/accept_dad", "0"),
		h.Sysctl("net/ipv6/conf/default/accept_dad", "0"),
		h.Sysctl("net/ipv4/tcp_congestion_control", control))
}

// Remove deletes the namespace and kills its processes.
func (h *Host) Remove() {
	close(h.starts)
	h.started.Wait()
	if h.Links != nil {
		h.Links.Close()
	}
	h.ns.Close()
	h.home.Close()
	// Sweep in the next run removes any leftovers.
	_ = netns.DeleteNamed(h.Name)
}

// enter moves the calling goroutine's thread into the host, until leave.
func (h *Host) enter() {
	runtime.LockOSThread()
	if err := netns.Set(h.ns); err != nil {
		panic(fmt.Sprintf("enter namespace %s: %v", h.Name, err))
	}
}

func (h *Host) leave() {
	if err := netns.Set(h.home); err != nil {
		panic(fmt.Sprintf("return to own namespace: %v", err))
	}
	runtime.UnlockOSThread()
}

// Do runs fn inside the host. Sockets that fn opens stay there.
func (h *Host) Do(fn func() error) error {
	h.enter()
	defer h.leave()
	return fn()
}

// launch starts the host's processes, all from one thread that lives as long as the host:
// the kernel kills them with the thread that started them, so that they never outlive
// this program, however it ends.
func (h *Host) launch() {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// The main thread never ends. While this goroutine holds it, another goroutine gets a thread that does.
		defer runtime.UnlockOSThread()
		var other sync.WaitGroup
		other.Go(h.launch)
		other.Wait()
		return
	}
	// Never unlocked: the thread ends with this goroutine.
	if err := netns.Set(h.ns); err != nil {
		panic(fmt.Sprintf("enter namespace %s: %v", h.Name, err))
	}
	for start := range h.starts {
		start()
	}
}

// Start starts cmd inside the host, in a process group of its own. It ends with this program.
func (h *Host) Start(cmd *exec.Cmd) error { return startOn(h.starts, cmd) }

// Run runs a command inside the host until it exits. The error contains its output.
func (h *Host) Run(name string, args ...string) error {
	_, err := h.Output(name, args...)
	return err
}

// Output is like Run and returns the command's output.
func (h *Host) Output(name string, args ...string) (string, error) {
	var out strings.Builder
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	err := h.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		err = fmt.Errorf("%s %s in %s: %w: %s", name, strings.Join(args, " "), h.Name, err, out.String())
	}
	return out.String(), err
}

// Sysctl sets a kernel parameter of the host.
func (h *Host) Sysctl(name, value string) error {
	err := h.Do(func() error { return os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0) })
	if err != nil {
		return fmt.Errorf("set %s in %s: %w", name, h.Name, err)
	}
	return nil
}

// Dial connects by TCP from an address of the host. The thread is inside the host only
// until the socket exists, so that pending dials hold no threads.
func (h *Host) Dial(ctx context.Context, from netip.Addr, to netip.AddrPort, timeout time.Duration) (*net.TCPConn, error) {
	leave := sync.OnceFunc(h.leave)
	d := net.Dialer{
		LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0)),
		Timeout:   timeout,
		Control: func(_, _ string, raw syscall.RawConn) error {
			leave()
			// Lets connections to different addresses share a source port.
			return raw.Control(func(fd uintptr) {
				_ = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
			})
		},
	}
	h.enter()
	defer leave()
	c, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// Listen listens for TCP inside the host.
func (h *Host) Listen(at netip.AddrPort) (l *net.TCPListener, err error) {
	config := net.ListenConfig{}
	config.SetMultipathTCP(false)
	err = h.Do(func() error {
		any, err := config.Listen(context.Background(), "tcp", at.String())
		if err == nil {
			l = any.(*net.TCPListener)
		}
		return err
	})
	return l, err
}

// DialUDP opens a datagram socket inside the host, connected to an address.
func (h *Host) DialUDP(from netip.Addr, to netip.AddrPort) (c *net.UDPConn, err error) {
	err = h.Do(func() error {
		c, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), net.UDPAddrFromAddrPort(to))
		return err
	})
	return c, err
}

// ListenUDP opens a datagram socket inside the host.
func (h *Host) ListenUDP(at netip.AddrPort) (c *net.UDPConn, err error) {
	err = h.Do(func() error {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		return err
	})
	return c, err
}

// Sweep removes the namespaces and the directories of [TempDir] whose creating process is
// gone. Its child processes ended with it.
func Sweep() error {
	return errors.Join(sweep(netnsDir), sweep(os.TempDir()))
}

// netnsDir is the directory of named namespaces.
const netnsDir = "/run/netns"

// ensureMount makes a directory a mount point unless it is one, as "ip netns add" does.
// Mounting over a directory that already has namespaces would hide their mounts, and
// their names could no longer be removed.
func ensureMount(path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	above, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer above.Close()
	// One process at a time. Closing the file unlocks it.
	if err := unix.Flock(int(above.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", above.Name(), err)
	}
	err = unix.Mount("", path, "", unix.MS_SHARED|unix.MS_REC, "")
	if errors.Is(err, unix.EINVAL) {
		err = errors.Join(
			unix.Mount(path, path, "", unix.MS_BIND|unix.MS_REC, ""),
			unix.Mount("", path, "", unix.MS_SHARED|unix.MS_REC, ""))
	}
	if err != nil {
		return fmt.Errorf("make %s a mount point: %w", path, err)
	}
	return nil
}

// TempDir creates a directory. The caller removes it, with [RemoveDir] if a file system is mounted there.
func TempDir() (string, error) {
	return os.MkdirTemp("", fmt.Sprintf("%s%d-", prefix, os.Getpid()))
}

// RemoveDir unmounts and removes a directory.
func RemoveDir(path string) error {
	if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && err != unix.EINVAL && err != unix.ENOENT {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	return os.RemoveAll(path)
}

func sweep(dir string) error {
	left, err := filepath.Glob(filepath.Join(dir, prefix+"*"))
	if err != nil {
		return err
	}
	for _, path := range left {
		if pid, ok := owner(filepath.Base(path)); !ok || unix.Kill(pid, 0) != unix.ESRCH {
			continue
		}
		if err := RemoveDir(path); err != nil {
			return fmt.Errorf("remove leftover: %w", err)
		}
	}
	return nil
}

// owner returns the ID of the process that created the namespace or directory called name.
func owner(name string) (pid int, ok bool) {
	rest, ours := strings.CutPrefix(name, prefix)
	digits, _, cut := strings.Cut(rest, "-")
	pid, err := strconv.Atoi(digits)
	return pid, ours && cut && err == nil && pid > 0
}
