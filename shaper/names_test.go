package shaper

import (
	"fmt"
	"testing"
)

// Numbers run out: new names share the last one, and the others keep theirs.
func TestNames_RunOut(t *testing.T) {
	n := names{byName: map[string]uint16{}}
	for i := range maxNames + 3 {
		name := fmt.Sprint(i)
		id := n.id(name)
		want, wantName := uint16(i+1), name
		if i >= maxNames {
			want, wantName = otherNames, "others"
		}
		if id != want || n.id(name) != want || n.name(id) != wantName {
			t.Fatalf("%s has the number %d, named %q, want %d, %q", name, id, n.name(id), want, wantName)
		}
	}
	if n.id("0") != 1 || n.find("unknown") != 0 || n.name(0) != "none" {
		t.Errorf("%d, %d, %q", n.id("0"), n.find("unknown"), n.name(0))
	}
}
