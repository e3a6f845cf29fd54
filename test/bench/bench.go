package main

import (
	"context"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// A bench runs works and collects their results.
type bench struct {
	net    *lab.Row
	bins   binaries
	short  bool
	repeat int
	only   []string // programs to run; empty for all
	match  *regexp.Regexp
	log    io.Writer
	report *report

	profiler *profiler
}

// run measures everything. A load at which the subject failed is in the report without figures, and in the error.
func (b *bench) run(ctx context.Context, list []work) (failed error) {
	began := time.Now()
	defer func() { b.report.Seconds = time.Since(began).Seconds() }()
	for _, w := range list {
		for _, l := range w.loads(b.short) {
			if !b.match.MatchString(w.name + " " + l.name) {
				continue
			}
			c, err := b.measureCell(ctx, w, l)
			if ctx.Err() != nil {
				return errors.Join(failed, ctx.Err())
			}
			if err != nil {
				failed = errors.Join(failed, fmt.Errorf("%s %s: %w", w.name, l.name, err))
				c = &cell{Work: w.name, Name: l.name, Load: l.description, Headline: l.headline, Figures: l.figures, Baseline: l.baseline}
				c.outcomeFor(subject, false).Cannot = firstLine(err)
			}
			b.report.Cells = append(b.report.Cells, c)
			writeCell(b.log, c)
		}
	}
	if len(b.report.Cells) == 0 {
		return errors.New("no load matches")
	}
	return failed
}

// measureCell runs a load against each program in turn, in several rounds, so that the
// machine's good and bad moments affect all programs equally.
func (b *bench) measureCell(ctx context.Context, w work, l load) (*cell, error) {
	c := &cell{Work: w.name, Name: l.name, Load: l.description, Headline: l.headline, Figures: l.figures, Baseline: l.baseline}
	repeat := b.repeat
	if l.repeat > 0 {
		repeat = min(repeat, l.repeat)
	}
	if l.custom != nil {
		for range repeat {
			all, err := l.custom(ctx, b)
			if err != nil {
				return nil, err
			}
			for _, name := range l.programs {
				for _, s := range all[name] {
					c.add(name, slices.Contains(l.peers, name), s)
				}
			}
		}
		return c, nil
	}
	rows := l.rows
	if rows == nil {
		rows = b.eligible(l, c)
	}
	for range repeat {
		for _, r := range rows {
			if o := c.outcome(r.name); o != nil && o.Cannot != "" {
				continue // keeps the repetitions of the others paired
			}
			s, setting, err := b.runOnce(ctx, r, l)
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if err != nil && r.peer {
				// The failure of a peer is a result, and is in the table.
				fmt.Fprintf(b.log, "%s %s: %s: %v\n", w.name, l.name, r.name, err)
				c.outcomeFor(r.name, r.peer).Cannot = firstLine(err)
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %w", r.name, err)
			}
			c.add(r.name, r.peer, s)
			c.outcome(r.name).Setting = setting
		}
	}
	return c, nil
}

// failure starts the Cannot text of a program that failed during the load.
const failure = "failed: "

// eligible returns the programs that can run a load, and records in the cell why the others cannot.
func (b *bench) eligible(l load, c *cell) (rows []row) {
	t := l.task(b.net, b.bins)
	for _, p := range programs {
		if len(l.programs) > 0 && !slices.Contains(l.programs, p.name) || len(b.only) > 0 && !slices.Contains(b.only, p.name) {
			continue
		}
		if why := p.cannot(t); why != "" {
			c.Outcomes = append(c.Outcomes, &outcome{Program: p.name, Cannot: why})
			continue
		}
		rows = append(rows, row{name: p.name, peer: p.name != subject && p.name != ceiling, start: p.start})
	}
	return rows
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return failure + line
}

// runOnce starts a program, runs a load against it, and stops it.
func (b *bench) runOnce(ctx context.Context, r row, l load) (s sample, setting string, err error) {
	if r.task == nil {
		r.task = l.task
	}
	if r.measure == nil {
		r.measure = l.measure
	}
	at, err := r.start(ctx, r.task(b.net, b.bins))
	if err != nil {
		return s, "", err
	}
	at.profiler = b.profiler
	s, err = r.measure(ctx, b.net, at)
	return s, at.setting, errors.Join(err, at.stop())
}

// outcomeFor returns the outcome of a program, and creates it if necessary.
func (c *cell) outcomeFor(program string, peer bool) *outcome {
	o := c.outcome(program)
	if o == nil {
		o = &outcome{Program: program, Peer: peer}
		c.Outcomes = append(c.Outcomes, o)
	}
	return o
}

func (c *cell) add(program string, peer bool, s sample) {
	o := c.outcomeFor(program, peer)
	if o.Figures == nil {
		o.Figures, o.Series = map[string]stat{}, s.series
	}
	for key, x := range s.figures {
		st := o.Figures[key]
		st.Samples = append(st.Samples, x)
		o.Figures[key] = st
	}
}

// readMachine returns the properties of this machine.
func readMachine() machine {
	var u unix.Utsname
	_ = unix.Uname(&u)
	m := machine{Kernel: unix.ByteSliceToString(u.Release[:]), CPUs: runtime.NumCPU(), Go: runtime.Version()}
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, model, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			m.CPU = strings.TrimSpace(model)
			break
		}
	}
	return m
}

// findBinaries locates the programs to measure; install-peers puts most of them into peers.
func findBinaries(shaperd, peers, asn string) (b binaries, err error) {
	if b.shaperd, err = filepath.Abs(shaperd); err != nil {
		return b, err
	}
	if peers, err = filepath.Abs(peers); err != nil {
		return b, err
	}
	if b.asn, err = filepath.Abs(asn); err != nil {
		return b, err
	}
	b.toxiproxy, b.naive, b.haproxy3 = filepath.Join(peers, "toxiproxy"), filepath.Join(peers, "naive"), lab.HAProxy(peers)
	for _, path := range []string{b.shaperd, b.toxiproxy, b.naive, b.haproxy3[0], b.haproxy3[3], "/usr/sbin/nginx", filepath.Join(b.asn, asnFiles[0])} {
		if _, err := os.Stat(path); err != nil {
			return b, fmt.Errorf("%w: run \"make bench\" to build and install it", err)
		}
	}
	return b, nil
}

// versions returns the versions that the programs report.
func (b binaries) versions() map[string]string {
	line := func(cmd ...string) string {
		out, _ := exec.Command(cmd[0], cmd[1:]...).CombinedOutput()
		first, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
		return first
	}
	return map[string]string{
		subject:     line(b.shaperd, "version"),
		"haproxy":   line(append(slices.Clone(b.haproxy3), "-v")...),
		"nginx":     line("/usr/sbin/nginx", "-v"),
		"toxiproxy": moduleVersion(b.toxiproxy),
		"redir":     line("redir", "--version"),
		"tbf":       line("tc", "-V"),
		"nftables":  line("nft", "-v"),
	}
}

// moduleVersion returns the version of the module that a Go binary was built from.
func moduleVersion(path string) string {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return ""
	}
	return info.Main.Path + " " + info.Main.Version
}
