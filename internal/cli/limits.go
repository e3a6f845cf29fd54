package cli

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
)

func limitsCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "limits [LIMIT]",
		Short: "List limits and their current effect",
		Long: `List all limits, or show one limit in detail: its values, throughput, share of delayed
traffic, delays, waiting connections, refusals by reason, and conformance.`,
		Example: `  shaperd limits
  shaperd limits per-source
  shaperd limits --json | jq '.[] | select(.waiting > 0) | .name'`,
		Annotations:       jsonAnnotations,
		Args:              wantArgs("[LIMIT]"),
		ValidArgsFunction: e.completeLimits,
		RunE: func(cmd *cobra.Command, args []string) error {
			c := e.client()
			if len(args) == 0 {
				limits, err := c.Limits(cmd.Context())
				if err != nil {
					return err
				}
				return e.show(limits, func(p *term.Printer) {
					if len(limits) == 0 {
						p.Line("There are no limits.")
					}
					p.Table(limitsTable(p, limits))
				})
			}
			l, err := c.Limit(cmd.Context(), args[0])
			if err != nil {
				return limitError(cmd.Context(), c, args[0], err)
			}
			return e.show(l, func(p *term.Printer) { printLimit(p, l) })
		},
	}
}

func limitsTable(p *term.Printer, limits []api.Limit) *term.Table {
	t := term.NewTable("LIMIT", "MODE", ">PASSES", ">DELAYED", ">P50", ">P99", ">IN FLIGHT", ">WAITING", ">REFUSED", "CONFORMANCE", "LIMITS")
	for _, l := range limits {
		t.Add(api.Printable(l.Name), api.Printable(l.Mode), throughput(l), term.Percent(l.DelayedShare), term.Seconds(l.QueueDelay.P50), term.Seconds(l.QueueDelay.P99),
			fmt.Sprint(l.InFlight), fmt.Sprint(l.Waiting), term.PerSecond(sumValues(l.RefusedRate)), conformanceText(p, l.Conformance), effectiveSummary(l))
	}
	return t
}

// conformanceText returns the conformance of a limit in one word.
func conformanceText(p *term.Printer, c api.Conformance) string {
	switch {
	case c.Unmonitored:
		return "-"
	case c.Conformant:
		return "ok"
	}
	return p.Red("VIOLATED")
}

// effectiveSummary returns the effective values of a limit, and its overrides.
func effectiveSummary(l api.Limit) string {
	s := api.Printable(l.Summary)
	if l.Block {
		s = "block"
	}
	if l.Shared != nil {
		s += ", here " + hereText(l)
	}
	if l.Adaptive != nil {
		s += ", " + adaptiveText(l.Adaptive)
	}
	if l.Shed != nil && l.Shed.Share > 0 {
		s += ", " + shedVerb(l.Mode) + " " + term.Percent(l.Shed.Share)
	}
	if len(l.Override) > 0 {
		s += " (override: " + formatOverrides(l.Override) + ")"
	}
	return s
}

// adaptiveText formats the result of an adaptive limit: "adapted to 38".
func adaptiveText(a *api.Adaptive) string {
	switch {
	case a.Observed && a.Connections == 0:
		return "would adapt: not enough load so far"
	case a.Observed:
		return fmt.Sprintf("would adapt to %d", a.Connections)
	}
	return fmt.Sprintf("adapted to %d", a.Connections)
}

