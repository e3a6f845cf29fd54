package shaper

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper/asn"
)

// naiveClass compares every field of every class with the flow.
func (w *world) naiveClass(classes []TrafficClass, table *asn.Table, f *Flow, unverified bool) int {
	listener, _ := w.originNames(f)
	for c := range classes {
		m := &classes[c].Match
		number := table.Lookup(f.Source)
		switch bySource := len(m.Source)+len(m.ASN)+len(m.Group) > 0; {
		case int(f.Origin) > len(w.listeners),
			len(m.Listen) > 0 && !slices.Contains(m.Listen, listener),
			m.Protocol != AnyProtocol && m.Protocol != f.Protocol,
			len(m.Port) > 0 && !slices.ContainsFunc(m.Port, func(r PortRange) bool { return r.First <= f.Port && f.Port <= r.Last }),
			bySource && unverified,
			len(m.Source) > 0 && !slices.ContainsFunc(m.Source, func(p netip.Prefix) bool { return p.Contains(f.Source) }),
			len(m.ASN) > 0 && !slices.Contains(m.ASN, number),
			len(m.Group) > 0 && !w.inGroups(m.Group, f.Source, number):
			continue
		}
		return c
	}
	return len(classes)
}

func (w *world) class(i int) TrafficClass {
	l := w.limit(i)
	c := TrafficClass{Name: fmt.Sprint("class", i), Match: l.Match, Weight: 1 + w.IntN(MaxWeight), Priority: w.IntN(MaxPriority + 1)}
	c.Match.Attach, c.Match.Destination = nil, nil
	if c.Match.Protocol == ICMP {
		c.Match.Protocol = AnyProtocol
	}
	c.Match.Source = slices.DeleteFunc(c.Match.Source, func(p netip.Prefix) bool { return !validSource(p) })
	return c
}

// The class of a flow is the first that matches it, whatever limits match.
func TestClassOf_AgainstNaive(t *testing.T) {
	rnd := testutil.Rand(t)
	policies := 300
	if shortRun() {
		policies = 40
	}
	var found [MaxClasses + 1]int
	bySource := 0
	for range policies {
		w := newWorld(rnd)
		w.addGroups()
		table := w.table(t)
		var classes []TrafficClass
		for i := range w.IntN(MaxClasses + 1) {
			classes = append(classes, w.class(i))
		}
		limits := w.limits(1 + w.IntN(8))
		for i := range limits {
			limits[i].For = nil // groups may have prefixes in common
		}
		p, err := New(100).CompileRules(Rules{Limits: limits, Listeners: w.listeners, Attachments: w.attachments, ASNs: table, Groups: w.groups, Classes: classes})
		if err != nil {
			t.Fatal(err)
		}
		for range 200 {
			f := w.flow()
			if int(f.Origin) > len(w.listeners) {
				continue
			}
			r := p.Route(f)
			for _, unverified := range []bool{false, true} {
				want := w.naiveClass(classes, table, f, unverified)
				if got := p.ClassOf(f, r, unverified); got != want {
					t.Fatalf("flow %+v, unverified %v, is of class %d, want %d of\n%+v\ngroups %+v", *f, unverified, got, want, classes, w.groups)
				}
				found[min(want, MaxClasses)]++
				if want < len(classes) && len(classes[want].Match.Source)+len(classes[want].Match.ASN)+len(classes[want].Match.Group) > 0 {
					bySource++
				}
			}
		}
	}
	if found[0] == 0 || found[1] == 0 || bySource == 0 {
		t.Errorf("the test exercised nothing: flows by class %v, %d by their source", found, bySource)
	}
}

func TestCompileRefusesClasses(t *testing.T) {
	listeners := []Listener{{Name: "db", Addresses: []Address{{Protocol: TCP}}}}
	for key, c := range map[string]TrafficClass{
		"name":         {Name: DefaultClass, Weight: 1},
		"weight":       {Name: "a", Weight: MaxWeight + 1},
		"priority":     {Name: "a", Weight: 1, Priority: -1},
		"match":        {Name: "a", Weight: 1, Match: Match{Attach: []string{"wan"}}},
		"match.listen": {Name: "a", Weight: 1, Match: Match{Listen: []string{"web"}}},
		"match.group":  {Name: "a", Weight: 1, Match: Match{Group: []string{"gold"}}},
		"match.source": {Name: "a", Weight: 1, Match: Match{Source: []netip.Prefix{netip.MustParsePrefix("::ffff:192.0.2.0/120")}}},
		"match.port":   {Name: "a", Weight: 1, Match: Match{Port: []PortRange{{2, 1}}}},
	} {
		_, err := New(1).CompileRules(Rules{Listeners: listeners, Classes: []TrafficClass{{Name: "first", Weight: 1}, c}})
		var at *ClassError
		if !errors.As(err, &at) || at.Key != key || at.Class != 1 {
			t.Errorf("%+v: %v, want an error in %s of class 1", c, err, key)
		}
	}
	if _, err := New(1).CompileRules(Rules{Classes: make([]TrafficClass, MaxClasses+1)}); err == nil {
		t.Error("too many classes compile")
	}
}

// The state of a class belongs to its name.
func TestClassStateOutlivesPolicies(t *testing.T) {
	s := New(1)
	compile := func(names ...string) *Policy {
		var classes []TrafficClass
		for _, name := range names {
			classes = append(classes, TrafficClass{Name: name, Weight: 1})
		}
		p, err := s.CompileRules(Rules{Classes: classes})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	a, b := compile("gold", "silver"), compile("silver")
	if got := b.FindClass(a.ClassState(1)); got != 0 {
		t.Errorf("silver is class %d of the new policy, want 0", got)
	}
	if got := b.FindClass(a.ClassState(0)); b.Class(got).Name != DefaultClass {
		t.Errorf("gold, which is gone, is class %q of the new policy", b.Class(got).Name)
	}
}
