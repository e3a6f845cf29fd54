package convert

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A haTable is a stick table of addresses.
type haTable struct {
	statement *haStatement
	stores    map[string]time.Duration // what it counts, with the period of a rate
	ipv6      bool
}

// stickTable returns a table by the name of its proxy, or of the section without one, or why it cannot be converted.
func (h *haproxy) stickTable(s *haSection, name string) (t haTable, why string) {
	if name != "" {
		i := slices.IndexFunc(h.sections, func(s *haSection) bool { return s.kind != "defaults" && s.kind != "global" && s.name == name })
		if i < 0 {
			return t, fmt.Sprintf("there is no table %q", name)
		}
		s = h.sections[i]
	}
	found := s.all("stick-table")
	if len(found) == 0 {
		return t, "there is no stick-table"
	}
	st := found[0]
	st.used = true
	t.statement, t.stores = st, map[string]time.Duration{}
	for i := 1; i+1 < len(st.words); i += 2 {
		switch value := st.words[i+1]; st.words[i] {
		case "type":
			t.ipv6 = value == "ipv6"
			if value != "ip" && !t.ipv6 {
				return t, fmt.Sprintf("its table has the type %s, not ip", value)
			}
		case "store":
			for counter := range strings.SplitSeq(value, ",") {
				name, period, _ := strings.Cut(strings.TrimSuffix(counter, ")"), "(")
				t.stores[name] = 1 // a counter without a period
				if period != "" {
					d, ok := haTime(period)
					if !ok {
						return t, fmt.Sprintf("%q is not a time", period)
					}
					t.stores[name] = d
				}
			}
		}
	}
	return t, ""
}

// sourceLimits converts the rules of a frontend that count the connections of sources, in their order.
// At most so many connections are in flight, or any number for 0.
func (h *haproxy) sourceLimits(listen *table, s *haSection, inFlight int) {
	tracked := map[string]haTable{} // by the number of the counter
	var exempt []string
	blocked := "" // why the rules that follow cannot be converted
	for _, st := range s.statements {
		if !st.starts("tcp-request", "connection") && !st.starts("tcp-request", "session") || len(st.words) < 3 {
			continue
		}
		st.used = true
		why := blocked
		action, rest := st.words[2], st.words[3:]
		counter, isTrack := strings.CutPrefix(action, "track-sc")
		switch {
		case why != "":
		case isTrack:
			why = h.track(s, tracked, counter, rest)
		case action == "accept":
			var sources []string
			if sources, why = haSources(s, rest); why != "" {
				blocked = fmt.Sprintf("line %d accepts connections before it, which shaperd would count", st.line)
			}
			exempt = append(exempt, sources...)
		case action == "reject":
			why = h.reject(listen, s, st, rest, tracked, exempt, inFlight)
		default:
			why = "only track-sc, accept and reject are converted"
		}
		if why != "" {
			h.leaveOut(st.line, st.text(), "%s", why)
		}
	}
}

func (h *haproxy) track(s *haSection, tracked map[string]haTable, counter string, rest []string) (why string) {
	name := ""
	switch {
	case len(rest) == 1:
	case len(rest) == 3 && rest[1] == "table":
		name = rest[2]
	default:
		return "only track-sc0 src, with a table or without, is converted"
	}
	if rest[0] != "src" {
		return "only src can be tracked"
	}
	if _, again := tracked[counter]; again {
		return "it is tracked already"
	}
	t, why := h.stickTable(s, name)
	if why == "" {
		tracked[counter] = t
	}
	return why
}

// haCondition resolves "if { EXPRESSION }" or "if NAME" to the words of the expression.
func haCondition(s *haSection, rest []string) (words []string, why string) {
	const unsupported = "only a single condition after if is converted"
	if len(rest) < 2 || rest[0] != "if" {
		return nil, unsupported
	}
	if rest[1] == "{" {
		if rest[len(rest)-1] != "}" || slices.Contains(rest[2:len(rest)-1], "}") {
			return nil, unsupported
		}
		return rest[2 : len(rest)-1], ""
	}
	if len(rest) != 2 {
		return nil, unsupported
	}
	acls := s.all("acl", rest[1])
	if len(acls) != 1 {
		return nil, unsupported
	}
	acls[0].used = true
	return acls[0].words[2:], ""
}

