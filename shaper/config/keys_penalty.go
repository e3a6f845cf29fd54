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
		doc: "Name of the limit whose refusals count. It must apply to TCP connections at listeners and to nothing else, set " +
			"`max_connections` or `new_connections`, and have `\"source\"` in `key`, so that no other source can cause the " +
			"refusals. It cannot be `shared`, or count turns (`slot_for`). Its `ipv4_prefix` and `ipv6_prefix` define a source.",
	},
	{
		name: "after", typ: quantityType("count per second, minute or hour, or per several of them", "100/min", `^[0-9]+ ?/[0-9]*(s|min|h)$`, parseRefusals, showFrequency), required: true,
		field: fieldOf(func(y *Penalty) *shaper.Frequency { return &y.After }),
		doc: "Number of refused TCP connections of a source after which it is blocked, and the period in which they count. " +
			"The period begins with the first refusal, and is at most an hour.",
	},
	{
		name: "block", typ: durationType(shaper.MinPenaltyBlock, shaper.MaxPenaltyBlock), def: `"10m"`,
		field: fieldOf(func(y *Penalty) *time.Duration { return &y.Block }),
		doc:   "Duration of the first block, at all listeners. Open connections of the source continue.",
	},
	{
		name: "factor", typ: integerType(1, shaper.MaxPenaltyFactor), def: "2",
		field: fieldOf(func(y *Penalty) *int { return &y.Factor }),
		doc:   "Factor by which each further block of a source is longer than the previous one.",
	},
	{
		name: "most", typ: durationType(shaper.MinPenaltyBlock, shaper.MaxPenaltyBlock), def: `"24h"`,
		field: fieldOf(func(y *Penalty) *time.Duration { return &y.Most }),
		doc: "Maximum duration of a block. If a source is not blocked again for this long, its next block lasts `block` " +
			"again.",
	},
	{
		name: "except", typ: tableType(sourcesKeys(func(y *Penalty) *shaper.Sources { return &y.Except })), defText: "none",
		shown: when(func(y *Penalty) bool { return y.Except.Any() }),
		doc:   "Exempt sources, which are neither counted nor blocked. A source is exempt if any of these keys matches it.",
	},
	{
		name: "observe", typ: booleanType, def: "false",
		field: fieldOf(func(y *Penalty) *bool { return &y.Observe }),
		doc: "A dry run: count, and report the sources that the penalty would block. If the limit itself observes, it " +
			"refuses nothing, and its penalty blocks nothing.",
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
		key, must := "most", "must not be shorter than block"
		if !t.has(key) {
			key, must = "block", "must not be longer than most"
		}
		t.errorf(key, "%s: block is %s, most is %s", must, FormatDuration(y.Block), FormatDuration(y.Most))
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
