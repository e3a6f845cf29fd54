package config

import (
	"fmt"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// Penalty is the penalty of a limit.
type Penalty struct {
	Limit string // its name
	shaper.Penalty
}

var penaltyKeys = keys{
	{
		name: "limit", typ: stringType("name of a limit", "per-source", ""), required: true,
		field: fieldOf(func(y *Penalty) *string { return &y.Limit }),
		text:  noText,
		doc: "Name of the limit whose refusals count: one of listeners, for TCP, with `max_connections` or `new_connections`, and " +
			"`\"source\"` in `key`, so that nobody else can have a source refused. Its `ipv4_prefix` and `ipv6_prefix` say what is one source.",
	},
	{
		name: "after", typ: quantityType("count a second, minute, hour, or several of these", "100/min", `^[0-9]+ ?/[0-9]*(s|min|h)$`, parseRefusals, showFrequency), required: true,
		field: fieldOf(func(y *Penalty) *shaper.Frequency { return &y.After }),
		doc: "Refused TCP connections of a source, in a period that begins with the first of them, after which it is blocked. The " +
			"period is an hour at most.",
	},
	{
		name: "block", typ: durationType(shaper.MinPenaltyBlock, shaper.MaxPenaltyBlock), def: `"10m"`,
		field: fieldOf(func(y *Penalty) *time.Duration { return &y.Block }),
		doc:   "For how long a source is blocked, at all listeners. Its open connections go on.",
	},
	{
		name: "factor", typ: integerType(1, shaper.MaxPenaltyFactor), def: "2",
		field: fieldOf(func(y *Penalty) *int { return &y.Factor }),
		doc:   "How many times longer than the one before each further block of a source is.",
	},
	{
		name: "most", typ: durationType(shaper.MinPenaltyBlock, shaper.MaxPenaltyBlock), def: `"24h"`,
		field: fieldOf(func(y *Penalty) *time.Duration { return &y.Most }),
		doc:   "Longest block. After that long without a further one, a source begins at `block` again.",
	},
	{
		name: "except", typ: tableType(sourcesKeys(func(y *Penalty) *shaper.Sources { return &y.Except })), defText: "none",
		shown: when(func(y *Penalty) bool { return y.Except.Any() }),
		doc:   "Sources that are neither counted nor blocked: those of any of these.",
	},
	{
		name: "observe", typ: booleanType, def: "false",
		field: fieldOf(func(y *Penalty) *bool { return &y.Observe }),
		doc: "A dry run: count, and say whom the penalty would block. While the limit itself only observes, it refuses nothing, " +
			"and its penalty blocks nobody.",
	},
}

// parseRefusals parses the number of refusals in a period.
func parseRefusals(s string) (shaper.Frequency, error) {
	f, err := parseConnectionFrequency(s)
	switch {
	case err != nil:
	case f.N > shaper.MaxPenaltyRefusals:
		err = fmt.Errorf("%s is above %d", quote(s), shaper.MaxPenaltyRefusals)
	case f.Per > shaper.MaxPenaltyPeriod:
		err = fmt.Errorf("%s: the period must be at most %s", quote(s), FormatDuration(shaper.MaxPenaltyPeriod))
	}
	return f, err
}

// penalty decodes one penalty.
func (l *loader) penalty(t table) {
	y := l.newPenalty
	elems := t.decode(&y)
	if y.Block > y.Most && (t.has("block") || t.has("most")) {
		key := "most"
		if !t.has(key) {
			key = "block"
		}
		t.errorf(key, "block is %s, and most, the longest, %s", FormatDuration(y.Block), FormatDuration(y.Most))
	}
	for _, name := range located(y.Except.Group, elems["except.group"]) {
		l.named = append(l.named, place{-1, "group", name})
	}
	if len(y.Except.ASN) > 0 {
		l.penaltyASNs = append(l.penaltyASNs, t.at.child("except").child("asn"))
	}
	l.c.Penalties = append(l.c.Penalties, y)
	l.penalties = append(l.penalties, t)
}

// checkPenalties gives limits their penalties, and reports those that cannot have one. names are those of the limits.
func (l *loader) checkPenalties(names []string) {
	first := map[string]table{}
	for i, t := range l.penalties {
		y := &l.c.Penalties[i]
		if !t.has("limit") {
			continue
		}
		if f, taken := first[y.Limit]; taken {
			at := f.at.child("limit")
			t.errorf("limit", "duplicate: %s has a penalty at %s:%d", quote(y.Limit), at.file.name, at.line())
			continue
		}
		first[y.Limit] = t
		l.checkKnown([]item[string]{{y.Limit, t.at.child("limit")}}, "limit", "limit", names)
		for j := range l.c.Limits {
			if limit := &l.c.Limits[j]; limit.Name == y.Limit {
				limit.Penalty = &y.Penalty
				if why := limit.PenaltyConflict(l.c.Listen); why != "" {
					t.errorf("limit", "%s %s", quote(y.Limit), why)
				}
			}
		}
	}
	for _, at := range l.penaltyASNs {
		if len(l.asnFiles) == 0 {
			l.add(at, "asn: missing [asn] files")
		}
	}
}
