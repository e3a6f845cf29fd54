package cli

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
	"shaperd.dev/shaperd/shaper"
)

func reverse(s string) string { return "\x1b[7m" + ansi.Strip(s) + "\x1b[0m" }

func (m *top) View() tea.View {
	v := tea.NewView(strings.Join(m.screen(), "\n"))
	v.AltScreen = true
	return v
}

// screen returns at most m.height lines, none wider than m.width.
func (m *top) screen() []string {
	lines := m.header()
	left := m.height - 1 - len(lines) // without the footer
	switch m.focus {
	case focusHelp:
		lines = append(lines, topHelp...)
	case focusDetail:
		lines = append(lines, m.detail(left)...)
	default:
		lines = append(lines, m.tables(left)...)
	}
	lines = lines[:min(len(lines), max(0, m.height-1))]
	for len(lines) < m.height-1 {
		lines = append(lines, "")
	}
	if m.height > 0 {
		lines = append(lines, m.footer())
	}
	for i, line := range lines {
		lines[i] = ansi.Truncate(line, m.width, "")
	}
	return lines
}

// header returns the lines about the daemon.
func (m *top) header() []string {
	p := term.Printer{Color: m.color}
	s := &m.status
	conformance := "conformance ok"
	if s.Conformance != "conformant" {
		conformance = p.Red("conformance VIOLATED in the last minute")
	}
	state := ""
	if s.State != "running" {
		state = ", " + s.State
	}
	lines := []string{fmt.Sprintf("shaperd: %s, refusing %s, mode %s%s, %s", conformance, term.PerSecond(m.refusedRate()), s.Mode, state, term.Clock(s.Now, time.Now()))}
	if m.err != nil {
		lines = []string{p.Red(fmt.Sprintf("no answer since %s: %v", m.lostAt.Format("15:04:05"), m.err))}
	}
	if names := unavailableListeners(*s); len(names) > 0 {
		lines = append(lines, reverse(" NO DOWNSTREAM IS UP at "+strings.Join(names, ", ")+" "))
	}
	if s.Shared != nil {
		for _, problem := range s.Shared.Problems {
			if problem.Severity == "critical" {
				lines = append(lines, reverse(" "+problemText(problem)+" "))
			}
		}
	}
	if s.Bypass != nil {
		lines = append(lines, reverse(" "+bypassText(*s)+" "))
	}
	if s.StateError != "" {
		lines = append(lines, reverse(" "+unsavedText(*s)+" "))
	}
	var open, flows int64
	var to, from float64
	for _, l := range s.Listeners {
		open, flows, to, from = open+l.Connections, flows+l.Flows, to+l.ToDownstreamRate, from+l.FromDownstreamRate
	}
	return append(lines, fmt.Sprintf("%s, %s, to downstreams %s, from downstreams %s, CPU %s, memory %s",
		term.Plural(open, "connection"), term.Plural(flows, "flow"), term.Rate(to), term.Rate(from), term.Percent(s.Process.CPUCores), term.Size(s.Process.Memory)))
}

// refusedRate returns the refusals per second of all limits that enforce.
func (m *top) refusedRate() (sum float64) {
	for _, l := range m.limits {
		if l.Mode != shaper.Observe.String() {
			sum += sumValues(l.RefusedRate)
		}
	}
	return sum
}

// tables returns the limits and the list below, in at most height lines.
func (m *top) tables(height int) []string {
	limits, names := m.limitsTable()
	title, rows, keys := m.listTable()
	// The limits get at most half of the rows.
	share := min(len(limits.Rows), max(1, (height-5)/2))
	lines := append([]string{""}, m.visibleRows(limits, names, m.limit, focusLimits, share+1)...)
	lines = append(lines, "", title)
	return append(lines, m.visibleRows(rows, keys, m.row, focusList, height-len(lines))...)
}

// visibleRows returns the head of t and the rows around the selected one, in at most height lines.
func (m *top) visibleRows(t *term.Table, names []string, selected string, focus topFocus, height int) []string {
	lines := t.Lines()
	at := slices.Index(names, selected)
	n := max(0, min(len(names), height-1))
	from := max(0, min(at-n/2, len(names)-n))
	out := []string{"  " + lines[0]}
	for i, line := range lines[1:][from : from+n] {
		switch {
		case from+i != at:
			line = "  " + line
		case m.focus == focus:
			line = reverse(fmt.Sprintf("%-*s", m.width, "> "+ansi.Strip(line)))
		default:
			line = "> " + line
		}
		out = append(out, line)
	}
	return out
}

