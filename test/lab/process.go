package lab

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
)

// A Process is a running program. Its output is collected.
type Process struct {
	Log    testutil.Buffer // stdout and stderr
	name   string          // in errors
	cmd    *exec.Cmd
	exited chan struct{}
	err    error // of Wait, set when exited is closed
}

// StartProcess starts a command by start: [Host.Start], [Start] or [exec.Cmd.Start].
func StartProcess(start func(*exec.Cmd) error, cmd *exec.Cmd) (*Process, error) {
	p := &Process{name: filepath.Base(cmd.Path), cmd: cmd, exited: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = &p.Log, &p.Log
	cmd.WaitDelay = time.Second // a child process that outlives it may keep the output open
	if err := start(cmd); err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	go func() {
		p.err = cmd.Wait()
		close(p.exited)
	}()
	return p, nil
}

// PID returns the process ID.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Signal sends a signal.
func (p *Process) Signal(sig os.Signal) error { return p.cmd.Process.Signal(sig) }

// Exited returns a channel that is closed when the process has exited.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Running reports whether the process has not exited.
func (p *Process) Running() bool {
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

// Kill sends SIGKILL to the process and those that it has started, such as the workers of nginx, and waits for its exit.
func (p *Process) Kill() {
	select {
	case <-p.exited: // its number may be another's
	default:
		_ = unix.Kill(-p.cmd.Process.Pid, unix.SIGKILL)
		<-p.exited
	}
}

// AwaitExit waits until the process has exited, and returns an error if it does not exit in time
// or its exit code is not 0.
func (p *Process) AwaitExit(limit time.Duration) error {
	select {
	case <-p.exited:
		if p.err != nil {
			return fmt.Errorf("it ended with: %w", p.err)
		}
		return nil
	case <-time.After(limit):
		return fmt.Errorf("it still runs after %v", limit)
	}
}

// listenTimeout bounds the start of other programs on a busy machine.
const listenTimeout = 30 * time.Second

// AwaitListening waits until the program's host has a TCP listener or a UDP socket at an address.
func (p *Process) AwaitListening(ctx context.Context, h *Host, at netip.AddrPort, udp bool) error {
	table, state := "/proc/thread-self/net/tcp", "0A" // TCP_LISTEN
	if udp {
		table, state = "/proc/thread-self/net/udp", "07" // TCP_CLOSE
	}
	a := at.Addr().As4()
	want := fmt.Sprintf(": %02X%02X%02X%02X:%04X 00000000:0000 %s", a[3], a[2], a[1], a[0], at.Port(), state)
	any := fmt.Sprintf(": 00000000:%04X 00000000:0000 %s", at.Port(), state)
	for deadline := time.Now().Add(listenTimeout); ; {
		var sockets []byte
		err := h.Do(func() (err error) { sockets, err = os.ReadFile(table); return err })
		if err != nil {
			return err
		}
		if bytes.Contains(sockets, []byte(want)) || bytes.Contains(sockets, []byte(any)) {
			return nil
		}
		select {
		case <-p.Exited():
			return p.Errorf("it exited before it listened")
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return p.Errorf("it did not listen within %v", listenTimeout)
		}
	}
}

// Errorf returns an error about the process, with its state and the end of its output.
func (p *Process) Errorf(format string, args ...any) error {
	state := "running"
	if !p.Running() {
		state = p.cmd.ProcessState.String()
	}
	text := p.Log.String()
	return fmt.Errorf("%s (%s): %w; its output:\n%s", p.name, state, fmt.Errorf(format, args...), text[max(0, len(text)-4000):])
}

// Start is [Host.Start] for the program's own namespace.
func Start(cmd *exec.Cmd) error { return startOn(here(), cmd) }

// here returns the channel of a thread that never ends.
var here = sync.OnceValue(func() chan<- func() {
	starts := make(chan func())
	go func() {
		runtime.LockOSThread()
		for start := range starts {
			start()
		}
	}()
	return starts
})

// startOn starts cmd on the thread that receives starts, in a process group of its own: an
// interrupt from the terminal goes to this program, which then ends its processes. The kernel
// kills the process with the thread that started it, so that it never outlives this program,
// however it ends.
func startOn(starts chan<- func(), cmd *exec.Cmd) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig, cmd.SysProcAttr.Setpgid = unix.SIGKILL, true
	done := make(chan error)
	starts <- func() { done <- cmd.Start() }
	return <-done
}
