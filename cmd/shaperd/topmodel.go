package main

import (
	"context"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	tea "charm.land/bubbletea/v2"

	"shaperd/control"
)

// What has the keyboard.
type topFocus int

const (
	onLimits topFocus = iota
	onList            // what is below them
	onDetail          // of a row of the list, in place of both
	onHelp
)

// top is the state of the verb top. The program that runs it calls it from one goroutine.
type top struct {
	ctx    context.Context
	client *control.Client
	colour bool

	// The last answers.
	status  control.Status
	limits  []control.Limit
	keys    []control.Key
	who     []control.Who
	explain *control.Explanation
	err     error     // why there was no answer
	lost    time.Time // since when

	asking, again bool // a question is under way; another one is due when it is answered

	width, height int
	focus         topFocus
	limit         string    // the selected one
	list          int       // of topLists
	row           string    // the selected one of the list
	sort          string    // "" leaves limits as they come, and is "delayed" in the list
	filter        [2]string // of limits, of the list
	typing        bool      // in the filter
	scroll        int       // of the detail
}

// question is what is to be asked now.
func (m *top) question() topQuestion {
	q := topQuestion{list: topLists[m.list], sort: m.sort}
	if q.sort == "" {
		q.sort = "delayed"
	}
	if q.list == "keys" {
		q.limit = m.limit
	}
	if m.focus == onDetail {
		q.detail = m.source()
	}
	return q
}

// source is the source or prefix of the selected row, "" when it has none.
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

// topTick is when to ask again.
type topTick struct{}

func topWait() tea.Cmd { return tea.Tick(time.Second, func(time.Time) tea.Msg { return topTick{} }) }

func (m *top) Init() tea.Cmd { return topWait() }

// ask asks the daemon, or sees to it that it is asked next.
func (m *top) ask() tea.Cmd {
	if m.asking {
		m.again = true
		return nil
	}
	m.asking = true
	q := m.question()
	return func() tea.Msg { return m.fetch(q) }
}

func (m *top) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case topTick:
		if m.asking {
			return m, topWait()
		}
		return m, tea.Batch(m.ask(), topWait())
	case topAnswer:
		m.asking = false
		m.take(msg)
		if m.again {
			m.again = false
			return m, m.ask()
		}
	case tea.KeyPressMsg:
		before := m.question()
		if m.typing {
			m.typeFilter(msg)
		} else if m.press(msg.String()) {
			return m, tea.Quit
		}
		if m.question() != before {
			return m, m.ask()
		}
	}
	return m, nil
}

// typeFilter takes a key that is pressed while the filter is typed.
func (m *top) typeFilter(key tea.KeyPressMsg) {
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
		*text += printable(key.Text)
	}
	m.move(0)
}

// press takes any other key, and reports whether it ends the program.
func (m *top) press(key string) (quit bool) {
	switch key {
	case "q", "ctrl+c":
		return true
	case "?":
		m.focus = onHelp
	case "esc", "left", "h":
		m.back()
	case "enter", "right", "l":
		m.deeper()
	case "tab", "shift+tab":
		step := map[string]int{"tab": 1, "shift+tab": len(topLists) - 1}[key]
		m.list, m.row, m.filter[onList] = (m.list+step)%len(topLists), "", ""
		m.focus = min(m.focus, onList)
		m.keys, m.who, m.explain = nil, nil, nil
	case "/":
		m.typing = m.focus <= onList
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
	case m.focus > onList:
		m.focus, m.explain = onList, nil
	case m.filter[m.focus] != "":
		m.filter[m.focus] = ""
	default:
		m.focus = onLimits
	}
}

func (m *top) deeper() {
	switch m.focus {
	case onLimits:
		m.focus = onList
		m.move(0)
	case onList:
		if m.row != "" {
			m.focus, m.scroll = onDetail, 0
		}
	}
}

// move selects another row, or the nearest when what was selected is gone.
func (m *top) move(by int) {
	switch m.focus {
	case onLimits:
		_, names := m.limitsTable()
		if was := m.limit; len(names) > 0 {
			if m.limit = names[moved(names, was, by)]; m.limit != was && topLists[m.list] == "keys" {
				m.keys, m.row = nil, ""
			}
		}
	case onList:
		_, _, names := m.listTable()
		if m.row = ""; len(names) > 0 {
			m.row = names[moved(names, m.row, by)]
		}
	case onDetail:
		m.scroll = max(0, m.scroll+by)
	}
}

func moved(names []string, from string, by int) int {
	return min(max(0, max(0, slices.Index(names, from))+by), len(names)-1)
}

// shows reports whether a row passes a filter.
func shows(filter string, texts ...string) bool {
	return strings.Contains(strings.ToLower(strings.Join(texts, " ")), strings.ToLower(filter))
}
