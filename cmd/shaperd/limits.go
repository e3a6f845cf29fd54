package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"shaperd/control"
)

func limitsCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "limits [LIMIT]",
		Short: "Show what limits hold traffic to and how they are doing",
		Long: `Show all limits, or one in detail: what it is held to, what passes, how much of it is
delayed and by how long, who waits, what is refused and why, and whether its promise
is kept.`,
		Example: `  shaperd limits
  shaperd limits per-source
  shaperd limits --json | jq '.[] | select(.waiting > 0) | .name'`,
		Annotations:       withJSON,
		Args:              args("[LIMIT]"),
		ValidArgsFunction: e.completeLimits,
		RunE: func(cmd *cobra.Command, args []string) error {
			c := e.daemon()
			if len(args) == 0 {
				limits, err := c.Limits(cmd.Context())
				if err != nil {
					return err
				}
				return e.show(limits, func(p *page) {
					if len(limits) == 0 {
						p.line("There are no limits: nothing is held back.")
					}
					p.table(p.limits(limits))
				})
			}
			l, err := c.Limit(cmd.Context(), args[0])
			if err != nil {
				return ofLimit(cmd.Context(), c, args[0], err)
			}
			return e.show(l, func(p *page) { p.limit(l) })
		},
	}
}

func (p *page) limits(limits []control.Limit) *table {
	t := newTable("LIMIT", "MODE", ">PASSES", ">DELAYED", ">P50", ">P99", ">IN FLIGHT", ">WAITING", ">REFUSED", "PROMISE", "HELD TO")
	for _, l := range limits {
		t.add(printable(l.Name), printable(l.Mode), passes(l), percent(l.DelayedShare), seconds(l.QueueDelay.P50), seconds(l.QueueDelay.P99),
			fmt.Sprint(l.InFlight), fmt.Sprint(l.Waiting), often(total(l.RefusedRate)), p.kept(l.Promise), held(l))
	}
	return t
}

// kept is the promise in a word.
func (p *page) kept(promise control.Promise) string {
	switch {
	case promise.Unwatched:
		return "-"
	case promise.Kept:
		return "kept"
	}
	return p.red("BROKEN")
}

// held is what a limit is held to, and what of it was set.
func held(l control.Limit) string {
	s := printable(l.HeldTo)
	if l.Block {
		s = "nothing passes"
	}
	if len(l.Override) > 0 {
		s += " (set: " + settings(l.Override) + ")"
	}
	return s
}

func (p *page) limit(l control.Limit) {
	item := func(name, format string, args ...any) { p.line("%-12s %s", name, fmt.Sprintf(format, args...)) }
	item("limit", "%s, in the %s plane, mode %s", printable(l.Name), printable(l.Plane), printable(l.Mode))
	buckets := "one bucket for all"
	if !l.Single {
		buckets = "a bucket for each " + l.Key
	}
	item("held to", "%s; %s", held(l), buckets)
	item("direction", "%s", printable(l.Direction))
	three := func(r control.Rates, write func(float64) string) string {
		return fmt.Sprintf("%s over 1s, %s over 10s, %s over 60s", write(r.S1), write(r.S10), write(r.S60))
	}
	// What a limit does not count is left out: 0 would be wrong.
	paces := l.Rate != 0 || l.Packets != 0
	if paces || l.PacketsTotal != 0 {
		item("passes", "%s; %s in all", three(l.Bytes, rate), size(l.BytesTotal))
		item("packets", "%s; %d in all", three(l.PacketsRate, often), l.PacketsTotal)
	}
	if l.Connections != 0 || l.NewConnections != 0 {
		item("connections", "%s; %d in all; %d in flight, %d wait", three(l.Admitted, often), l.AdmittedTotal, l.InFlight, l.Waiting)
	}
	if paces {
		delayed := percent(l.DelayedShare) + " of bytes"
		if l.QueueDelay.Count > 0 { // not where a listener's limit observes: nothing waits then
			delayed += "; of what was: " + delay(l.QueueDelay)
		}
		item("delayed", "%s", delayed)
	}
	if l.ConnectionWait.Count > 0 {
		item("slots", "waited for: %s", delay(l.ConnectionWait))
	}
	var refused []string
	for _, reason := range sorted(l.Refused) {
		refused = append(refused, fmt.Sprintf("%d %s (%s now)", l.Refused[reason], reason, often(l.RefusedRate[reason])))
	}
	if len(refused) == 0 {
		refused = []string{"nothing"}
	}
	item("refused", "%s", strings.Join(refused, ", "))
	if l.Promise.Unwatched {
		item("promise", "none: it paces nothing, or only observes")
		return
	}
	sampled := ""
	if l.Promise.Sampled {
		sampled = "; one bucket at a time is watched"
	}
	item("promise", "%s: %s%s", p.kept(l.Promise), sigma(l.Promise), sampled)
}

func delay(d control.Delay) string {
	return fmt.Sprintf("half up to %s, 99%% up to %s", seconds(d.P50), seconds(d.P99))
}

