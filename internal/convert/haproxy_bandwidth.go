package convert

import (
	"fmt"
	"slices"
	"time"
)

// bandwidth converts the filters bwlim-in and bwlim-out of a section for a listener.
func (h *haproxy) bandwidth(listen *table, section, frontend *haSection) {
	for _, st := range section.all("filter") {
		if len(st.words) < 3 || st.words[1] != "bwlim-in" && st.words[1] != "bwlim-out" {
			continue
		}
		st.used = true
		if t := h.limited[st]; t != nil {
			t.addListen(listen.name)
			continue
		}
		filter := haFilter{name: st.words[2], st: st, direction: "to-downstream"}
		if st.words[1] == "bwlim-out" {
			filter.direction = "from-downstream"
		}
		if why := h.readFilter(&filter, section); why != "" {
			h.leaveOut(st.line, st.text(), "%s", why)
			continue
		}
		t := h.add("limit", filter.name, st.line, st.text())
		h.limited[st] = t
		t.match(listen.name, frontend.line, frontend.kind+" "+frontend.name)
		t.set("key", quote(filter.key), st.line, "per stream")
		if filter.key == "source" {
			t.keys[len(t.keys)-1].comment = fmt.Sprintf("line %d: key src", st.line)
			t.ipv6Prefix(filter.ipv6)
		}
		if filter.direction != "to-downstream" {
			t.set("direction", quote(filter.direction), st.line, st.words[1])
		}
		t.set("rate", bytesIn(filter.bytes, filter.period), st.line, fmt.Sprintf("%d bytes in %v; HAProxy may pass them at once, and add burst = %q to allow that", filter.bytes, filter.period, fmt.Sprint(filter.bytes, "B")))
	}
}

// A haFilter is a limit of bandwidth.
type haFilter struct {
	name, key, direction string
	st                   *haStatement
	bytes                uint64
	period               time.Duration
	ipv6                 bool
}

// readFilter reads the options of a filter, and the action that uses it. It returns why the filter cannot be converted.
func (h *haproxy) readFilter(f *haFilter, section *haSection) (why string) {
	f.key = "connection"
	words := f.st.words[3:]
	// The action may replace the default values.
	var action *haStatement
	for _, kind := range []string{"tcp-request", "tcp-response"} {
		for _, st := range section.all(kind, "content", "set-bandwidth-limit", f.name) {
			if action != nil {
				return "several actions use it"
			}
			action = st
		}
	}
	switch {
	case action == nil:
		return "no action set-bandwidth-limit uses it, so it limits nothing"
	case slices.Contains(action.words, "if") || slices.Contains(action.words, "unless"):
		action.used = true
		return fmt.Sprintf("line %d uses it under a condition", action.line)
	}
	action.used = true
	words = slices.Concat(words, action.words[4:])
	tableName := ""
	for i := 0; i+1 < len(words); i += 2 {
		option, value := words[i], words[i+1]
		ok := true
		switch option {
		case "default-limit", "limit":
			f.bytes, ok = scaled(value, sizes)
		case "default-period", "period":
			f.period, ok = haTime(value)
		case "key":
			ok = value == "src"
			f.key = "source"
		case "table":
			tableName = value
		case "min-size":
			h.leaveOut(f.st.line, "min-size "+value, "shaperd moves units of its own size")
		default:
			ok = false
		}
		if !ok {
			return fmt.Sprintf("%q is not supported", option+" "+value)
		}
	}
	if len(words)%2 != 0 || f.bytes == 0 {
		return "it has no limit that is a number"
	}
	if f.key != "source" {
		if f.period == 0 {
			return "it has no period"
		}
		return ""
	}
	counter := map[string]string{"to-downstream": "bytes_in_rate", "from-downstream": "bytes_out_rate"}[f.direction]
	table, why := h.stickTable(section, tableName)
	if why != "" {
		return why
	}
	f.ipv6 = table.ipv6
	if f.period = table.stores[counter]; f.period == 0 {
		return fmt.Sprintf("its table does not store %s", counter)
	}
	return ""
}

// ipv6Prefix sets the prefix of a source where the other program counts each IPv6 address.
func (t *table) ipv6Prefix(ipv6 bool) {
	if ipv6 {
		t.implied("ipv6_prefix", "128", "each address counts; 64 is the prefix of one site")
	}
}
