package cli

import (
	"context"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	tea "charm.land/bubbletea/v2"

	"shaperd.dev/shaperd/api"
)

// topFocus is the part of the screen that handles keys.
type topFocus int

const (
	focusLimits topFocus = iota
	focusList            // the list below the limits
	focusDetail          // the detail of a row, instead of both
	focusHelp
)

// top is the state of the verb top. It is used by one goroutine.
type top struct {
	ctx    context.Context
	client *api.Client
	color  bool

	// The last results.
	status  api.Status
	limits  []api.Limit
	keys    []api.Key
	talkers []api.Talker
	explain *api.Explanation
	err     error     // of the last request
	lostAt  time.Time // when requests began to fail

	fetching, refetch bool // a request is running; another one follows it

	width, height int
	focus         topFocus
	limit         string    // selected
	list          int       // index in topLists
	row           string    // selected in the list
	sort          string    // "" means unsorted limits, and "delayed" for the list
	filter        [2]string // of limits, of the list
	typing        bool      // in the filter
	scroll        int       // of the detail
}

// query returns the query for the current selection.
func (m *top) query() topQuery {
	q := topQuery{list: topLists[m.list], sort: m.sort}
	if q.sort == "" {
		q.sort = "delayed"
	}
	if q.list == "keys" {
		q.limit = m.limit
	}
	if m.focus == focusDetail {
		q.detail = m.source()
	}
	return q
}

// source returns the source or prefix of the selected row, or "" when it has none.
func (m *top) source() string {
	switch topLists[m.list] {
	case "keys":
		for _, k := range m.keys {
			if k.Key == m.row {
				return k.Source
			}
		}
	case "source", "prefix":
		return m.row
	}
	return ""
}

// topTick is the message that starts the next request.
type topTick struct{}

func nextTick() tea.Cmd { return tea.Tick(time.Second, func(time.Time) tea.Msg { return topTick{} }) }

func (m *top) Init() tea.Cmd { return nextTick() }

// refresh starts a request, or schedules one after the running request.
func (m *top) refresh() tea.Cmd {
	if m.fetching {
		m.refetch = true
		return nil
	}
	m.fetching = true
	q := m.query()
	return func() tea.Msg { return m.fetch(q) }
}

func (m *top) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case topTick:
		if m.fetching {
			return m, nextTick()
		}
		return m, tea.Batch(m.refresh(), nextTick())
	case topResult:
		m.fetching = false
		m.apply(msg)
		if m.refetch {
			m.refetch = false
			return m, m.refresh()
		}
	case tea.KeyPressMsg:
		before := m.query()
		if m.typing {
			m.editFilter(msg)
		} else if m.pressKey(msg.String()) {
			return m, tea.Quit
		}
		if m.query() != before {
			return m, m.refresh()
		}
	}
	return m, nil
}

// editFilter handles a key while the filter is edited.
func (m *top) editFilter(key tea.KeyPressMsg) {
	text := &m.filter[m.focus]
	switch key.String() {
	case "enter":
		m.typing = false
	case "esc", "ctrl+c":
		*text, m.typing = "", false
	case "backspace":
		_, n := utf8.DecodeLastRuneInString(*text)
		*text = (*text)[:len(*text)-n]
	default:
		*text += api.Printable(key.Text)
	}
	m.move(0)
}

// pressKey handles all other keys, and reports whether to quit.
func (m *top) pressKey(key string) (quit bool) {
	switch key {
	case "q", "ctrl+c":
		return true
	case "?":
		m.focus = focusHelp
	case "esc", "left", "h":
		m.back()
	case "enter", "right", "l":
		m.enter()
	case "tab", "shift+tab":
		step := map[string]int{"tab": 1, "shift+tab": len(topLists) - 1}[key]
		m.list, m.row, m.filter[focusList] = (m.list+step)%len(topLists), "", ""
		m.focus = min(m.focus, focusList)
		m.keys, m.talkers, m.explain = nil, nil, nil
	case "/":
		m.typing = m.focus <= focusList
	case "up", "k":
		m.move(-1)
	case "down", "j":
		m.move(1)
	case "pgup":
		m.move(-10)
	case "pgdown", "space":
		m.move(10)
	case "home", "g":
		m.move(-1 << 20)
	case "end", "G":
		m.move(1 << 20)
	case "d", "x", "r", "c":
		m.sort = map[string]string{"d": "delayed", "x": "dropped", "r": "rate"}[key]
	}
	return false
}

func (m *top) back() {
	switch {
	case m.focus > focusList:
		m.focus, m.explain = focusList, nil
	case m.filter[m.focus] != "":
		m.filter[m.focus] = ""
	default:
		m.focus = focusLimits
	}
}

func (m *top) enter() {
	switch m.focus {
	case focusLimits:
		m.focus = focusList
		m.move(0)
	case focusList:
		if m.row != "" {
			m.focus, m.scroll = focusDetail, 0
		}
	}
}

// move moves the selection. When the selected row is gone, it selects the first one first.
func (m *top) move(by int) {
	switch m.focus {
	case focusLimits:
		_, names := m.limitsTable()
		if was := m.limit; len(names) > 0 {
			if m.limit = names[shiftSelection(names, was, by)]; m.limit != was && topLists[m.list] == "keys" {
				m.keys, m.row = nil, ""
			}
		}
	case focusList:
		_, _, names := m.listTable()
		if m.row = ""; len(names) > 0 {
			m.row = names[shiftSelection(names, m.row, by)]
		}
	case focusDetail:
		m.scroll = max(0, m.scroll+by)
	}
}

func shiftSelection(names []string, from string, by int) int {
	return min(max(0, max(0, slices.Index(names, from))+by), len(names)-1)
}

// matchesFilter reports whether a row matches a filter.
func matchesFilter(filter string, texts ...string) bool {
	return strings.Contains(strings.ToLower(strings.Join(texts, " ")), strings.ToLower(filter))
}
