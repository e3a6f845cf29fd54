package cli

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

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
	"shaperd.dev/shaperd/shaper"
)

func topCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "top",
		Short: "Monitor limits and their traffic interactively",
		Long: `Show limits, and below them the busiest keys of the selected limit, or the top sources,
prefixes or autonomous systems, updated every second. "?" lists the keyboard commands,
"q" quits. While no daemon answers, the last figures stay. If standard output is not a
terminal, prints once and exits.`,
		Example: `  shaperd top
  watch -n 10 'shaperd top | cat'`,
		Args: noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := untilSignal(cmd.Context())
			defer stop()
			c := e.client()
			defer c.KeepAlive()()
			m := &top{ctx: ctx, client: c, color: term.UseColor(e.stdout)}
			m.apply(m.fetch(m.query()))
			if m.err != nil {
				return m.err
			}
			if !term.IsTerminal(e.stdout) || !term.IsTerminal(os.Stdin) {
				_, err := io.WriteString(e.stdout, m.snapshot())
				return err
			}
			// Signals cancel ctx.
			_, err := tea.NewProgram(m, tea.WithContext(ctx), tea.WithoutSignalHandler(), tea.WithOutput(e.stdout)).Run()
			if errors.Is(err, tea.ErrProgramKilled) && ctx.Err() != nil {
				return nil
			}
			return err
		},
	}
}

// topLists are the lists below the limits, in the order of the tab key.
var topLists = []string{"keys", "source", "prefix", "asn"}

// topQuery is what top requests in addition to status and limits.
type topQuery struct {
	list   string // one of topLists
	limit  string // whose keys; "" means the first one
	sort   string
	detail string // source or prefix to show in detail; "" means none
}

// topResult is the result of a query.
type topResult struct {
	query   topQuery
	err     error
	status  api.Status
	limits  []api.Limit
	keys    []api.Key
	talkers []api.Talker
	explain *api.Explanation // of query.detail
}

// topRows is the number of rows that are requested.
const topRows = 100

// fetch sends the requests of a query.
func (m *top) fetch(q topQuery) (a topResult) {
	a.query = q
	if a.status, a.err = m.client.Status(m.ctx); a.err != nil {
		return a
	}
	if a.limits, a.err = m.client.Limits(m.ctx); a.err != nil {
		return a
	}
	if !slices.ContainsFunc(a.limits, func(l api.Limit) bool { return l.Name == q.limit }) {
		q.limit = firstLimit(a.limits)
	}
	switch {
	case q.list != "keys":
		a.talkers, a.err = m.client.Talkers(m.ctx, q.list, q.sort, topRows)
	case q.limit != "":
		a.keys, a.err = m.client.Keys(m.ctx, q.limit, q.sort, topRows)
	}
	if a.err == nil && q.detail != "" {
		a.explain, a.err = m.fetchDetail(q)
	}
	return a
}

// fetchDetail requests the connections of a source, and an explanation of the first one.
func (m *top) fetchDetail(q topQuery) (*api.Explanation, error) {
	of := api.ConnectionQuery{Source: q.detail, Sort: "waited", Top: 20}
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
	x, err := m.client.Explain(m.ctx, api.ExplainQuery{Source: source.Addr(), To: fmt.Sprintf("%s/%d", first.Protocol, first.Port)})
	var said *api.APIError
	if err != nil && !errors.As(err, &said) { // its listener may have been removed
		return nil, err
	}
	x.Connections = all.Connections
	return &x, nil
}

// snapshot returns the output for anything but a terminal.
func (m *top) snapshot() string {
	var b strings.Builder
	for _, line := range m.header() {
		b.WriteString(line + "\n")
	}
	limits, _ := m.limitsTable()
	title, rows, _ := m.listTable()
	b.WriteString("\n" + strings.Join(limits.Lines(), "\n") + "\n\n" + title + "\n")
	b.WriteString(strings.Join(rows.Lines(), "\n") + "\n")
	return b.String()
}

// apply replaces the last result by a. It ignores lists that no longer match the query.
func (m *top) apply(a topResult) {
	if a.err != nil {
		if m.err == nil {
			m.lostAt = time.Now()
		}
		m.err = a.err
		return
	}
	m.err = nil
	m.status, m.limits = a.status, a.limits
	if a.query == m.query() {
		m.keys, m.talkers, m.explain = a.keys, a.talkers, a.explain
	}
	if !slices.ContainsFunc(m.limits, func(l api.Limit) bool { return l.Name == m.limit }) {
		m.limit = firstLimit(m.limits)
	}
	if m.focus == focusList {
		m.move(0) // off a row that is gone
	}
}

// firstLimit returns the limit to select first, or "" when there is none.
func firstLimit(limits []api.Limit) string {
	for _, l := range limits {
		if l.Mode != shaper.Observe.String() && throttlingText(l) != "" {
			return l.Name
		}
	}
	if len(limits) > 0 {
		return limits[0].Name
	}
	return ""
}
