package main

import (
	"context"
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
)

// A bench runs works and gathers what they come to.
type bench struct {
	net    *network
	bins   binaries
	short  bool
	repeat int
	only   []string // programs; none is all
	match  *regexp.Regexp
	log    io.Writer
	report *report

	profiler *profiler
}

func (b *bench) run(ctx context.Context, list []work) error {
	began := time.Now()
	for _, w := range list {
		for _, l := range w.loads(b.short) {
			if !b.match.MatchString(w.name + " " + l.name) {
				continue
			}
			c, err := b.cell(ctx, w, l)
			if err != nil {
				return fmt.Errorf("%s %s: %w", w.name, l.name, err)
			}
			b.report.Cells = append(b.report.Cells, c)
			writeCell(b.log, c)
		}
	}
	b.report.Seconds = time.Since(began).Seconds()
	if len(b.report.Cells) == 0 {
		return errors.New("no load matches")
	}
	return nil
}

// cell has each program meet a load, one after the other, again and again: so all of
// them have the same share of the machine's good and bad moments.
func (b *bench) cell(ctx context.Context, w work, l load) (*cell, error) {
	c := &cell{Work: w.name, Name: l.name, Load: l.about, Headline: l.headline, Figures: l.figures}
	repeat := b.repeat
	if l.repeat > 0 {
		repeat = min(repeat, l.repeat)
	}
	if l.own != nil {
		for range repeat {
			all, err := l.own(ctx, b)
			if err != nil {
				return nil, err
			}
			for _, name := range l.programs {
				if s, ok := all[name]; ok {
					c.add(name, s)
				}
			}
		}
		return c, nil
	}
	t := l.task(b.net, b.bins)
	for i := range repeat {
		for _, p := range programs {
			if len(l.programs) > 0 && !slices.Contains(l.programs, p.name) || len(b.only) > 0 && !slices.Contains(b.only, p.name) {
				continue
			}
			if why := p.cannot(t); why != "" {
				if i == 0 {
					c.Outcomes = append(c.Outcomes, &outcome{Program: p.name, Cannot: why})
				}
				continue
			}
			s, setting, err := b.once(ctx, p, t, l)
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if err != nil && p.name != subject {
				// A peer that fails is a result. The table shows it.
				fmt.Fprintf(b.log, "%s %s: %s: %v\n", w.name, l.name, p.name, err)
				if o := c.outcome(p.name); o == nil {
					c.Outcomes = append(c.Outcomes, &outcome{Program: p.name, Cannot: firstLine(err)})
				}
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %w", p.name, err)
			}
			c.add(p.name, s)
			c.outcome(p.name).Setting = setting
		}
	}
	return c, nil
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return "failed: " + line
}

// once starts a program, has it meet a load, and ends it.
func (b *bench) once(ctx context.Context, p program, t task, l load) (s sample, setting string, err error) {
	r, err := p.start(ctx, t)
	if err != nil {
		return s, "", err
	}
	r.profiler = b.profiler
	s, err = l.measure(ctx, b.net, r)
	return s, r.setting, errors.Join(err, r.stop())
}

func (c *cell) add(program string, s sample) {
	o := c.outcome(program)
	if o == nil {
		o = &outcome{Program: program}
		c.Outcomes = append(c.Outcomes, o)
	}
	if o.Figures == nil {
		o.Figures, o.Cannot = map[string]stat{}, ""
		o.Series = s.series
	}
	for key, x := range s.figures {
		st := o.Figures[key]
		st.Samples = append(st.Samples, x)
		o.Figures[key] = st
	}
}

// thisMachine says where the harness runs.
func thisMachine() machine {
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

// findBinaries finds what is measured; install-peers has put most of it into peers.
func findBinaries(shaperd, peers string) (b binaries, err error) {
	if b.self, err = os.Executable(); err != nil {
		return b, err
	}
	if b.shaperd, err = filepath.Abs(shaperd); err != nil {
		return b, err
	}
	if peers, err = filepath.Abs(peers); err != nil {
		return b, err
	}
	b.toxiproxy = filepath.Join(peers, "toxiproxy")
	root := filepath.Join(peers, "haproxy")
	lib := filepath.Join(root, "usr/lib/x86_64-linux-gnu")
	b.haproxy3 = []string{filepath.Join(lib, "ld-linux-x86-64.so.2"), "--library-path", lib, filepath.Join(root, "usr/sbin/haproxy")}
	for _, path := range []string{b.shaperd, b.toxiproxy, b.haproxy3[0], b.haproxy3[3], "/usr/sbin/nginx"} {
		if _, err := os.Stat(path); err != nil {
			return b, fmt.Errorf("%w: \"make bench\" builds and installs what is measured", err)
		}
	}
	return b, nil
}

// versions asks the programs for theirs.
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
		"toxiproxy": line(b.toxiproxy, "-version"),
		"redir":     line("redir", "--version"),
		"tbf":       line("tc", "-V"),
	}
}
