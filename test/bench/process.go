package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// A process is a running program under test, with its child processes.
type process struct {
	*lab.Process
	host *lab.Host
	dir  string
}

// startProcess starts a command inside a host. dir is its directory, which stop removes.
func startProcess(h *lab.Host, dir, name string, args ...string) (*process, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "SHAPERD_CONTROL="+filepath.Join(dir, "control.sock"))
	// The PID namespace ends all forked processes with it, even reparented ones.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	p, err := lab.StartProcess(h.Start, cmd)
	if err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	return &process{p, h, dir}, nil
}

// count returns how often a text occurs in the program's output.
func (p *process) count(text string) int { return strings.Count(p.Log.String(), text) }

// awaitOutput waits until a text has occurred the given number of times in the program's output.
func (p *process) awaitOutput(ctx context.Context, text string, times int) error {
	for deadline := time.Now().Add(20 * time.Second); p.count(text) < times; {
		select {
		case <-p.Exited():
			return p.Errorf("it exited unexpectedly")
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(2 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return p.Errorf("it did not write %q", text)
		}
	}
	return nil
}

// stop ends the program and its child processes. It returns an error if the program had already exited.
func (p *process) stop() error {
	defer os.RemoveAll(p.dir)
	var err error
	if !p.Running() {
		err = p.Errorf("it exited unexpectedly")
	}
	all := processTree(p.PID())
	_ = p.Signal(unix.SIGTERM)
	select {
	case <-p.Exited():
	case <-time.After(300 * time.Millisecond):
	}
	for _, pid := range all {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	<-p.Exited()
	return err
}

// processTree returns the running processes of the process group that root leads.
func processTree(root int) (all []int) {
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

// readStat reads a stat file of /proc; fields starts with the state.
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

// A usage is the CPU time used so far by a program and by the whole machine.
type usage struct {
	user, system     time.Duration // of the program's processes
	softirq, machine time.Duration // of the whole machine
}

func (u usage) sub(v usage) usage {
	return usage{u.user - v.user, u.system - v.system, u.softirq - v.softirq, u.machine - v.machine}
}

const tick = 10 * time.Millisecond // unit of /proc/stat: USER_HZ is 100

// readUsage reads the CPU time of a process group and of the machine; root is 0 without a
// process. The scheduler's clock gives the sum in nanoseconds, /proc the proportion of user
// and system time.
func readUsage(root int) (u usage, err error) {
	if root != 0 {
		for _, pid := range processTree(root) {
			_, fields := readStat(fmt.Sprintf("/proc/%d/stat", pid))
			if len(fields) < 15 {
				continue // it has just exited
			}
			var ticks [4]float64 // of the process and of its exited children: user, system
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
		return u, errors.New("/proc/stat has an unknown format")
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

// peakMemory returns the sum of the peak resident memory of a process group, in bytes. Shared
// memory counts for each process.
func peakMemory(root int) float64 { return memory(root, "status", "VmHWM:") }

// residentMemory returns the memory of a process group, in bytes. Shared memory counts once.
func residentMemory(root int) float64 { return memory(root, "smaps_rollup", "Pss:") }

// memory sums a field of a /proc file over a process group.
func memory(root int, file, field string) (sum float64) {
	for _, pid := range processTree(root) {
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
