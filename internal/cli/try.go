package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/explain"
	"shaperd.dev/shaperd/internal/term"
	"shaperd.dev/shaperd/shaper"
)

func tryCommand(e env) *cobra.Command {
	t := try{count: 1, wait: 3 * time.Second}
	var to, source string
	cmd := &cobra.Command{
		Use:   "try --to tcp/[IP:]PORT [-n 110] [--for 3s]",
		Short: "Open connections, and show the result of each",
		Long: `Open connections at once, keep them open for --for, and show the results: which ones
reached the downstream and when, which ones wait for a limit, and which ones were refused,
when, and with which reply. The connections are real and count like any others: the
downstream gets those that the limits admit. Nothing is sent on them.

Without access to the control socket of a daemon, the results are only those that a client
sees. The default of IP is 127.0.0.1.`,
		Example: `  shaperd try --to tcp/5432 -n 110
  shaperd try --to tcp/192.0.2.1:5432 -n 30 --for 10s --source 192.0.2.7`,
		Annotations: jsonAnnotations,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			q := explain.Question{Address: netip.AddrFrom4([4]byte{127, 0, 0, 1})}
			if err := q.ParseTo(to); err != nil {
				return usageError{err}
			}
			var err error
			switch {
			case q.Protocol != shaper.TCP:
				return usageError{fmt.Errorf("--to %q: only connections can be tried, such as tcp/5432", to)}
			case t.count < 1 || t.count > maxTries:
				return usageError{fmt.Errorf("-n %d: must be from 1 to %d", t.count, maxTries)}
			case t.wait <= 0 || t.wait > time.Hour:
				return usageError{fmt.Errorf("--for %v: must be more than 0 and 1h at most", t.wait)}
			}
			if source != "" {
				if t.source, err = netip.ParseAddr(source); err != nil {
					return usageError{fmt.Errorf("--source %q: must be an IPv4 or IPv6 address", source)}
				}
			}
			t.to = netip.AddrPortFrom(q.Address, q.Port).String()
			ctx, stop := untilSignal(cmd.Context())
			defer stop()
			results := t.run(ctx, e.client())
			return e.show(results, func(p *term.Printer) {
				table := term.NewTable(">CONNECTIONS", "RESULT", ">AFTER", ">UNTIL")
				for _, r := range results {
					table.Add(strconv.Itoa(r.Connections), api.Printable(r.Result), term.Seconds(r.First), term.Seconds(r.Last))
				}
				p.Table(table)
			})
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "`protocol/port` to connect to, such as tcp/5432 or tcp/192.0.2.1:5432")
	cmd.Flags().IntVarP(&t.count, "number", "n", t.count, "open this `number` of connections")
	cmd.Flags().DurationVar(&t.wait, "for", t.wait, "keep the connections open for this `duration`")
	cmd.Flags().StringVar(&source, "source", "", "connect from this `address` of the host")
	return cmd
}

// maxTries is how many connections are tried at most.
const maxTries = 5000

type try struct {
	to     string // address and port
	source netip.Addr
	count  int
	wait   time.Duration
}

// tryResult is what some connections got alike.
type tryResult struct {
	Result      string  `json:"result"`
	Connections int     `json:"connections"`
	First       float64 `json:"first_seconds"` // after the beginning, the first of them got it
	Last        float64 `json:"last_seconds"`
}

// attempt is a connection, and what became of it.
type attempt struct {
	mu     sync.Mutex
	local  string
	result string // "" as long as it is open
	said   string // by the server
	after  time.Duration

	seen    api.Connection // as the daemon has it
	reached time.Duration  // when it was first seen on its way to a downstream, 0 if it was not
}

