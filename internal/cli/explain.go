package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/explain"
	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/internal/term"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

func explainCommand(e env) *cobra.Command {
	var file, at string
	var ask explain.Request
	cmd := &cobra.Command{
		Use:   "explain --source IP --to tcp|udp/[IP:]PORT [--listener NAME | --attach NAME [--destination IP] [--dscp D] [--mark M]]",
		Short: "Explain which limits apply to a connection, their state, and the bottleneck",
		Long: `Explain which limits apply to a connection from a source, their buckets, and which limit
is the bottleneck. With --attach, explain the same for packets at an attachment. The
running daemon adds the state of each bucket, and the time until the next unit may leave.
If several listeners accept the port, name the listener, or the address that the client
connects to. With --config, explain a configuration file; this needs no daemon.`,
		Example: `  shaperd explain --source 192.0.2.7 --to tcp/5432
  shaperd explain --source 192.0.2.7 --to tcp/203.0.113.1:5432
  shaperd explain --config shaperd.toml --source 192.0.2.7 --to tcp/5432
  shaperd explain --attach plant --source 10.1.2.3 --destination 10.40.0.7 --to tcp/502`,
		Annotations: jsonAnnotations,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			q, err := explain.Parse(ask)
			if err != nil {
				return usageFromQuestion(err)
			}
			if file == "" && at != "" {
				return usageError{errors.New("--at requires --config: a running daemon explains the present time only")}
			}
			if file == "" {
				return explainFromDaemon(cmd.Context(), e, *q, ask)
			}
			if e.flags.json {
				return usageError{errors.New("explain does not support --json with --config")}
			}
			l, err := plan.Load(file)
			if err != nil {
				return err
			}
			moment, err := parseMoment(at, time.Now())
			if err != nil {
				return usageError{fmt.Errorf("--at: %w", err)}
			}
			if l, err = l.At(moment); err != nil {
				return err
			}
			p, err := l.Compile(shaper.New(1))
			if err != nil {
				return err
			}
			return explainFromConfig(e, l.Config, p, *q)
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "explain this configuration `file`, not the running daemon")
	cmd.Flags().StringVar(&at, "at", "", "with --config, explain the schedules at this `time`, such as 22:30 (today) or 2026-12-24T22:30")
	cmd.Flags().StringVar(&ask.Source, "source", "", "`address` of the client")
	cmd.Flags().StringVar(&ask.To, "to", "", "destination `protocol/port`, such as tcp/5432 or tcp/192.0.2.1:5432; at attachments also icmp")
	cmd.Flags().StringVar(&ask.Listener, "listener", "", "`name` of the listener, if several accept the port")
	cmd.Flags().StringVar(&ask.Attach, "attach", "", "`name` of an attachment: explain packets there")
	cmd.Flags().StringVar(&ask.Destination, "destination", "", "destination `address` of packets at the attachment")
	cmd.Flags().StringVar(&ask.Downstream, "downstream", "", "`name` of the downstream, as in \"downstreams\", if the listener has several")
	cmd.Flags().StringVar(&ask.Cgroup, "cgroup", "", "`path` of the control group of a local sender, such as /system.slice/x.service")
	cmd.Flags().StringVar(&ask.TLV, "tlv", "", "`type=value` in the PROXY header of the connection, such as 0xE0=tenant-7")
	cmd.Flags().StringVar(&ask.DSCP, "dscp", "", "`DSCP` of packets at the attachment, such as ef or 46 (default 0)")
	cmd.Flags().StringVar(&ask.Mark, "mark", "", "`mark` of packets at the attachment, such as 0x10 (default 0)")
	return cmd
}

