package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
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
// includes the kernel, and the daemon with Go's profiler too.
type profiler struct {
	dir  string // "" for no profile
	perf *exec.Cmd
	cpu  *net.UnixConn // receives the daemon's CPU profile
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
	return errors.Join(os.RemoveAll(p.dir), os.MkdirAll(p.dir, 0o755), os.Setenv("GODEBUG", "memprofilerate=16384"))
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
	if !r.profiles {
		return nil
	}
	err := p.save(r, "allocs?gc=1", "allocs-before.pprof")
	if err == nil {
		p.cpu, err = requestProfile(r, "profile?seconds=3600")
	}
	return err
}

func (p *profiler) end(r *running) (err error) {
	if p.dir == "" || r.process == nil {
		return nil
	}
	if p.cpu != nil {
		// The daemon ends the profile when it sees no more of the client, and then sends it.
		err = errors.Join(p.cpu.CloseWrite(), saveProfile(p.cpu, filepath.Join(p.dir, "cpu.pprof")), p.save(r, "allocs?gc=1", "allocs.pprof"))
		p.cpu = nil
	}
	if p.perf != nil {
		_ = p.perf.Process.Signal(unix.SIGINT)
		_ = p.perf.Wait() // perf ends by the signal
		p.perf = nil
	}
	return err
}

// save writes a profile of the daemon to a file.
func (p *profiler) save(r *running, profile, name string) error {
	c, err := requestProfile(r, profile)
	if err != nil {
		return err
	}
	return saveProfile(c, filepath.Join(p.dir, name))
}

// requestProfile requests a profile from the control socket of the daemon.
func requestProfile(r *running, profile string) (*net.UnixConn, error) {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: filepath.Join(r.process.dir, "control.sock"), Net: "unix"})
	if err != nil {
		return nil, err
	}
	if _, err := fmt.Fprintf(c, "GET /debug/pprof/%s HTTP/1.1\r\nHost: shaperd\r\nConnection: close\r\n\r\n", profile); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// saveProfile writes the profile that c receives to a file, and closes c.
func saveProfile(c *net.UnixConn, path string) error {
	defer c.Close()
	answer, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return err
	}
	data, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("profile: %s: %s", answer.Status, data)
	}
	if err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o644)
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