// haSources returns the addresses of a condition "src ADDRESS...".
func haSources(s *haSection, rest []string) (sources []string, why string) {
	words, why := haCondition(s, rest)
	if why != "" {
		return nil, why
	}
	if len(words) < 2 || words[0] != "src" {
		return nil, "only the condition src ADDRESS... is converted"
	}
	for _, w := range words[1:] {
		p, err := netip.ParsePrefix(w)
		if a, errAddr := netip.ParseAddr(w); errAddr == nil && a.Zone() == "" {
			p, err = netip.PrefixFrom(a, a.BitLen()), nil
		}
		if err != nil {
			return nil, fmt.Sprintf("%q is not an address", w)
		}
		sources = append(sources, p.Masked().String())
	}
	return sources, ""
}

// A haCount is what a limit of sources counts.
type haCount struct {
	table   *haStatement
	counter string
	most    int
	exempt  string
}

var haCounter = regexp.MustCompile(`^(?:sc([0-9]+)_|sc_|src_)(conn_cur|conn_rate)(?:\(([^()]*)\))?$`)

// reject converts a rule that refuses the connections of sources with too many.
func (h *haproxy) reject(listen *table, s *haSection, st *haStatement, rest []string, tracked map[string]haTable, exempt []string, inFlight int) (why string) {
	words, why := haCondition(s, rest)
	if why != "" {
		return why
	}
	var m []string
	if len(words) == 3 {
		m = haCounter.FindStringSubmatch(words[0])
	}
	if m == nil {
		return "only conditions such as sc0_conn_cur gt 20 and src_conn_rate gt 50 are converted"
	}
	number := m[1]
	if strings.HasPrefix(words[0], "sc_") {
		number = m[3]
	}
	if strings.HasPrefix(words[0], "src_") {
		if m[3] != "" || len(tracked) != 1 {
			return "use the counter of a rule track-sc"
		}
		for number = range tracked {
		}
	}
	table, ok := tracked[number]
	if !ok {
		return "no earlier rule tracks src by this counter"
	}
	period, stored := table.stores[m[2]]
	if !stored {
		return "the table does not store " + m[2]
	}
	most, err := strconv.Atoi(words[2])
	if words[1] == "ge" {
		most--
	} else if words[1] != "gt" {
		return "only gt and ge are converted"
	}
	if err != nil || most < 1 || most > 1<<20 {
		return "not a number of connections from 1 to 1048576"
	}
	if m[2] == "conn_cur" && inFlight > 0 && most >= inFlight {
		return fmt.Sprintf("HAProxy counts connections that wait for a server too; shaperd counts those in flight, of which there are at most %d. Sources take turns, so those of one that waits with many delay no other", inFlight)
	}
	name := "-per-source"
	if m[2] == "conn_rate" {
		name = "-new-per-source"
		if period%time.Second != 0 {
			return "its period is not in seconds"
		}
	}
	of := haCount{table.statement, m[2], most, strings.Join(exempt, " ")}
	if t := h.limited[of]; t != nil { // the frontends count in the same table
		t.addListen(listen.name)
		return ""
	}
	if slices.ContainsFunc(h.counts, func(c haCount) bool { return c.table == of.table && c.counter == of.counter }) {
		return "another rule counts in the same table, with another number or other exceptions"
	}
	t := h.add("limit", listen.name+name, st.line, st.text())
	h.limited[of], h.counts = t, append(h.counts, of)
	t.match(listen.name, s.line, s.kind+" "+s.name)
	if len(exempt) > 0 {
		t.implied("except", "{ source = "+quoteList(exempt)+" }", "rules before it accept these")
	}
	t.set("key", `"source"`, st.line, "src")
	t.ipv6Prefix(table.ipv6)
	condition := strings.Join(words, " ")
	if m[2] == "conn_cur" {
		t.set("max_connections", strconv.Itoa(most), st.line, condition+"; HAProxy also counts those that wait for a server")
	} else {
		t.set("new_connections", quote(fmt.Sprintf("%d/%ds", most, period/time.Second)), st.line, condition+"; HAProxy also counts those it refuses")
		t.implied("algorithm", `"sliding-window"`, "HAProxy weighs two periods in the same way")
	}
	t.implied("queue_timeout", `"0s"`, "reject refuses at once")
	return ""
}