// parseMoment parses a time of today, or of a day, by the clock of this host; or one with a time zone as in RFC 3339. "" is now.
func parseMoment(text string, now time.Time) (time.Time, error) {
	if text == "" {
		return now, nil
	}
	if t, err := time.Parse("15:04", text); err == nil {
		return time.Date(now.Year(), now.Month(), now.Day(), t.Hour(), t.Minute(), 0, 0, now.Location()), nil
	}
	for _, layout := range []string{"2006-01-02T15:04", "2006-01-02 15:04"} {
		if t, err := time.ParseInLocation(layout, text, now.Location()); err == nil {
			return t, nil
		}
	}
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return t, fmt.Errorf("%q: write a time such as 22:30, 2026-12-24T22:30 or 2026-12-24T22:30:00+01:00", text)
	}
	return t, nil
}

// usageFromQuestion turns an error in a question into a usageError.
func usageFromQuestion(err error) error {
	var question explain.QuestionError
	if errors.As(err, &question) {
		return usageError{err}
	}
	return err
}

// explainFromConfig explains q by a configuration, and prints the answer.
func explainFromConfig(e env, c *config.Config, p *shaper.Policy, q explain.Question) error {
	x, err := q.Answer(c, p)
	if err != nil {
		return usageFromQuestion(err)
	}
	where := fmt.Sprintf("listener %q", x.Listener)
	if a := x.Attach; a != nil {
		where = fmt.Sprintf("attachment %q, %v of %s, mode %v", a.Name, a.Direction, strings.Join(a.Interfaces, ", "), a.EffectiveMode())
	}
	fmt.Fprintf(e.stdout, "%v to %s: %s", x.Source, x.To, where)
	switch {
	case x.ASN != 0:
		fmt.Fprintf(e.stdout, ", %s", asnLabel(x.ASN, x.ASName))
	case len(c.ASN.Files) > 0:
		fmt.Fprint(e.stdout, ", unknown AS")
	}
	if x.Country != "" {
		fmt.Fprintf(e.stdout, ", country %s", x.Country)
	}
	fmt.Fprintln(e.stdout)
	if text := classText(x.Class); text != "" {
		fmt.Fprintln(e.stdout, text)
	}
	if text := exemptText(x.Exempt); text != "" {
		fmt.Fprintln(e.stdout, text)
	}
	if len(x.Limits) == 0 {
		fmt.Fprintln(e.stdout, "No limit matches.")
		return nil
	}
	fmt.Fprintln(e.stdout)
	w := tabwriter.NewWriter(e.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "LIMIT\tBUCKET\tDIRECTION\tLIMITS\tMODE")
	for _, l := range x.Limits {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", l.Limit, l.Key, l.Direction, ownSummary(l), l.Mode)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, l := range x.Limits {
		if text := reservedText(&l, x.Class); text != "" {
			fmt.Fprintln(e.stdout, text)
		}
	}
	fmt.Fprintln(e.stdout)
	if x.Attach != nil && x.Attach.Observe {
		fmt.Fprintln(e.stdout, "The attachment observes: nothing is delayed or dropped.")
		return nil
	}
	for _, l := range x.Limits {
		if text := penaltyCountText(l); text != "" {
			fmt.Fprintln(e.stdout, text)
		}
	}
	for _, b := range x.Bottlenecks {
		fmt.Fprintf(e.stdout, "%s: bottleneck is %q.\n", b.Resource, b.Limit)
	}
	return nil
}

// explainFromDaemon asks the running daemon to explain q, and prints the answer.
func explainFromDaemon(ctx context.Context, e env, q explain.Question, ask explain.Request) error {
	x, err := e.client().Explain(ctx, api.ExplainQuery{Source: q.Source, To: q.Target(), Listener: q.Listener, Attach: q.Attach, Destination: q.Destination, DSCP: ask.DSCP, Mark: ask.Mark, Downstream: ask.Downstream, TLV: ask.TLV, Cgroup: ask.Cgroup})
	switch {
	case errors.Is(err, api.ErrNoDaemon):
		return fmt.Errorf("%w; to explain a configuration file, use --config", err)
	case err != nil:
		return err
	}
	shared := func(l api.LimitBucket) bool { return l.Shared != nil }
	var limits []api.Limit
	if !e.flags.json && slices.ContainsFunc(x.Limits, shared) {
		if limits, err = e.client().Limits(ctx); err != nil {
			return err
		}
	}
	return e.show(x, func(p *term.Printer) {
		addHere(x.Limits, limits)
		where := fmt.Sprintf("listener %q", x.Listener)
		if q.Attach != "" {
			where = fmt.Sprintf("attachment %q", x.Attachment)
		}
		p.Line("%v to %s: %s", q.Source, q.DestinationText(), where)
		printExplanation(p, x)
	})
}

