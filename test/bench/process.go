package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"shaperd/test/lab"
)

// A process is a running program under test, with all it started.
type process struct {
	host   *lab.Host
	cmd    *exec.Cmd
	mu     sync.Mutex // of text
	text   bytes.Buffer
	exited chan struct{}
	err    error // when exited
	dir    string
}

// Write takes what the program writes.
func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.text.Len() < 1<<20 {
		p.text.Write(b)
	}
	return len(b), nil
}

// startProcess starts a command inside a host. dir is its folder, which goes with it.
func startProcess(h *lab.Host, dir, name string, args ...string) (*process, error) {
	p := &process{host: h, cmd: exec.Command(name, args...), exited: make(chan struct{}), dir: dir}
	p.cmd.Dir = dir
	p.cmd.Env = append(os.Environ(), "SHAPERD_CONTROL="+filepath.Join(dir, "control.sock"))
	p.cmd.Stdout, p.cmd.Stderr = p, p
	// What it forks ends with it, whatever the kernel thinks who its parent is.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	if err := h.Start(p.cmd); err != nil {
		os.RemoveAll(dir)
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.exited)
	}()
	return p, nil
}

// listening waits until a host listens for TCP at an address, or has a UDP socket there.
func (p *process) listening(ctx context.Context, at netip.AddrPort, udp bool) error {
	table, state := "/proc/thread-self/net/tcp", "0A" // TCP_LISTEN
	if udp {
		table, state = "/proc/thread-self/net/udp", "07" // TCP_CLOSE
	}
	a := at.Addr().As4()
	want := fmt.Sprintf(": %02X%02X%02X%02X:%04X 00000000:0000 %s", a[3], a[2], a[1], a[0], at.Port(), state)
	any := fmt.Sprintf(": 00000000:%04X 00000000:0000 %s", at.Port(), state)
	for deadline := time.Now().Add(10 * time.Second); ; {
		var sockets []byte
		err := p.host.Do(func() (err error) { sockets, err = os.ReadFile(table); return err })
		if err != nil {
			return err
		}
		if bytes.Contains(sockets, []byte(want)) || bytes.Contains(sockets, []byte(any)) {
			return nil
		}
		select {
		case <-p.exited:
			return p.fault("ended before it listened")
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return p.fault("does not listen after 10 s")
		}
	}
}

// count returns how often the program has written a text.
func (p *process) count(text string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Count(p.text.String(), text)
}

// wrote waits until the program has written a text so many times.
func (p *process) wrote(ctx context.Context, text string, times int) error {
	for deadline := time.Now().Add(20 * time.Second); p.count(text) < times; {
		select {
		case <-p.exited:
			return p.fault("ended by itself")
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(2 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return p.fault(fmt.Sprintf("does not write %q", text))
		}
	}
	return nil
}

func (p *process) fault(what string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	text := p.text.String()
	return fmt.Errorf("%s %s; it wrote:\n%s", p.cmd.Path, what, text[max(0, len(text)-2000):])
}

// stop ends the program and all it started. It is an error when it had ended before.
func (p *process) stop() error {
	defer os.RemoveAll(p.dir)
	var err error
	select {
	case <-p.exited:
		err = p.fault(fmt.Sprintf("ended by itself: %v", p.err))
	default:
	}
	all := tree(p.cmd.Process.Pid)
	_ = p.cmd.Process.Signal(unix.SIGTERM)
	select {
	case <-p.exited:
	case <-time.After(300 * time.Millisecond):
	}
	for _, pid := range all {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	<-p.exited
	return err
}

// tree returns a process, which leads a group, and all that it started and that still
// run: those of its group.
func tree(root int) (all []int) {
	entries, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range entries {
		pid, fields := readStat(path)
		if fields == nil {
			continue
		}
		if group, _ := strconv.Atoi(fields[2]); group == root {
			all = append(all, pid)
		}
	}
	return all
}

// readStat reads a file stat of /proc; fields begins with the state.
func readStat(path string) (pid int, fields []string) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, nil
	}
	name, rest, ok := strings.Cut(string(b), " (")
	end := strings.LastIndexByte(rest, ')')
	if !ok || end < 0 {
		return 0, nil
	}
	pid, _ = strconv.Atoi(name)
	return pid, strings.Fields(rest[end+1:])
}

// A usage is what processes, and the whole machine, have used so far.
type usage struct {
	user, system     time.Duration // of the processes
	softirq, machine time.Duration // of the machine
}

func (u usage) sub(v usage) usage {
	return usage{u.user - v.user, u.system - v.system, u.softirq - v.softirq, u.machine - v.machine}
}

const tick = 10 * time.Millisecond // of /proc: USER_HZ is 100

// used reads what a process and all that it started have used; 0 is no process. The
// scheduler's clock gives the sum to the nanosecond, and /proc its parts.
func used(root int) (u usage, err error) {
	if root != 0 {
		for _, pid := range tree(root) {
			_, fields := readStat(fmt.Sprintf("/proc/%d/stat", pid))
			if len(fields) < 15 {
				continue // it has just ended
			}
			var ticks [4]float64 // of itself and of children that ended: user, system
			for i := range ticks {
				ticks[i], _ = strconv.ParseFloat(fields[11+i], 64)
			}
			var ts unix.Timespec
			if unix.ClockGettime(^int32(pid)<<3|2, &ts) != nil { // CPUCLOCK_SCHED of pid
				continue
			}
			own := time.Duration(ts.Nano())
			share := 0.5
			if sum := ticks[0] + ticks[1]; sum > 0 {
				share = ticks[0] / sum
			}
			user := time.Duration(share * float64(own))
			u.user += user + time.Duration(ticks[2])*tick
			u.system += own - user + time.Duration(ticks[3])*tick
		}
	}
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return u, err
	}
	line, _, _ := strings.Cut(string(b), "\n")
	fields := strings.Fields(line)
	if len(fields) < 8 {
		return u, errors.New("/proc/stat has another form")
	}
	for i, f := range fields[1:8] { // user nice system idle iowait irq softirq
		n, _ := strconv.Atoi(f)
		d := time.Duration(n) * tick
		if i == 6 {
			u.softirq = d
		}
		if i != 3 && i != 4 {
			u.machine += d
		}
	}
	return u, nil
}

// peak is the most resident memory that a process and all it started have had, in
// bytes. What they share counts for each.
func peak(root int) float64 { return memory(root, "status", "VmHWM:") }

// resident is the memory of a process and all it started, in bytes. What they share
// counts once.
func resident(root int) float64 { return memory(root, "smaps_rollup", "Pss:") }

// memory adds up a field of a file of /proc over a process and all it started.
func memory(root int, file, field string) (sum float64) {
	for _, pid := range tree(root) {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
		for line := range strings.Lines(string(b)) {
			if rest, ok := strings.CutPrefix(line, field); ok {
				n, _ := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 64)
				sum += 1024 * n
			}
		}
	}
	return sum
}