func keysCommand(e env) *cobra.Command {
	var limit *string
	var top *int
	var sort *oneOf
	cmd := &cobra.Command{
		Use:   "keys --limit LIMIT",
		Short: "Show the heaviest buckets of a limit",
		Long: `Show the buckets of a limit that weigh most: by how long their traffic waited, by what
was refused, or by bytes, in the last minute or so. "<=" is in front of a figure that
may be more than a tenth too large.`,
		Example: `  shaperd keys --limit per-source
  shaperd keys --limit per-source --sort dropped --top 5`,
		Annotations: withJSON,
		Args:        noArgs("; the limit is named by --limit"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if *limit == "" {
				return usageError{fmt.Errorf("keys needs --limit LIMIT: of which limit?")}
			}
			c := e.daemon()
			keys, by, err := heaviest(cmd, sort, func(by string) ([]control.Key, error) {
				return c.Keys(cmd.Context(), *limit, by, *top)
			})
			if err != nil {
				return ofLimit(cmd.Context(), c, *limit, err)
			}
			return e.show(keys, func(p *page) {
				if len(keys) == 0 || by != sort.value {
					p.line("No key of %s was %s lately; %s.", *limit, lately[sort.value], instead(by, sort))
				}
				p.table(keysTable(keys))
			})
		},
	}
	limit = e.limitFlag(cmd, "of the limit")
	sort = choice(cmd, "sort", "what to sort by", "delayed", "dropped", "rate")
	top = topFlag(cmd)
	return cmd
}

func keysTable(keys []control.Key) *table {
	t := newTable("KEY", ">RATE", ">WAITED/S", ">REFUSED", ">BACKLOG", ">QUEUED", ">NEXT IN", ">IN FLIGHT", ">WAITING", "AS")
	for _, k := range keys {
		row := []string{printable(k.Key), heavy(k.Rate, rate), heavy(k.Delayed, seconds), heavy(k.Dropped, often), "", "", "", "", "", system(k.ASN, k.ASName)}
		if b := k.Bucket; b != nil {
			copy(row[4:], []string{backlog(b), fmt.Sprint(b.Queued), seconds(b.NextIn), fmt.Sprint(b.InFlight), fmt.Sprint(b.Waiting)})
		}
		t.add(row...)
	}
	return t
}

// backlog is what a bucket has to drain.
func backlog(b *control.Bucket) string {
	if b.BacklogBytes == 0 && b.BacklogPackets > 0 {
		return fmt.Sprintf("%d packets", b.BacklogPackets)
	}
	return size(b.BacklogBytes)
}

func whoCommand(e env) *cobra.Command {
	var top *int
	var by, sort *oneOf
	cmd := &cobra.Command{
		Use:   "who",
		Short: "Show who is slowed, refused or sends most",
		Long: `Show the sources, prefixes or autonomous systems that weigh most: by how long their
traffic waited, by what was refused, or by bytes, in the last minute or so. "<=" is in
front of a figure that may be more than a tenth too large.`,
		Example: `  shaperd who
  shaperd who --by asn --sort rate --top 5`,
		Annotations: withJSON,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			who, sorted, err := heaviest(cmd, sort, func(sort string) ([]control.Who, error) {
				return e.daemon().Who(cmd.Context(), by.value, sort, *top)
			})
			if err != nil {
				return asUsage(err)
			}
			return e.show(who, func(p *page) {
				nobody := "Nobody"
				if by.value == "asn" {
					nobody = "No autonomous system that the files of [asn] know"
				}
				if len(who) == 0 || sorted != sort.value {
					p.line("%s was %s lately; %s.", nobody, lately[sort.value], instead(sorted, sort))
				}
				p.table(whoTable(by.value, who))
			})
		},
	}
	by = choice(cmd, "by", "what to tell apart", "source", "prefix", "asn")
	sort = choice(cmd, "sort", "what to sort by", "delayed", "dropped", "rate")
	top = topFlag(cmd)
	return cmd
}

func whoTable(by string, who []control.Who) *table {
	t := newTable(strings.ToUpper(by), ">RATE", ">WAITED/S", ">REFUSED", "AS")
	for _, w := range who {
		t.add(printable(w.Name), heavy(w.Rate, rate), heavy(w.Delayed, seconds), heavy(w.Dropped, often), printable(w.ASName))
	}
	return t
}

// heaviest returns what ask has, and what it is sorted by: where no --sort says so and nothing was
// delayed, by what was refused.
func heaviest[T any](cmd *cobra.Command, sort *oneOf, ask func(by string) ([]T, error)) (list []T, by string, err error) {
	list, err = ask(sort.value)
	if len(list) == 0 && err == nil && !cmd.Flags().Changed("sort") {
		if list, err = ask("dropped"); len(list) > 0 {
			return list, "dropped", err
		}
	}
	return list, sort.value, err
}

// instead says what is shown by another trait than was asked for, or where to ask for one.
func instead(by string, sort *oneOf) string {
	if by != sort.value {
		return "this was " + lately[by]
	}
	return "see --sort"
}

// lately is what keys and sources were not, by what they are sorted by.
var lately = map[string]string{"delayed": "delayed", "dropped": "refused", "rate": "active"}
