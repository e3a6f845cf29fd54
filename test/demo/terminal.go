package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
	"shaperd.dev/shaperd/test/lab/plot"
)

// ANSI codes.
const (
	bold   = "1"
	dim    = "2"
	red    = "31"
	green  = "32"
	yellow = "33"
)

// A terminal shows progress: a block that is redrawn, or lines when out is not a terminal.
type terminal struct {
	out     io.Writer
	live    bool
	color   bool
	highest int64 // highest rate so far in all phases: the scale of the bars
}

func newTerminal(out io.Writer) *terminal {
	t := &terminal{out: out}
	if f, ok := out.(*os.File); ok {
		_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
		t.live = err == nil && os.Getenv("TERM") != "dumb"
	}
	t.color = t.live && os.Getenv("NO_COLOR") == ""
	return t
}

func (t *terminal) paint(code, text string) string {
	if !t.color || code == "" {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

func (t *terminal) printIntro() {
	fmt.Fprintf(t.out, `%s
Two polite sources and a greedy one (%d connections at once, floods of datagrams)
use a server with %d workers and an accept queue of %d: once directly, once
through shaperd.

`, t.paint(bold, "A fragile server, with and without shaperd"), greedyConnections, workers, backlog)
}

const (
	sampleEvery = 100 * time.Millisecond
	plainEvery  = 3 * time.Second
	sparkWidth  = 48
)

// watch shows the progress of the phase until ctx ends.
func (t *terminal) watch(ctx context.Context, p *phase, number, of int) {
	var rates []int64 // bytes a second, per sample
	var last uint64
	start := time.Now()
	ticks := time.NewTicker(sampleEvery)
	defer ticks.Stop()
	if !t.live {
		fmt.Fprintf(t.out, "%d/%d %s\n", number, of, p.title)
	}
	nextPlain := plainEvery
	for first := true; ; first = false {
		done := false
		select {
		case <-ctx.Done():
			done = true
		case <-ticks.C:
		}
		elapsed := time.Since(start)
		total := last
		if c, err := p.downstream.host.Received(lab.DownstreamLink); err == nil {
			total = c.Bytes
		}
		rates = append(rates, int64(total-last)*int64(time.Second/sampleEvery))
		last = total
		t.highest = max(t.highest, rates[len(rates)-1])
		switch {
		case t.live:
			t.block(p, number, of, elapsed, rates, first)
		case done || elapsed >= nextPlain:
			nextPlain += plainEvery
			fmt.Fprintf(t.out, "  %2.0f s  %s\n", elapsed.Seconds(), strings.Join(t.state(p), "; "))
		}
		if done {
			fmt.Fprintln(t.out)
			return
		}
	}
}

// block draws the block over the previous one, unless it is the first.
func (t *terminal) block(p *phase, number, of int, elapsed time.Duration, rates []int64, first bool) {
	const width = 24
	filled := int(min(1, elapsed.Seconds()/p.length.Seconds()) * width)
	bar := strings.Repeat("━", filled) + t.paint(dim, strings.Repeat("─", width-filled))
	lines := append([]string{
		fmt.Sprintf("%s  %s %2.0f s", t.paint(bold, fmt.Sprintf("%d/%d %-15s", number, of, p.title)), bar, elapsed.Seconds()),
		fmt.Sprintf("    arriving   %s %5.1f MB/s", t.paint(yellow, spark(rates, t.highest)), float64(mean(rates, 10))/1e6),
	}, t.state(p)...)
	var b strings.Builder
	if !first {
		fmt.Fprintf(&b, "\x1b[%dA", len(lines))
	}
	for i, l := range lines {
		if i >= 2 {
			l = "    " + l
		}
		fmt.Fprintf(&b, "\x1b[2K%s\n", l)
	}
	io.WriteString(t.out, b.String())
}

// state returns one line each for the polite sources, the greedy one and the downstream.
func (t *terminal) state(p *phase) []string {
	alarm := func(n int, text string) string {
		text = plot.Grouped(n) + " " + text
		if n == 0 {
			return text
		}
		return t.paint(red, text)
	}
	a, b, g := p.stats[0], p.stats[1], p.stats[greedy]
	lines := []string{
		fmt.Sprintf("polite     %s requests answered, %s", plot.Grouped(int(a.answered.Load()+b.answered.Load())),
			alarm(int(a.failed.Load()+b.failed.Load()), "failed")),
		fmt.Sprintf("greedy     %s requests answered, %s failed", plot.Grouped(int(g.answered.Load())), plot.Grouped(int(g.failed.Load()))),
	}
	if l, err := p.downstream.losses(); err == nil {
		lines = append(lines, fmt.Sprintf("downstream %s, %s",
			alarm(l.overflows, "accept queue overflows"), alarm(l.datagrams, "datagrams lost")))
	}
	if !t.live { // in one line, without columns
		for i, l := range lines {
			lines[i] = strings.Join(strings.Fields(l), " ")
		}
	}
	return lines
}

func mean(list []int64, last int) (m int64) {
	list = list[max(0, len(list)-last):]
	for _, v := range list {
		m += v
	}
	return m / int64(max(1, len(list)))
}

// spark draws the last values as a row of bars. highest has full height.
func spark(values []int64, highest int64) string {
	levels := []rune(" ▁▂▃▄▅▆▇█")
	var b strings.Builder
	shown := values[max(0, len(values)-sparkWidth):]
	for _, v := range shown {
		level := int(v * int64(len(levels)-1) / max(1, highest))
		if v > 0 {
			level = max(1, level)
		}
		b.WriteRune(levels[level])
	}
	b.WriteString(strings.Repeat(" ", sparkWidth-len(shown)))
	return b.String()
}

func (t *terminal) printTable(list []row) {
	line := func(style, label, before, after string) {
		fmt.Fprintln(t.out, t.paint(style, fmt.Sprintf("%-38s %17s %17s", label, before, after)))
	}
	line(bold, "", "direct", "through shaperd")
	for _, r := range list {
		line("", r.Label, r.Before, r.After)
	}
}

func (t *terminal) printChecks(list []check) {
	fmt.Fprintln(t.out)
	for _, p := range list {
		mark := t.paint(green, "pass")
		if !p.Passed {
			mark = t.paint(red, "FAIL")
		}
		fmt.Fprintf(t.out, "%s  %s\n", mark, p.Text)
	}
}
