package main

import (
	"fmt"

	"shaperd/shaper"
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
