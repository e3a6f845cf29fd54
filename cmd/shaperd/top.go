package main

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/spf13/cobra"

	"shaperd/control"
)

func topCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "top",
		Short: "Watch limits and who is under them",
		Long: `Watch limits, and below them the heaviest keys of the one that is selected, or the
heaviest sources, prefixes or autonomous systems, renewed each second. "?" tells the
keys, q ends it. When the daemon goes away, the last figures stay, and it goes on when
one is back. Off a terminal it prints once.`,
		Example: `  shaperd top
  watch -n 10 'shaperd top | cat'`,
		Args: noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := untilSignal(cmd.Context())
			defer stop()
			c := e.daemon()
			defer c.Keep()()
			m := &top{ctx: ctx, client: c, colour: inColour(e.stdout)}
			m.take(m.fetch(m.question()))
			if m.err != nil {
				return m.err
			}
			if !isTerminal(e.stdout) || !isTerminal(os.Stdin) {
				_, err := io.WriteString(e.stdout, m.snapshot())
				return err
			}
			// Signals end ctx.
			_, err := tea.NewProgram(m, tea.WithContext(ctx), tea.WithoutSignalHandler(), tea.WithOutput(e.stdout)).Run()
			if errors.Is(err, tea.ErrProgramKilled) && ctx.Err() != nil {
				return nil
			}
			return err
		},
	}
}

// The lists below the limits, in the order of the tab key.
var topLists = []string{"keys", "source", "prefix", "asn"}

// topQuestion is what top asks the daemon beside how it is doing.
type topQuestion struct {
	list   string // of topLists
	limit  string // whose keys, "" is the first
	sort   string
	detail string // the source or prefix to tell more about, "" is none
}

// topAnswer is what the daemon says to a question.
type topAnswer struct {
	question topQuestion
	err      error
	status   control.Status
	limits   []control.Limit
	keys     []control.Key
	who      []control.Who
	explain  *control.Explanation // of the detail
}

// topRows is how many keys are asked for.
const topRows = 100

// fetch asks the daemon.
func (m *top) fetch(q topQuestion) (a topAnswer) {
	a.question = q
	if a.status, a.err = m.client.Status(m.ctx); a.err != nil {
		return a
	}
	if a.limits, a.err = m.client.Limits(m.ctx); a.err != nil {
		return a
	}
	if !slices.ContainsFunc(a.limits, func(l control.Limit) bool { return l.Name == q.limit }) {
		q.limit = firstLimit(a.limits)
	}
	switch {
	case q.list != "keys":
		a.who, a.err = m.client.Who(m.ctx, q.list, q.sort, topRows)
	case q.limit != "":
		a.keys, a.err = m.client.Keys(m.ctx, q.limit, q.sort, topRows)
	}
	if a.err == nil && q.detail != "" {
		a.explain, a.err = m.fetchDetail(q)
	}
	return a
}

// fetchDetail asks about the connections of a source, and what the first of them meets.
func (m *top) fetchDetail(q topQuestion) (*control.Explanation, error) {
	of := control.ConnectionQuery{Source: q.detail, Sort: "waited", Top: 20}
	if q.list == "keys" {
		of.Limit = q.limit
	}
	all, err := m.client.Connections(m.ctx, of)
	if err != nil || len(all.Connections) == 0 {
		return nil, err
	}
	first := all.Connections[0]
	source, err := netip.ParseAddrPort(first.Source)
	if err != nil {
		return nil, fmt.Errorf("connection %d: %w", first.ID, err)
	}
	x, err := m.client.Explain(m.ctx, control.ExplainQuery{Source: source.Addr(), To: fmt.Sprintf("%s/%d", first.Protocol, first.Port)})
	var said *control.APIError
	if err != nil && !errors.As(err, &said) { // its listener may be gone
		return nil, err
	}
	x.Connections = all.Connections
	return &x, nil
}

// snapshot is what top shows off a terminal.
func (m *top) snapshot() string {
	var b strings.Builder
	for _, line := range m.header() {
		b.WriteString(line + "\n")
	}
	limits, _ := m.limitsTable()
	title, rows, _ := m.listTable()
	b.WriteString("\n" + strings.Join(limits.lines(), "\n") + "\n\n" + title + "\n")
	b.WriteString(strings.Join(rows.lines(), "\n") + "\n")
	return b.String()
}

// take puts an answer in place of the last one. What was asked for meanwhile is kept.
func (m *top) take(a topAnswer) {
	if a.err != nil {
		if m.err == nil {
			m.lost = time.Now()
		}
		m.err = a.err
		return
	}
	m.err = nil
	m.status, m.limits = a.status, a.limits
	if a.question == m.question() {
		m.keys, m.who, m.explain = a.keys, a.who, a.explain
	}
	if !slices.ContainsFunc(m.limits, func(l control.Limit) bool { return l.Name == m.limit }) {
		m.limit = firstLimit(m.limits)
	}
	if m.focus == onList {
		m.move(0) // away from a row that is gone
	}
}

// firstLimit is the one to look at first, "" when there is none.
func firstLimit(limits []control.Limit) string {
	for _, l := range limits {
		if l.Mode != "observe" && slows(l) != "" {
			return l.Name
		}
	}
	if len(limits) > 0 {
		return limits[0].Name
	}
	return ""
}