// printAdaptive prints what an adaptive limit has found out, and how it came there.
func printAdaptive(item func(name, format string, args ...any), l api.Limit) {
	a := l.Adaptive
	text := adaptiveText(a)
	if !a.Observed {
		text += fmt.Sprintf(" (up to %d while limits are compared), from %d to %d", a.Most, a.MinConnections, l.MaxConnections)
	}
	if a.Leader != "" {
		text += fmt.Sprintf(", for all hosts; %s leads the search", api.Printable(a.Leader))
	}
	if len(a.Unheard) > 0 {
		text += fmt.Sprintf("; it does not change until %s answers again, or is forgotten", api.Printable(strings.Join(a.Unheard, ", ")))
	}
	if a.Throughput > 0 {
		text += fmt.Sprintf("; %s answers with as many", term.PerSecond(a.Throughput))
	}
	item("adapt", "%s", text)
	for i, name := len(a.Changes)-1, "changes"; i >= max(0, len(a.Changes)-5); i-- {
		c := a.Changes[i]
		item(name, "%s %d to %d: %s", c.At.Local().Format(time.TimeOnly), c.From, c.To, cmp.Or(api.AdaptiveReasons[c.Reason], api.Printable(c.Reason)))
		name = ""
	}
}

// signalName names a signal: `cpu`, `limit "database"`.
func signalName(s api.ShedSignal) string {
	if s.Limit != "" {
		return fmt.Sprintf("%s %q", api.Printable(s.Name), s.Limit)
	}
	return api.Printable(s.Name)
}

func shedVerb(mode string) string {
	if mode == "observe" {
		return "would shed"
	}
	return "sheds"
}

// printShed prints how much a limit sheds, and what it looks at.
func printShed(p *term.Printer, item func(name, format string, args ...any), l api.Limit) {
	item("shed", "%s %s of new connections", shedVerb(l.Mode), term.Percent(l.Shed.Share))
	for _, s := range l.Shed.Signals {
		show := term.Percent
		if s.Name == "late" {
			show = term.Seconds
		}
		switch text := fmt.Sprintf("%s %s, sheds from %s", signalName(s), show(s.Value), show(s.Above)); {
		case s.Error != "":
			item("", "%s: %s", p.Red("cannot read "+signalName(s)), api.Printable(s.Error))
		case s.Value >= s.Above:
			item("", "%s", p.Red(text))
		default:
			item("", "%s", text)
		}
	}
}

// hereText formats what this host may use of a shared limit: "31% = 24.8Mbit/s".
func hereText(l api.Limit) string {
	var all []string
	if l.Rate > 0 || l.Packets > 0 {
		all = append(all, term.Percent(l.Shared.Share)+" = "+ratesText(l.Rate*l.Shared.Share, l.Packets*l.Shared.Share))
	}
	if l.MaxConnections > 0 {
		all = append(all, fmt.Sprintf("%d connections", l.Shared.Connections))
	}
	if all == nil {
		all = append(all, term.Percent(l.Shared.Share)+" = "+term.PerSecond(l.NewConnections*l.Shared.Share)+" new connections")
	}
	return strings.Join(all, ", ")
}

// scheduledText describes an override with a schedule.
func scheduledText(s api.Scheduled) string {
	text := api.Printable(strings.Join(s.When, ", ") + ": " + formatOverrides(s.Set))
	change := ""
	if s.Changes != nil {
		change = " " + s.Changes.Local().Format("Mon 15:04")
	}
	switch {
	case s.Holds && change != "":
		return text + "; holds until" + change
	case s.Holds:
		return text + "; holds"
	case change != "":
		return text + "; from" + change
	}
	return text
}

