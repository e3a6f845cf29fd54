package main

import "time"

// What happens in a run, and when. The measurement begins at 0, the work warmUp before.
const (
	warmUp = 2 * time.Second
	visit  = 2 * time.Second // the hot spot stays at a gateway so long

	killAt    = 11 * time.Second // the store dies
	restartAt = 14 * time.Second // and comes back empty
	cutAt     = 19 * time.Second // one gateway is cut off
	mendAt    = 25 * time.Second
	cutOff    = 2 // this one, which the hot spot visits meanwhile
)

// A phase is a part of a run with figures of its own.
type phase struct {
	name       string
	start, end time.Duration
}

var phases = [...]phase{
	{"undisturbed", 0, 10 * time.Second},
	{"store killed", 10 * time.Second, 18 * time.Second},
	{"a gateway cut off", 18 * time.Second, 26 * time.Second},
}

// hotAt returns the gateway that has the hot spot at a time.
func hotAt(t time.Duration) int { return int((t+warmUp)/visit) % gateways }

// moves returns when the hot spot moves in a phase.
func (p phase) moves() (list []time.Duration) {
	for t := -warmUp; t < p.end; t += visit {
		if t >= p.start {
			list = append(list, t)
		}
	}
	return list
}
