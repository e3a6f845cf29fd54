package main

import (
	"context"
	"fmt"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// A work is a group of loads that answers one question.
type work struct {
	name, title string
	loads       func(short bool) []load
}

// A load is the traffic of one cell, which each program gets.
type load struct {
	name        string
	description string
	headline    string   // the most important figure
	figures     []string // measured figures
	programs    []string // eligible programs; empty for all
	repeat      int      // maximum number of repetitions; 0 for no maximum
	peers       []string // of programs, when custom measures them
	baseline    string   // the row that the others are compared with; "" for the subject
	task        func(*lab.Row, binaries) task
	measure     func(context.Context, *lab.Row, *running) (sample, error)
	// rows replaces the programs if the load compares something else.
	rows []row
	// custom replaces task and measure for loads without a program between hosts. It
	// returns one or several samples per program.
	custom func(context.Context, *bench) (map[string][]sample, error)
}

// A row is a program, or a variant of one, in a cell.
type row struct {
	name  string
	peer  bool // whether its failure is a result
	start func(context.Context, task) (*running, error)
	// task and measure override the load's unless they are nil.
	task    func(*lab.Row, binaries) task
	measure func(context.Context, *lab.Row, *running) (sample, error)
}

// works are all works.
var works = []work{
	{"W1", "TCP under a rate limit", loadsW1},
	{"W2", "TCP after a pause", loadsW2},
	{"W3", "one busy connection among idle ones", loadsW3},
	{"W4", "TCP without a limit", loadsW4},
	{"W5", "connections", loadsW5},
	{"W6", "a hog at a connection limit", loadsW6},
	{"W7", "UDP without a limit", loadsW7},
	{"W8", "a million keys", loadsW8},
	{"W9", "idle connections", loadsW9},
	{"W10", "packets at an interface", loadsW10},
	{"W11", "reloads under load", loadsW11},
	{"W12", "growth of costs", loadsW12},
}

func (l shaped) load(name, about, headline string, programs ...string) load {
	return load{
		name: name, description: about, headline: headline, figures: shapedFigures, programs: programs,
		task:    l.task,
		measure: l.measure,
	}
}

// shapers are the programs that limit the rate of TCP.
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
		return []load{l.load("10 MB/s, 4 connections", "4 connections of one source that share a rate", "sigma", subject, "haproxy", "nginx", "naive", "tbf")}
	}
	for _, rate := range []int64{100e3, 1e6, 10e6, 100e6} {
		for _, flows := range []int{1, 4, 32} {
			l := shaped{rate: rate, keys: 1, flows: flows, span: span}
			programs := shapers
			if flows == 1 && rate < 100e6 {
				programs = append([]string{"toxiproxy", "redir"}, shapers...)
			}
			list = append(list, l.load(fmt.Sprintf("%s, %d %s", bytesPerSecond(rate), flows, plural(flows, "connection")),
				"connections of one source that send at full speed and share a rate", "sigma", programs...))
		}
		l := shaped{rate: rate / 8, keys: 8, flows: 1, span: span}
		list = append(list, l.load(bytesPerSecond(rate)+", 8 sources", "8 sources with one connection each, each limited to an eighth of the rate", "sigma", shapers...))
	}
	many := shaped{rate: 1.25e6, keys: 100, flows: 1, span: span}
	return append(list, many.load("125 MB/s, 100 sources", "100 sources with one connection each, each limited to 10 Mbit/s", "cpu", shapers...))
}

func plural(n int, noun string) string {
	if n == 1 {
		return noun
	}
	return noun + "s"
}

func loadsW2(short bool) (list []load) {
	pauses := []time.Duration{100 * time.Millisecond, 800 * time.Millisecond, 5 * time.Second}
	if short {
		pauses = pauses[1:2]
	}
	for _, pause := range pauses {
		l := shaped{rate: 10e6, keys: 1, flows: 4, pause: pause, span: 1500 * time.Millisecond}
		list = append(list, l.load(fmt.Sprintf("10 MB/s, after %v", pause),
			"4 connections of one source that resume after a pause; measured from its end", "w100", shapers[:5]...))
	}
	return list
}

func loadsW3(short bool) (list []load) {
	rates := []int64{1e6, 10e6}
	if short {
		rates = rates[1:]
	}
	for _, rate := range rates {
		l := shaped{rate: rate, keys: 1, flows: 1, idleConns: 49, span: 3 * time.Second}
		list = append(list, l.load(bytesPerSecond(rate)+", 1 busy and 49 idle",
			"one of 50 connections of a source sends; where the rate cannot be shared, it has all of it", "error", shapers[:5]...))
	}
	return list
}