// addHere adds to the summaries of buckets what this host may use of limits that hosts share.
func addHere(buckets []api.LimitBucket, limits []api.Limit) {
	for i := range buckets {
		b := &buckets[i]
		at := slices.IndexFunc(limits, func(l api.Limit) bool { return l.Name == b.Limit })
		if at >= 0 && b.Shared != nil {
			l := limits[at]
			l.Shared = b.Shared
			b.Summary += ", here " + hereText(l)
		}
	}
}

// printExplanation prints an explanation without its first line.
func printExplanation(p *term.Printer, x api.Explanation) {
	if as := asnLabel(x.ASN, x.ASName); as != "" {
		p.Line("%s", as)
	}
	if x.Country != "" {
		p.Line("country %s", api.Printable(x.Country))
	}
	if x.Hold != nil {
		p.Line("%s", p.Red(holdText(x.Listener, x.Waiting, x.Hold)))
	}
	if x.Unavailable != "" {
		p.Line("%s", p.Red(unavailableText(x.Listener, x.Unavailable)))
	}
	for _, y := range x.Penalties {
		p.Line("%s", p.Red(explainPenalty(y, time.Now())))
	}
	printFlowQuota(p, x.Flows)
	if text := classText(x.Class); text != "" {
		p.Line("%s", text)
	}
	if text := exemptText(x.Exempt); text != "" {
		p.Line("%s", text)
	}
	switch {
	case len(x.Limits) == 0 && x.Flows != nil && x.Flows.Full != "":
		p.Line("No limit matches.")
	case len(x.Limits) == 0:
		p.Line("No limit matches: traffic passes without delay.")
	default:
		p.Line("%s", verdictText(x))
		for _, l := range x.Limits {
			if l.Shed > 0 {
				p.Line("Limit %q %s %s of new connections: \"shaperd limits %s\" shows the signals.", l.Limit, shedVerb(l.Mode), term.Percent(l.Shed), api.Printable(l.Limit))
			}
		}
		for _, l := range x.Limits {
			if text := penaltyCountText(l); text != "" {
				p.Line("%s", text)
			}
		}
		p.Line("")
		p.Table(bucketsTable(x.Limits))
		for _, l := range x.Limits {
			if text := reservedText(&l, x.Class); text != "" {
				p.Line("%s", text)
			}
		}
		p.Line("")
		for _, b := range x.Bottlenecks {
			p.Line("%s: bottleneck is %q.", b.Resource, b.Limit)
		}
	}
	for _, l := range x.Limits {
		if l.Bucket != nil && l.Bucket.Quota != nil {
			p.Line("%s", quotaText(l.Bucket.Quota))
		}
	}
	if len(x.Connections) > 0 {
		p.Line("")
		p.Table(connectionsTable(x.Connections))
	}
}

// classText says which class a connection has, or is "" without classes.
func classText(c *api.Class) string {
	if c == nil {
		return ""
	}
	return fmt.Sprintf("Class %q: weight %d, priority %d.", api.Printable(c.Name), c.Weight, c.Priority)
}

// reservedText says what a limit reserves for the class of a connection, or is "".
func reservedText(l *api.LimitBucket, c *api.Class) string {
	var parts []string
	if l.Reserved > 0 {
		parts = append(parts, fmt.Sprintf("%d slots", l.Reserved))
	}
	if l.ReservedRate > 0 {
		parts = append(parts, fmt.Sprintf("%d%% of its rate", l.ReservedRate))
	}
	if parts == nil {
		return ""
	}
	name := shaper.DefaultClass
	if c != nil {
		name = c.Name
	}
	return fmt.Sprintf("Limit %q reserves %s for class %q.", api.Printable(l.Limit), strings.Join(parts, " and "), api.Printable(name))
}

