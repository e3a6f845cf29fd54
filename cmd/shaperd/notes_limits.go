package main

import (
	"fmt"
	"slices"

	"shaperd/shaper"
	"shaperd/shaper/config"
)

// crossing returns a note for each pair of limits of listeners that cross: one may hold up
// what is not under it.
func (l *loaded) crossing() (notes []string) {
	p, err := shaper.New(1).Compile(l.config.Limits, l.config.Listeners(), l.config.Attachments(), nil, l.observe)
	if err != nil {
		return nil // it has been told
	}
	for a, b := range p.Crossing() {
		notes = append(notes, fmt.Sprintf("limits %q and %q cross: what waits for %q holds up the rest of its bucket of %q; "+
			"have one be narrower than the other in key and match, or have them match different traffic", a.Name, b.Name, b.Name, a.Name))
	}
	return notes
}

// sharedSlots returns a note for each cap that TCP connections and UDP flows count against: flows
// cannot wait, so connections that do keep them out.
func (l *loaded) sharedSlots() (notes []string) {
	const cost = "counts TCP connections and UDP flows together, and no new flow is let in while connections wait"
	for _, limit := range l.config.Limits {
		m := &limit.Match
		if limit.Connections > 0 && !limit.OfAttachments() && m.Protocol == shaper.AnyProtocol && slices.ContainsFunc(l.config.Listen, func(listen config.Listen) bool {
			return both(&listen) && (len(m.Listen) == 0 || slices.Contains(m.Listen, listen.Name))
		}) {
			notes = append(notes, fmt.Sprintf("limit %q %s: give each a limit of its own by match.protocol", limit.Name, cost))
		}
	}
	for _, listen := range l.config.Listen {
		if both(&listen) && slices.ContainsFunc(listen.Downstream, func(d config.Downstream) bool { return d.Connections > 0 }) {
			notes = append(notes, fmt.Sprintf("listener %q: a cap of its downstream %s: give each a listener of its own", listen.Name, cost))
		}
	}
	return notes
}

// both reports whether a listener takes TCP and UDP.
func both(l *config.Listen) bool {
	tcp := func(a config.Address) bool { return a.Protocol == shaper.TCP }
	return slices.ContainsFunc(l.Addresses, tcp) && slices.ContainsFunc(l.Addresses, func(a config.Address) bool { return !tcp(a) })
}