func printLimit(p *term.Printer, l api.Limit) {
	item := func(name, format string, args ...any) { p.Line("%-12s %s", name, fmt.Sprintf(format, args...)) }
	item("limit", "%s, in the %s plane, mode %s", api.Printable(l.Name), api.Printable(l.Plane), api.Printable(l.Mode))
	buckets := "one bucket"
	if !l.Single {
		buckets = "one bucket per " + l.Key
	}
	item("limits", "%s; %s", effectiveSummary(l), buckets)
	for _, s := range l.Scheduled {
		item("schedule", "%s", scheduledText(s))
	}
	item("direction", "%s", api.Printable(l.Direction))
	three := func(r api.Rates, write func(float64) string) string {
		return fmt.Sprintf("%s over 1s, %s over 10s, %s over 60s", write(r.S1), write(r.S10), write(r.S60))
	}
	// What a limit does not count is left out: 0 would be wrong.
	paces := l.Rate != 0 || l.Packets != 0
	if paces || l.PacketsTotal != 0 {
		item("passes", "%s; %s in total", three(l.Bytes, term.Rate), term.Size(l.BytesTotal))
		item("packets", "%s; %d in total", three(l.PacketsRate, term.PerSecond), l.PacketsTotal)
	}
	if l.MaxConnections != 0 || l.NewConnections != 0 {
		what := "connections"
		if l.SlotFor != "" {
			what = l.SlotFor + "s"
		}
		item(what, "%s; %d in total; %d in flight, %d waiting", three(l.Admitted, term.PerSecond), l.AdmittedTotal, l.InFlight, l.Waiting)
	}
	if paces {
		delayed := term.Percent(l.DelayedShare) + " of bytes"
		if l.QueueDelay.Count > 0 { // absent when the limit of a listener observes: nothing waits then
			delayed += "; delay: " + percentiles(l.QueueDelay)
		}
		item("delayed", "%s", delayed)
	}
	if l.Adaptive != nil {
		printAdaptive(item, l)
	}
	if y := l.Penalty; y != nil {
		item("penalty", "mode %s: %d blocked, %d would be; %d blocks imposed, %d would have been", api.Printable(y.Mode), y.Blocked, y.WouldBlock, y.Imposed, y.WouldImpose)
	}
	if l.Shed != nil {
		printShed(p, item, l)
	}
	if l.ConnectionWait.Count > 0 {
		item("slot wait", "%s", percentiles(l.ConnectionWait))
	}
	var refused []string
	for _, reason := range slices.Sorted(maps.Keys(l.Refused)) {
		refused = append(refused, fmt.Sprintf("%d %s (%s now)", l.Refused[reason], reason, term.PerSecond(l.RefusedRate[reason])))
	}
	if len(refused) == 0 {
		refused = []string{"none"}
	}
	item("refused", "%s", strings.Join(refused, ", "))
	if l.Conformance.Unmonitored {
		item("conformance", "not monitored: the limit has no rate, or only observes")
		return
	}
	sampled := ""
	if l.Conformance.Sampled {
		sampled = "; monitors one bucket at a time"
	}
	item("conformance", "%s: %s%s", conformanceText(p, l.Conformance), excessText(l.Conformance), sampled)
}

func percentiles(d api.Delay) string {
	return fmt.Sprintf("p50 %s, p99 %s", term.Seconds(d.P50), term.Seconds(d.P99))
}

func keysCommand(e env) *cobra.Command {
	var limit *string
	var top *int
	var sort *enumFlag
	cmd := &cobra.Command{
		Use:   "keys --limit LIMIT",
		Short: "List the busiest buckets of a limit",
		Long: `List the buckets of a limit with the most delay, refusals or bytes of about the last
minute. "<=" marks a figure that may be more than 10% too large.`,
		Example: `  shaperd keys --limit per-source
  shaperd keys --limit per-source --sort dropped --top 5`,
		Annotations: jsonAnnotations,
		Args:        noArgs("; use --limit to name the limit"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if *limit == "" {
				return usageError{fmt.Errorf("keys requires --limit LIMIT")}
			}
			c := e.client()
			keys, by, err := fetchRanked(cmd, sort, func(by string) ([]api.Key, error) {
				return c.Keys(cmd.Context(), *limit, by, *top)
			})
			if err != nil {
				return limitError(cmd.Context(), c, *limit, err)
			}
			return e.show(keys, func(p *term.Printer) {
				if len(keys) == 0 || by != sort.value {
					p.Line("No key of %s was %s in the last minute; %s.", *limit, sortVerbs[sort.value], sortHint(by, sort))
				}
				p.Table(keysTable(keys))
			})
		},
	}
	limit = e.addLimitFlag(cmd, "of the limit")
	sort = addEnumFlag(cmd, "sort", "sort by", "delayed", "dropped", "rate")
	top = addTopFlag(cmd)
	return cmd
}

