package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A profiler profiles a program during a measurement: any program with perf, which
// includes the kernel, and the daemon with Go's profiler, if it was built with the tag
// profile.
type profiler struct {
	dir  string // "" for no profile
	perf *exec.Cmd
}

// prepare creates an empty directory for the profiles.
func (p *profiler) prepare() error {
	if p.dir == "" {
		return nil
	}
	var err error
	if p.dir, err = filepath.Abs(p.dir); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(p.dir), os.MkdirAll(p.dir, 0o755), os.Setenv("SHAPERD_PROFILE", p.dir))
}

func (p *profiler) begin(r *running) error {
	if p.dir == "" || r.process == nil {
		return nil
	}
	if path, err := exec.LookPath("perf"); err == nil {
		pids := make([]string, 0, 4)
		for _, pid := range processTree(r.pid()) {
			pids = append(pids, strconv.Itoa(pid))
		}
		p.perf = exec.Command(path, "record", "-e", "cpu-clock", "-F", "4999", "-g", "-o", filepath.Join(p.dir, "perf.data"), "-p", strings.Join(pids, ","))
		if err := p.perf.Start(); err != nil {
			return err
		}
		time.Sleep(200 * time.Millisecond) // until perf has started
	}
	if r.profiles {
		return unix.Kill(r.pid(), unix.SIGUSR1)
	}
	return nil
}

func (p *profiler) end(r *running) (err error) {
	if p.dir == "" || r.process == nil {
		return nil
	}
	if r.profiles {
		err = unix.Kill(r.pid(), unix.SIGUSR2)
		time.Sleep(100 * time.Millisecond) // until the profile is written
	}
	if p.perf != nil {
		_ = p.perf.Process.Signal(unix.SIGINT)
		_ = p.perf.Wait() // perf ends by the signal
		p.perf = nil
	}
	return err
}

// print prints the top entries of the profiles.
func (p *profiler) print(w io.Writer, binary string) {
	at := func(name string) string { return filepath.Join(p.dir, name) }
	top := func(title string, lines int, cmd ...string) {
		out, err := exec.Command(cmd[0], cmd[1:]...).Output()
		if err != nil {
			fmt.Fprintf(w, "\n%s: %v\n", title, err)
			return
		}
		kept := slices.DeleteFunc(strings.Split(string(out), "\n"), func(line string) bool {
			return strings.TrimSpace(line) == "" || strings.HasPrefix(line, "#")
		})
		fmt.Fprintf(w, "\n%s\n  %s\n", title, strings.Join(kept[:min(lines, len(kept))], "\n  "))
	}
	if _, err := os.Stat(at("cpu.pprof")); err == nil {
		top("In Go: "+at("cpu.pprof"), 30, "go", "tool", "pprof", "-top", "-nodecount=24", binary, at("cpu.pprof"))
		top("Allocated: "+at("allocs.pprof"), 20, "go", "tool", "pprof", "-sample_index=alloc_space", "-top", "-nodecount=14",
			"-diff_base", at("allocs-before.pprof"), binary, at("allocs.pprof"))
	}
	if _, err := os.Stat(at("perf.data")); err == nil {
		top("With the kernel: "+at("perf.data"), 40, "perf", "report", "-i", at("perf.data"), "--stdio", "--no-children", "-g", "none", "--percent-limit", "0.7")
	}
}