// limitsTable returns the limits that match the filter, sorted, and their names.
func (m *top) limitsTable() (*term.Table, []string) {
	limits := slices.DeleteFunc(slices.Clone(m.limits), func(l api.Limit) bool { return !matchesFilter(m.filter[focusLimits], l.Name) })
	weight := map[string]func(api.Limit) float64{
		"delayed": func(l api.Limit) float64 { return l.DelayedShare },
		"dropped": func(l api.Limit) float64 { return sumValues(l.RefusedRate) },
		"rate":    func(l api.Limit) float64 { return l.Bytes.S10 },
	}[m.sort]
	if weight != nil {
		slices.SortStableFunc(limits, func(a, b api.Limit) int { return cmp.Compare(weight(b), weight(a)) })
	}
	t := term.NewTable("LIMIT", ">PASSES", ">DELAYED", ">P99", ">IN", ">WAIT", ">REFUSED", "CONFORMANCE", "LIMITS")
	var names []string
	p := &term.Printer{Color: m.color}
	for _, l := range limits {
		conformance := conformanceText(p, l.Conformance)
		if l.Mode == shaper.Observe.String() {
			conformance = "observes"
		}
		t.Add(ansi.Truncate(l.Name, 24, "…"), throughput(l), term.Percent(l.DelayedShare), term.Seconds(l.QueueDelay.P99), fmt.Sprint(l.InFlight), fmt.Sprint(l.Waiting),
			term.PerSecond(sumValues(l.RefusedRate)), conformance, effectiveSummary(l))
		names = append(names, l.Name)
	}
	return t, names
}

// listTable returns the list below the limits, and the names of its rows.
func (m *top) listTable() (title string, t *term.Table, names []string) {
	list := topLists[m.list]
	sort := m.query().sort
	if list != "keys" {
		talkers := slices.DeleteFunc(slices.Clone(m.talkers), func(w api.Talker) bool { return !matchesFilter(m.filter[focusList], w.Name, w.ASName) })
		for _, w := range talkers {
			names = append(names, w.Name)
		}
		return fmt.Sprintf("%s, by %s", map[string]string{"source": "sources", "prefix": "prefixes", "asn": "autonomous systems"}[list], sort), talkersTable(list, talkers), names
	}
	keys := slices.DeleteFunc(slices.Clone(m.keys), func(k api.Key) bool { return !matchesFilter(m.filter[focusList], k.Key, k.ASName) })
	for _, k := range keys {
		names = append(names, k.Key)
	}
	return fmt.Sprintf("keys of %s, by %s", m.limit, sort), keysTable(keys), names
}

// detail returns the detail of the selected row, scrolled, in at most height lines.
func (m *top) detail(height int) []string {
	p := &term.Printer{Color: m.color}
	p.Line("")
	_, rows, names := m.listTable()
	if i := slices.Index(names, m.row); i >= 0 {
		rows.Rows = rows.Rows[i : i+1]
		p.Table(rows)
	} else {
		p.Line("%s is no longer in the list.", api.Printable(m.row))
	}
	p.Line("")
	switch {
	case m.explain != nil:
		printExplanation(p, *m.explain)
	case m.source() == "":
		p.Line("The row is not a single source.")
	case m.fetching:
		p.Line("...")
	default:
		p.Line("It has no open connections.")
	}
	lines := strings.Split(strings.TrimRight(p.String(), "\n"), "\n")
	m.scroll = max(0, min(m.scroll, len(lines)-height))
	return lines[m.scroll:]
}

func (m *top) footer() string {
	switch {
	case m.typing:
		return "filter: " + m.filter[m.focus] + "_"
	case m.focus == focusHelp, m.focus == focusDetail:
		return "esc back  q quit"
	case m.filter[m.focus] != "":
		return fmt.Sprintf("filter %q  esc clear  ? help  q quit", m.filter[m.focus])
	}
	return "enter details  tab keys, sources, ASes  / filter  d x r sort  ? help  q quit"
}

var topHelp = []string{
	"",
	"up, down, j, k    select a limit, or a row of the list",
	"enter, esc        go to the list, to the details of a row, and back",
	"tab               keys of the limit, sources, prefixes, autonomous systems",
	"d, x, r, c        sort by delay, drops, rate; do not sort",
	"/                 filter by text",
	"q                 quit",
	"",
	"Rates are of the last 10 s, those of keys and sources of about the last minute.",
	"\"<=\" marks a figure that may be more than 10% too large.",
}