func keysTable(keys []api.Key) *term.Table {
	t := term.NewTable("KEY", ">RATE", ">WAITED/S", ">REFUSED", ">BACKLOG", ">QUEUED", ">NEXT IN", ">IN FLIGHT", ">WAITING", "AS")
	for _, k := range keys {
		row := []string{api.Printable(k.Key), estimate(k.Rate, term.Rate), estimate(k.Delayed, term.Seconds), estimate(k.Dropped, term.PerSecond), "", "", "", "", "", asnLabel(k.ASN, k.ASName)}
		if b := k.Bucket; b != nil {
			copy(row[4:], []string{backlogText(b), fmt.Sprint(b.Queued), term.Seconds(b.NextDeparture), fmt.Sprint(b.InFlight), fmt.Sprint(b.Waiting)})
		}
		t.Add(row...)
	}
	return t
}

// backlogText formats the backlog of a bucket.
func backlogText(b *api.Bucket) string {
	if b.BacklogBytes == 0 && b.BacklogPackets > 0 {
		return fmt.Sprintf("%d packets", b.BacklogPackets)
	}
	return term.Size(b.BacklogBytes)
}

func talkersCommand(e env) *cobra.Command {
	var top *int
	var by, sort *enumFlag
	cmd := &cobra.Command{
		Use:   "talkers",
		Short: "List the sources with the most delay, refusals or traffic",
		Long: `List the sources, prefixes or autonomous systems with the most delay, refusals or bytes
of about the last minute. "<=" marks a figure that may be more than 10% too large.`,
		Example: `  shaperd talkers
  shaperd talkers --by asn --sort rate --top 5`,
		Annotations: jsonAnnotations,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			talkers, sorted, err := fetchRanked(cmd, sort, func(sort string) ([]api.Talker, error) {
				return e.client().Talkers(cmd.Context(), by.value, sort, *top)
			})
			if err != nil {
				return usageFromAPI(err)
			}
			return e.show(talkers, func(p *term.Printer) {
				none := "No source"
				if by.value == "prefix" {
					none = "No prefix"
				}
				if by.value == "asn" {
					none = "No autonomous system of the files of [asn]"
				}
				if len(talkers) == 0 || sorted != sort.value {
					p.Line("%s was %s in the last minute; %s.", none, sortVerbs[sort.value], sortHint(sorted, sort))
				}
				p.Table(talkersTable(by.value, talkers))
			})
		},
	}
	by = addEnumFlag(cmd, "by", "group by", "source", "prefix", "asn")
	sort = addEnumFlag(cmd, "sort", "sort by", "delayed", "dropped", "rate")
	top = addTopFlag(cmd)
	return cmd
}

func talkersTable(by string, talkers []api.Talker) *term.Table {
	t := term.NewTable(strings.ToUpper(by), ">RATE", ">WAITED/S", ">REFUSED", "AS")
	for _, w := range talkers {
		t.Add(api.Printable(w.Name), estimate(w.Rate, term.Rate), estimate(w.Delayed, term.Seconds), estimate(w.Dropped, term.PerSecond), api.Printable(w.ASName))
	}
	return t
}

// fetchRanked returns the list that ask returns, and its sort key. Without --sort, it falls back
// to "dropped" when nothing was delayed.
func fetchRanked[T any](cmd *cobra.Command, sort *enumFlag, ask func(by string) ([]T, error)) (list []T, by string, err error) {
	list, err = ask(sort.value)
	if len(list) == 0 && err == nil && !cmd.Flags().Changed("sort") {
		if list, err = ask("dropped"); len(list) > 0 {
			return list, "dropped", err
		}
	}
	return list, sort.value, err
}

// sortHint returns how a list is sorted instead of as requested, or which flag sorts it.
func sortHint(by string, sort *enumFlag) string {
	if by != sort.value {
		return "these were " + sortVerbs[by]
	}
	return "try another --sort"
}

// sortVerbs are participles for the sort keys.
var sortVerbs = map[string]string{"delayed": "delayed", "dropped": "refused", "rate": "active"}
