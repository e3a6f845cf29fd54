package config

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"shaperd.dev/shaperd/shaper"
)

// reserveKey and turnsKey are keys of a limit that say how those that wait for a bucket take turns.
var reserveKey = key{
	name: "reserve", typ: namedValuesType("critical", percentType), defText: "none",
	needs: []condition{anyOf("max_connections", "rate", "packets"), atListeners("unsupported at attachments, where nothing waits for a slot"), notPerConnection},
	field: field{get: func(record any) any { return record.(*shaper.Limit).Reserve }},
	shown: when(func(l *shaper.Limit) bool { return len(l.Reserve) > 0 }),
	text:  on(reserveText),
	doc: "Parts of `max_connections`, `rate` and `packets` that are reserved for classes, as in `reserve = { critical = " +
		"\"20%\" }`; at most 100% in total. Other classes borrow a part while nothing of its class waits. A class that " +
		"has something to send gets at least its part of the rates, from the next unit on. Its part of the slots is " +
		"rounded down. When a connection of the class waits, the class gets the next slots that are freed until it has " +
		"its part, before classes of a higher priority. The class also has this part of `max_queue`, and of the " +
		"datagrams that may wait. `default` is the class of traffic that no class matches. Cannot be combined with " +
		"`shared`, `adapt`, or a rate with `scheduling = \"fifo\"`.",
}

var turnsKey = key{
	name: "turns", typ: arrayType(`string such as "prefix24"`, valueType{enumNames: turnNames()}, parseTurn, asText), defText: "`[\"source\"]`",
	needs: []condition{
		atListeners("unsupported at attachments, where nothing takes turns"), notPerConnection,
		needs("", "has no effect with scheduling = \"fifo\"", func(l *shaper.Limit, _ isSet) bool { return l.Scheduling != shaper.ScheduleFIFO }),
		needs("", "has no effect with \"source\" in key: a bucket is of one /24 of IPv4 or /48 of IPv6, or less", func(l *shaper.Limit, _ isSet) bool {
			return l.Key&shaper.KeySource == 0 || l.IPv4Prefix < 24 || l.IPv6Prefix < 48
		}),
	},
	perHost:  true,
	field:    fieldOf(func(l *shaper.Limit) *[]shaper.TurnBy { return &l.Turns }),
	ifEmpty:  ": remove the key for turns by source",
	omitZero: true,
	doc: "Levels at which members take turns for one bucket, from the widest to the narrowest. The last level is " +
		"`\"source\"`. With `[\"asn\", \"prefix24\", \"source\"]`, ASes take turns; within an AS, its prefixes (/24 of " +
		"IPv4, /48 of IPv6); within a prefix, its sources. So all addresses of a prefix together get as much as a " +
		"single address elsewhere. `\"asn\"` needs `[asn]` files; addresses that are in none of them count as one AS. " +
		"The weight of a class applies at the first level.",
}

func turnNames() (names []string) {
	for by := range shaper.TurnBy(shaper.MaxTurns) {
		names = append(names, by.String())
	}
	return names
}

func parseTurn(s string) (shaper.TurnBy, error) {
	i := slices.Index(turnNames(), s)
	if i < 0 {
		return 0, errors.New(unknownValue(s, turnNames(), valueSynonyms["turns"]))
	}
	return shaper.TurnBy(i), nil
}

// checkTurns reports levels in a wrong order.
func checkTurns(t table, l *shaper.Limit) {
	n := len(l.Turns)
	if n > 0 && (l.Turns[n-1] != shaper.TurnSource || !slices.IsSortedFunc(l.Turns, func(a, b shaper.TurnBy) int { return int(b) - int(a) })) {
		t.errorf("turns", "must be from the widest to the narrowest, and end with \"source\": \"asn\", \"prefix24\", \"source\", or some of these")
	}
}

func reserveText(l *shaper.Limit) string {
	var all []string
	for _, r := range l.Reserve {
		all = append(all, fmt.Sprintf("%s %d%%", r.Class, r.Percent))
	}
	return strings.Join(all, ", ")
}

// reserve decodes the table reserve of a limit, and reports mistakes in it.
func (l *loader) reserve(t table, limit *shaper.Limit) {
	all, ok := t.values["reserve"].(map[string]any)
	at := t.at.child("reserve")
	switch {
	case !t.has("reserve"):
		return
	case !ok:
		l.add(at, fmt.Sprintf("reserve must be a table, not %s", kind(t.values["reserve"])))
		return
	case len(all) == 0:
		t.errorf("reserve", "must not be empty: name classes in it, as in reserve.critical = \"20%%\"")
	}
	sum := 0
	names := slices.SortedFunc(maps.Keys(all), func(a, b string) int { return at.child(a).offset - at.child(b).offset })
	for _, name := range names {
		percent, err := percentType.parse("reserve", all[name], nil)
		if err != nil {
			l.add(at.child(name), fmt.Sprintf("reserve.%s: %v", name, err))
			continue
		}
		limit.Reserve = append(limit.Reserve, shaper.Reserve{Class: name, Percent: percent.(int)})
		l.reserved = append(l.reserved, item[string]{name, at.child(name)})
		sum += percent.(int)
	}
	switch {
	case sum > 100:
		t.errorf("reserve", "%d%% in all: must be at most 100%%", sum)
	case limit.Shared:
		t.errorf("reserve", "unsupported with shared = true: hosts lend each other parts regardless of classes")
	case limit.Adapt != shaper.AdaptOff:
		t.errorf("reserve", "unsupported with adapt, whose maximum varies")
	case limit.HasRate() && limit.Scheduling == shaper.ScheduleFIFO:
		t.errorf("reserve", "unsupported with scheduling = \"fifo\", where all leave in order of arrival")
	case limit.MaxConnections > 0 && (limit.QueueTimeout == 0 || limit.MaxQueue == 0) && !limit.InPacketPlane():
		t.errorf("reserve", "has no effect without max_queue and queue_timeout: only a waiting connection reclaims a lent slot")
	}
	checkReserved(t, limit)
}

// checkReserved reports a part of max_connections, which t may set, that is no slot.
func checkReserved(t table, limit *shaper.Limit) {
	if class, percent := limit.Unreserved(); class != "" {
		t.errorf("max_connections", "%d: the %d%% reserved for class %s is less than one slot", limit.MaxConnections, percent, quote(class))
	}
}
