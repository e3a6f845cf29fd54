package main

import (
	"context"
	"fmt"
	"time"
)

// A work is one of the questions that the harness asks.
type work struct {
	name, title string
	loads       func(short bool) []load
}

// A load is what one cell of a work puts on each program.
type load struct {
	name     string
	about    string
	headline string   // the figure that it is about
	figures  []string // that it has
	programs []string // that may have a part; none is all
	repeat   int      // repetitions; 0 as many as asked for
	peers    []string // of programs, where own measures them
	baseline string   // the row that the others are compared with; "" is the subject
	task     func(*network, binaries) task
	measure  func(context.Context, *network, *running) (sample, error)
	// rows replace the programs where a load compares something else.
	rows []row
	// own measures what is no program between hosts. It replaces task and measure, and
	// returns what each of programs came to, once or several times.
	own func(context.Context, *bench) (map[string][]sample, error)
}

// A row is what meets a load: a program, or a variant of one.
type row struct {
	name  string
	peer  bool // its failure is a result
	start func(context.Context, task) (*running, error)
	// task and measure are the load's where they are nil.
	task    func(*network, binaries) task
	measure func(context.Context, *network, *running) (sample, error)
}

// works are all there are.
var works = []work{
	{"W1", "TCP held to a rate", loadsW1},
	{"W2", "TCP after a pause", loadsW2},
	{"W3", "one busy connection beside idle ones", loadsW3},
	{"W4", "TCP without a limit", loadsW4},
	{"W5", "connections", loadsW5},
	{"W6", "a hog at a full semaphore", loadsW6},
	{"W7", "UDP without a limit", loadsW7},
	{"W8", "a million keys", loadsW8},
	{"W9", "idle connections", loadsW9},
	{"W10", "packets at an interface", loadsW10},
	{"W11", "reloads under load", loadsW11},
	{"W12", "how costs grow", loadsW12},
}

func (l shaped) load(name, about, headline string, programs ...string) load {
	return load{
		name: name, about: about, headline: headline, figures: shapedFigures, programs: programs,
		task:    l.task,
		measure: l.measure,
	}
}

// shapers are the programs that hold TCP to a rate.
var shapers = []string{subject, "haproxy", "nginx", "naive", "tbf", "htb"}

func bytesPerSecond(rate int64) string {
	if rate >= 1e6 {
		return fmt.Sprintf("%d MB/s", rate/1e6)
	}
	return fmt.Sprintf("%d kB/s", rate/1e3)
}

func loadsW1(short bool) (list []load) {
	span := 3 * time.Second
	if short {
		l := shaped{rate: 10e6, keys: 1, flows: 4, span: 1500 * time.Millisecond}
		return []load{l.load("10 MB/s, 4 connections", "4 connections of one source, under one rate together", "sigma", subject, "haproxy", "nginx", "naive", "tbf")}
	}
	for _, rate := range []int64{100e3, 1e6, 10e6, 100e6} {
		for _, flows := range []int{1, 4, 32} {
			l := shaped{rate: rate, keys: 1, flows: flows, span: span}
			programs := shapers
			if flows == 1 && rate < 100e6 {
				programs = append([]string{"toxiproxy", "redir"}, shapers...)
			}
			list = append(list, l.load(fmt.Sprintf("%s, %d %s", bytesPerSecond(rate), flows, plural(flows, "connection")),
				"connections of one source that send all they can, under one rate together", "sigma", programs...))
		}
		l := shaped{rate: rate / 8, keys: 8, flows: 1, span: span}
		list = append(list, l.load(bytesPerSecond(rate)+", 8 sources", "8 sources with a connection each, each under an eighth of the rate", "sigma", shapers...))
	}
	return list
}

func plural(n int, what string) string {
	if n == 1 {
		return what
	}
	return what + "s"
}

func loadsW2(short bool) (list []load) {
	pauses := []time.Duration{100 * time.Millisecond, 800 * time.Millisecond, 5 * time.Second}
	if short {
		pauses = pauses[1:2]
	}
	for _, pause := range pauses {
		l := shaped{rate: 10e6, keys: 1, flows: 4, pause: pause, span: 1500 * time.Millisecond}
		list = append(list, l.load(fmt.Sprintf("10 MB/s, after %v", pause),
			"4 connections of one source that send again after a pause; judged from its end", "w100", shapers[:5]...))
	}
	return list
}

func loadsW3(short bool) (list []load) {
	rates := []int64{1e6, 10e6}
	if short {
		rates = rates[1:]
	}
	for _, rate := range rates {
		l := shaped{rate: rate, keys: 1, flows: 1, still: 49, span: 3 * time.Second}
		list = append(list, l.load(bytesPerSecond(rate)+", 1 busy and 49 idle",
			"of 50 connections of one source one sends; where a rate cannot be shared, it has all of it", "error", shapers[:5]...))
	}
	return list
}
