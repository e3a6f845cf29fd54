package main

import (
	"fmt"
	"net"
	"slices"
	"strings"

	"shaperd/bpf"
	"shaperd/shaper"
)

// notes returns what is not wrong with a configuration, but hardly meant.
func (l *loaded) notes() (notes []string) {
	for _, a := range l.config.Attach {
		if !slices.ContainsFunc(l.config.Limits, func(l shaper.Limit) bool { return slices.Contains(l.Match.Attach, a.Name) }) {
			notes = append(notes, fmt.Sprintf("attachment %q: no limit names it in match.attach: nothing is held to anything there", a.Name))
		}
	}
	return notes
}

// notesHere returns what keeps this host from running a configuration as it is meant.
func (l *loaded) notesHere() (notes []string) {
	if l.shapes() {
		if err := bpf.ProbeShape(); err != nil {
			notes = append(notes, fmt.Sprintf("here \"run\" would fail: %v", err))
		}
	}
	return append(notes, l.missingInterfaces()...)
}

// missingInterfaces returns a note for each interface that is named and is not here.
func (l *loaded) missingInterfaces() (notes []string) {
	for _, a := range l.config.Attach {
		for _, name := range a.Interfaces {
			if strings.ContainsAny(name, `*?[\`) {
				continue
			}
			if _, err := net.InterfaceByName(name); err != nil {
				notes = append(notes, fmt.Sprintf("attachment %q: here is no interface %s yet", a.Name, name))
			}
		}
	}
	return notes
}
