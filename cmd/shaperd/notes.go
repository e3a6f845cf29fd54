package main

import (
	"fmt"
	"net"
	"slices"
	"strings"

	"shaperd/bpf"
	"shaperd/control"
	"shaperd/shaper"
	"shaperd/shaper/config"
)

// notes returns what a configuration may do, but is probably not meant to.
func (l *loaded) notes() (notes []string) {
	for _, a := range l.config.Attach {
		if !slices.ContainsFunc(l.config.Limits, func(l shaper.Limit) bool { return slices.Contains(l.Match.Attach, a.Name) }) {
			notes = append(notes, fmt.Sprintf("attachment %q: no limit names it in match.attach: nothing is held to anything there", a.Name))
		}
	}
	for _, path := range l.files.Ignored() {
		notes = append(notes, fmt.Sprintf("%s is not read: the files of conf.d are named *.toml", path))
	}
	for _, path := range l.old {
		notes = append(notes, fmt.Sprintf("%s has keys of an earlier version, which are read as the current ones: \"shaperd set limit\" with --save replaces them", path))
	}
	for _, e := range []struct{ key, addr string }{{"metrics", l.config.Daemon.Metrics}, {"dashboard", l.config.Daemon.Page}} {
		if e.addr != "" && !control.Loopback(e.addr) {
			notes = append(notes, fmt.Sprintf("[daemon] %s = %q: other hosts can connect, and nobody is asked for a password", e.key, e.addr))
		}
	}
	return slices.Concat(notes, l.silentHolders(), l.crossed())
}

// crossed returns a note for each limit whose buckets do not keep to their rate, because of other
// limits.
func (l *loaded) crossed() (notes []string) {
	p, err := l.compile(shaper.New(1))
	if err != nil {
		return nil // which is an error, and no note
	}
	for i := range p.Crossed().All {
		limit := p.Limit(i)
		if slices.ContainsFunc(l.attach, func(a bpf.Attachment) bool {
			return a.Mode == bpf.Shape && slices.Contains(limit.Match.Attach, a.Name)
		}) {
			notes = append(notes, fmt.Sprintf("limit %q: other limits of its packets hold them differently: what they held back may leave one of its buckets at once, "+
				"up to %v of its rate; a limit without a key keeps to its rate all the same", limit.Name, p.Longest(i).Duration()))
		}
	}
	return notes
}

// silentHolders returns a note for each listener where a cap of connections holds, and no
// timeout ends those of clients that are silent: a few take all slots, for ever.
func (l *loaded) silentHolders() (notes []string) {
	for _, listen := range l.config.Listen {
		tcp := slices.ContainsFunc(listen.Addresses, func(a config.Address) bool { return a.Protocol == shaper.TCP })
		if !tcp || listen.TCPIdleTimeout > 0 || listen.FirstByteTimeout > 0 {
			continue
		}
		caps := ""
		for _, limit := range l.config.Limits {
			m := &limit.Match
			if limit.Connections > 0 && !limit.OfAttachments() && m.Protocol != shaper.UDP && (len(m.Listen) == 0 || slices.Contains(m.Listen, listen.Name)) {
				caps = fmt.Sprintf("limit %q caps connections", limit.Name)
				break
			}
		}
		if slices.ContainsFunc(listen.Downstream, func(d config.Downstream) bool { return d.Connections > 0 }) {
			caps = "a downstream's connections are capped"
		}
		if caps != "" {
			notes = append(notes, fmt.Sprintf("listener %q: %s, and clients that are silent keep their slots for ever: set tcp_idle_timeout or first_byte_timeout", listen.Name, caps))
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
	// Who may not ask is not told: what a configuration says is checked by anybody.
	foreign, _ := bpf.FindForeign(l.config.Daemon.Pins, l.attach)
	for _, f := range foreign {
		notes = append(notes, foreignNote(f)+": "+f.Fix)
	}
	return append(notes, l.missingInterfaces()...)
}

// foreignNote says what is at an interface beside an attachment, and what comes of it.
func foreignNote(f bpf.Foreign) string {
	at := fmt.Sprintf("attachment %q: at %s, %s", f.Attachment, f.Interface, map[bool]string{true: "ingress", false: "egress"}[f.Ingress])
	if f.Refuses {
		return fmt.Sprintf("%s, there is %s: \"run\" attaches nothing beside it", at, f.What)
	}
	return fmt.Sprintf("%s, packets meet %s before the limits: what it takes does not meet them, what it rewrites meets them rewritten", at, f.What)
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