// run opens the connections, and returns what they got, the earliest first.
func (t *try) run(ctx context.Context, c *api.Client) []tryResult {
	ctx, cancel := context.WithTimeout(ctx, t.wait)
	defer cancel()
	begun := time.Now()
	all := make([]attempt, t.count)
	var ended sync.WaitGroup
	for i := range all {
		ended.Go(func() { t.connect(ctx, &all[i], begun) })
	}
	for ctx.Err() == nil {
		if found, err := c.Connections(ctx, api.ConnectionQuery{Source: source(all), Top: 10_000}); err == nil {
			bySource := map[string]api.Connection{}
			for _, one := range found.Connections {
				bySource[one.Source] = one
			}
			for i := range all {
				all[i].look(bySource, time.Since(begun))
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	ended.Wait()
	alike := map[string]*tryResult{}
	for i := range all {
		result, at := all[i].summary(time.Since(begun))
		r := alike[result]
		if r == nil {
			r = &tryResult{Result: result, First: at.Seconds()}
			alike[result] = r
		}
		r.Connections++
		r.First, r.Last = min(r.First, at.Seconds()), max(r.Last, at.Seconds())
	}
	results := []tryResult{}
	for _, r := range alike {
		results = append(results, *r)
	}
	slices.SortFunc(results, func(a, b tryResult) int {
		return cmp.Or(cmp.Compare(a.First, b.First), cmp.Compare(a.Result, b.Result))
	})
	return results
}

// source returns the address that the connections are from, "" before any is open.
func source(all []attempt) string {
	for i := range all {
		all[i].mu.Lock()
		local, err := netip.ParseAddrPort(all[i].local)
		all[i].mu.Unlock()
		if err == nil {
			return local.Addr().String()
		}
	}
	return ""
}

// connect opens a connection and reads from it until it ends, or ctx.
func (t *try) connect(ctx context.Context, a *attempt, begun time.Time) {
	var d net.Dialer
	if t.source.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(t.source, 0))
	}
	c, err := d.DialContext(ctx, "tcp", t.to)
	if err != nil {
		a.end(ctx, err, begun)
		return
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.SetReadDeadline(time.Now()) })()
	local := c.LocalAddr().(*net.TCPAddr).AddrPort()
	a.mu.Lock()
	a.local = netip.AddrPortFrom(local.Addr().Unmap(), local.Port()).String()
	a.mu.Unlock()
	b := make([]byte, 4096)
	for {
		n, err := c.Read(b)
		a.mu.Lock()
		if a.said == "" && n > 0 {
			line, _, _ := bytes.Cut(b[:min(n, 60)], []byte("\n"))
			a.said = string(bytes.TrimSpace(line))
		}
		a.mu.Unlock()
		if err != nil {
			a.end(ctx, err, begun)
			return
		}
	}
}

// end records why a connection ended. One that is open when ctx is over has no result.
func (a *attempt) end(ctx context.Context, err error, begun time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.after = time.Since(begun)
	var op *net.OpError
	isDial := errors.As(err, &op) && op.Op == "dial"
	switch {
	case ctx.Err() != nil && isDial:
		a.result = "not accepted yet"
	case ctx.Err() != nil:
	case isDial:
		a.result = "not accepted: " + op.Err.Error()
	case errors.Is(err, unix.ECONNRESET):
		a.result = "reset"
	default:
		a.result = "closed"
	}
}

// look records where the connection is.
func (a *attempt) look(bySource map[string]api.Connection, now time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	one, ok := bySource[a.local]
	if !ok {
		return
	}
	a.seen = one
	if a.reached == 0 && (one.Stage == "open" || one.Stage == "closing") {
		a.reached = now
	}
}

// summary returns what the connection got in words, and when.
func (a *attempt) summary(end time.Duration) (string, time.Duration) {
	said := ""
	if a.said != "" {
		said = fmt.Sprintf(", reply %q", a.said)
	}
	switch {
	case a.result != "":
		return a.result + said, a.after
	case a.reached > 0:
		return "passed to " + a.seen.Downstream + said, a.reached
	case a.seen.ThrottledBy == "downstream":
		return "waits for the downstream", end
	case a.seen.Stage == "connecting":
		return "connects to " + a.seen.Downstream, end
	case a.seen.ThrottledBy != "":
		return fmt.Sprintf("waits for limit %q", a.seen.ThrottledBy), end
	case a.seen.Stage != "":
		return "waits", end
	}
	return "open" + said, end
}
