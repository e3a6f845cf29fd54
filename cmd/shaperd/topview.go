package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"shaperd/control"
)

func reverse(s string) string { return "\x1b[7m" + ansi.Strip(s) + "\x1b[0m" }

func (m *top) View() tea.View {
	v := tea.NewView(strings.Join(m.screen(), "\n"))
	v.AltScreen = true
	return v
}

// screen is at most m.height lines, none wider than m.width.
func (m *top) screen() []string {
	lines := m.header()
	left := m.height - 1 - len(lines) // above the last line
	switch m.focus {
	case onHelp:
		lines = append(lines, topHelp...)
	case onDetail:
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

// header says how the daemon is doing.
func (m *top) header() []string {
	p := page{colour: m.colour}
	s := &m.status
	promise := "promise kept"
	if s.Promise != "kept" {
		promise = p.red("promise BROKEN in the last minute")
	}
	state := ""
	if s.State != "running" {
		state = ", " + s.State
	}
	lines := []string{fmt.Sprintf("shaperd: %s, refuses %s, mode %s%s, %s", promise, often(m.refused()), s.Mode, state, clock(s.Now, time.Now()))}
	if m.err != nil {
		lines = []string{p.red(fmt.Sprintf("no answer since %s: %v", m.lost.Format("15:04:05"), m.err))}
	}
	if names := unserved(*s); len(names) > 0 {
		lines = append(lines, reverse(" NOBODY IS SERVED at "+strings.Join(names, ", ")+" "))
	}
	if s.Bypass != nil {
		lines = append(lines, reverse(" "+bypassText(*s)+" "))
	}
	if s.Unsaved != "" {
		lines = append(lines, reverse(" "+unsavedText(*s)+" "))
	}
	var open, flows int64
	var to, from float64
	for _, l := range s.Listeners {
		open, flows, to, from = open+l.Open, flows+l.Flows, to+l.ToDownstreamRate, from+l.FromDownstreamRate
	}
	return append(lines, fmt.Sprintf("%s, %s, to downstreams %s, from them %s, cpu %s, %s",
		plural(open, "connection"), plural(flows, "flow"), rate(to), rate(from), percent(s.Process.CPURate), size(s.Process.Memory)))
}

// refused is how much limits that enforce refuse a second.
func (m *top) refused() (sum float64) {
	for _, l := range m.limits {
		if l.Mode != "observe" {
			sum += total(l.RefusedRate)
		}
	}
	return sum
}

// tables is the limits and the list below, in at most height lines.
func (m *top) tables(height int) []string {
	limits, names := m.limitsTable()
	title, rows, keys := m.listTable()
	// Half of what is left for rows is the limits', if they have as many.
	share := min(len(limits.rows), max(1, (height-5)/2))
	lines := append([]string{""}, m.rows(limits, names, m.limit, onLimits, share+1)...)
	lines = append(lines, "", title)
	return append(lines, m.rows(rows, keys, m.row, onList, height-len(lines))...)
}

// rows is the head of t and the rows around the selected one, in at most height lines.
func (m *top) rows(t *table, names []string, selected string, focus topFocus, height int) []string {
	lines := t.lines()
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

// limitsTable is the limits that pass the filter, sorted, and their names.
func (m *top) limitsTable() (*table, []string) {
	limits := slices.DeleteFunc(slices.Clone(m.limits), func(l control.Limit) bool { return !shows(m.filter[onLimits], l.Name) })
	weight := map[string]func(control.Limit) float64{
		"delayed": func(l control.Limit) float64 { return l.DelayedShare },
		"dropped": func(l control.Limit) float64 { return total(l.RefusedRate) },
		"rate":    func(l control.Limit) float64 { return l.Bytes.S10 },
	}[m.sort]
	if weight != nil {
		slices.SortStableFunc(limits, func(a, b control.Limit) int { return cmp.Compare(weight(b), weight(a)) })
	}
	t := newTable("LIMIT", ">PASSES", ">DELAYED", ">P99", ">IN", ">WAIT", ">REFUSED", "PROMISE", "HELD TO")
	var names []string
	p := page{colour: m.colour}
	for _, l := range limits {
		promise := p.kept(l.Promise)
		if l.Mode == "observe" {
			promise = "observes"
		}
		t.add(ansi.Truncate(l.Name, 24, "…"), passes(l), percent(l.DelayedShare), seconds(l.QueueDelay.P99), fmt.Sprint(l.InFlight), fmt.Sprint(l.Waiting),
			often(total(l.RefusedRate)), promise, held(l))
		names = append(names, l.Name)
	}
	return t, names
}

// listTable is what is below the limits, and the names of its rows.
func (m *top) listTable() (title string, t *table, names []string) {
	list := topLists[m.list]
	sort := m.question().sort
	if list != "keys" {
		who := slices.DeleteFunc(slices.Clone(m.who), func(w control.Who) bool { return !shows(m.filter[onList], w.Name, w.ASName) })
		for _, w := range who {
			names = append(names, w.Name)
		}
		return fmt.Sprintf("%s, by %s", map[string]string{"source": "sources", "prefix": "prefixes", "asn": "autonomous systems"}[list], sort), whoTable(list, who), names
	}
	keys := slices.DeleteFunc(slices.Clone(m.keys), func(k control.Key) bool { return !shows(m.filter[onList], k.Key, k.ASName) })
	for _, k := range keys {
		names = append(names, k.Key)
	}
	return fmt.Sprintf("keys of %s, by %s", m.limit, sort), keysTable(keys), names
}

// detail is what is known of the selected row, scrolled, in at most height lines.
func (m *top) detail(height int) []string {
	p := &page{colour: m.colour}
	p.line("")
	_, rows, names := m.listTable()
	if i := slices.Index(names, m.row); i >= 0 {
		rows.rows = rows.rows[i : i+1]
		p.table(rows)
	} else {
		p.line("%s weighs nothing now.", printable(m.row))
	}
	p.line("")
	switch {
	case m.explain != nil:
		p.explanation(*m.explain)
	case m.source() == "":
		p.line("There is no one source to tell more of.")
	case m.asking:
		p.line("...")
	default:
		p.line("It has no connection.")
	}
	lines := strings.Split(strings.TrimRight(p.String(), "\n"), "\n")
	m.scroll = max(0, min(m.scroll, len(lines)-height))
	return lines[m.scroll:]
}

func (m *top) footer() string {
	switch {
	case m.typing:
		return "filter: " + m.filter[m.focus] + "_"
	case m.focus == onHelp, m.focus == onDetail:
		return "esc back  q quit"
	case m.filter[m.focus] != "":
		return fmt.Sprintf("only %q  esc all  ? help  q quit", m.filter[m.focus])
	}
	return "enter more  tab keys, sources, ASs  / filter  d x r sort  ? help  q quit"
}

var topHelp = []string{
	"",
	"up, down, j, k    select a limit, or a row below",
	"enter, esc        go to the rows below, to the detail of a row, and back",
	"tab               keys of the limit, sources, prefixes, autonomous systems",
	"d, x, r, c        sort by what is delayed, refused (dropped), by rate, not at all",
	"/                 show only what has a text in it",
	"q                 quit",
	"",
	"Rates are of the last 10 s. Keys and sources weigh the last minute or so;",
	"\"<=\" is in front of a figure that may be more than a tenth too large.",
}