// exemptText says which limits except a source, or is "".
func exemptText(limits []string) string {
	var names []string
	for _, name := range limits {
		names = append(names, strconv.Quote(name))
	}
	if len(names) == 0 {
		return ""
	}
	return "Excepted from limit " + api.Printable(strings.Join(names, ", ")) + "."
}

// ownSummary is the summary of l, with a note if it has values of the source.
func ownSummary(l api.LimitBucket) string {
	if l.OwnValues {
		return l.Summary + " (of this source)"
	}
	return l.Summary
}

// printFlowQuota prints the number of UDP flows, and whether another one is possible.
func printFlowQuota(p *term.Printer, f *api.FlowQuota) {
	if f == nil {
		return
	}
	of := ""
	if f.MaxSourceFlows > 0 {
		of = fmt.Sprintf(" of %d", f.MaxSourceFlows)
	}
	p.Line("UDP flows: %d%s for this source, %d of %d at the listener.", f.SourceFlows, of, f.Flows, f.MaxFlows)
	switch {
	case f.Full != "":
		p.Line("%s", p.Red(fmt.Sprintf("A new flow would be REFUSED: the quota is exhausted (%s).", f.Full)))
	case f.MaxSourceFlows > 0 && f.SourceFlows >= f.MaxSourceFlows, f.Flows >= f.MaxFlows:
		p.Line("A new flow would evict an idle one.")
	}
}

// verdictText describes what a unit that arrived now would get.
func verdictText(x api.Explanation) string {
	next := 0.0
	var by api.Bucket // bucket of the limit that decides
	waits := "A new connection"
	for _, l := range x.Limits {
		if l.Bucket == nil || l.Mode == shaper.Observe.String() {
			continue
		}
		next = max(next, l.Bucket.NextDeparture)
		if l.Limit == x.By {
			by = *l.Bucket
			if l.SlotFor != "" {
				waits = "The next request of a connection"
			}
		}
	}
	switch {
	case x.Verdict == "pass":
		return "New traffic passes without delay."
	case x.Verdict == "delay" && x.Reason == "connections":
		reserved := ""
		if by.Reserved {
			reserved = ", the free one is reserved for a waiter that needs other limits too"
		}
		here := ""
		if by.Slots > 0 {
			here = fmt.Sprintf(" of %d now", by.Slots)
		}
		text := fmt.Sprintf("%s would wait for a slot of limit %q: %d in use%s%s, %d waiting.", waits, x.By, by.InFlight, here, reserved, by.Waiting)
		if next > 0 {
			text += fmt.Sprintf(" Open connections may send again in %s.", term.Seconds(next))
		}
		return text
	case x.Verdict == "delay":
		return fmt.Sprintf("New traffic would be delayed by %s: limit %q, %s.", term.Seconds(next), x.By, x.Reason)
	}
	return fmt.Sprintf("New traffic would be refused: limit %q, %s.", x.By, x.Reason)
}

func bucketsTable(limits []api.LimitBucket) *term.Table {
	t := term.NewTable("LIMIT", "BUCKET", "DIRECTION", "LIMITS", "MODE", ">BACKLOG", ">QUEUED", ">NEXT IN", ">IN FLIGHT", ">WAITING")
	for _, l := range limits {
		row := []string{api.Printable(l.Limit), api.Printable(l.Key), api.Printable(l.Direction), api.Printable(ownSummary(l)), api.Printable(l.Mode), "-", "-", "-", "-", "-"}
		if b := l.Bucket; b != nil {
			copy(row[5:], []string{backlogText(b), fmt.Sprint(b.Queued), term.Seconds(b.NextDeparture), fmt.Sprint(b.InFlight), fmt.Sprint(b.Waiting)})
		}
		t.Add(row...)
	}
	return t
}
