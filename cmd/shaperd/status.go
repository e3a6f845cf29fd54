package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"shaperd/control"
)

func statusCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Tell whether the promise is kept and who is slowed, by what and how much",
		Long: `Tell how the daemon is doing: whether the promise is kept, which limits hold traffic
back now and how much, and who waits most; then listeners, downstreams, attachments,
what was set since the configuration was loaded, blocks, and what was wrong with the
last reload.

Exits with 1 when a listener serves nobody, as none of its downstreams is up, when
packets at an attachment do not meet its limits, or when the promise was broken in the
last minute.`,
		Example: `  shaperd status
  shaperd status --json | jq .promise`,
		Annotations: withJSON,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c := e.daemon()
			s, err := c.Status(cmd.Context())
			if err != nil {
				return err
			}
			if e.flags.json {
				return cmp.Or(e.printJSON(s), unwell(s))
			}
			limits, err := c.Limits(cmd.Context())
			if err != nil {
				return err
			}
			who := mostDelayed(cmd.Context(), c)
			return cmp.Or(e.show(s, func(p *page) { p.status(s, limits, who) }), unwell(s))
		},
	}
}

// unwell returns what status fails with, nil when all is well.
func unwell(s control.Status) error {
	if names := unserved(s); len(names) > 0 {
		return fmt.Errorf("nobody is served at %s", strings.Join(names, ", "))
	}
	if names := unenforced(s); len(names) > 0 {
		return fmt.Errorf("limits are not enforced at %s", strings.Join(names, ", "))
	}
	if s.Promise != "kept" {
		return errors.New("the promise was broken in the last minute")
	}
	return nil
}

// unenforced is the attachments whose limits packets do not meet.
func unenforced(s control.Status) (names []string) {
	for _, a := range s.Attachments {
		if !a.Up && a.Interface != "" {
			names = append(names, printable(a.Name))
		}
	}
	return slices.Compact(names)
}

// unserved is the listeners that serve nobody.
func unserved(s control.Status) (names []string) {
	for _, l := range s.Listeners {
		if l.Unserved != "" {
			names = append(names, printable(l.Name))
		}
	}
	return names
}

// leastWait is what is shown of waiting, in seconds a second: it fades, and never ends.
const leastWait = 1e-3

// mostDelayed is who waits most, or nobody where the daemon does not say.
func mostDelayed(ctx context.Context, c *control.Client) (some []control.Who) {
	who, err := c.Who(ctx, "source", "delayed", 3)
	if err != nil {
		return nil
	}
	for _, w := range who {
		if w.Delayed.Value > w.Delayed.Error && w.Delayed.Value >= leastWait {
			some = append(some, w)
		}
	}
	return some
}

func (p *page) status(s control.Status, limits []control.Limit, who []control.Who) {
	p.verdicts(s, limits)
	for i, w := range who {
		lead := "Waits most: "
		if i > 0 {
			lead = "            "
		}
		p.line("%s%s, %s a second", lead, strings.TrimSpace(printable(w.Name)+" "+printable(w.ASName)), heavy(w.Delayed, seconds))
	}
	p.line("")
	up := s.Now.Sub(s.Started)
	p.line("shaperd %s, pid %d, running for %s, mode %s, %s", printable(s.Version), s.PID, seconds(up.Seconds()), printable(s.Mode), printable(s.Config))
	p.line("%s of memory, %s of a processor, %d of %d descriptors, paces with wake-ups up to %s late (p99)", size(s.Process.Memory),
		percent(s.Process.CPURate), s.Process.Descriptors, s.Process.MaxDescriptors, seconds(s.Process.LateP99))
	p.reload(s.Reload, s.Now)
	p.places(s)
	p.changes(s)
}

// verdicts answers in the first lines what one looks for.
func (p *page) verdicts(s control.Status, limits []control.Limit) {
	for _, l := range s.Listeners {
		if l.Unserved != "" {
			p.line("%s", p.red(unservedText(l.Name, l.Unserved)))
		}
	}
	for _, a := range s.Attachments {
		if !a.Up && a.Interface != "" {
			p.line("%s", p.red(unenforcedText(a)))
		}
	}
	if s.Bypass != nil {
		p.line("%s", p.red(bypassText(s)))
	}
	if s.Unsaved != "" {
		p.line("%s", p.red(unsavedText(s)))
	}
	for _, why := range s.Unshown {
		p.line("%s", p.red("NOT SHOWN: "+printable(why)))
	}
	if s.State == "draining" {
		p.line("%s", p.red("It drains: new connections are not taken, and it ends when those that are there have."))
	}
	p.promise(s, limits)
	slowed, watched := newTable("SLOWS", "HOW"), newTable("WOULD SLOW", "HOW")
	for _, l := range limits {
		how := slows(l)
		switch {
		case how == "":
		case l.Mode == "observe":
			watched.add(l.Name, how)
		default:
			slowed.add(l.Name, how)
		}
	}
	if !p.unroomed(s) && len(slowed.rows) == 0 && len(unserved(s))+len(unenforced(s)) == 0 {
		p.line("Nobody is slowed.")
	}
	p.table(slowed)
	p.table(watched)
}

// unroomed tells which listeners refuse UDP flows or withhold answers, and reports whether
// one does.
func (p *page) unroomed(s control.Status) (any bool) {
	for _, l := range s.Listeners {
		if l.FlowsRefusedRate > 0 {
			any = true
			p.line("%s", p.red(fmt.Sprintf("NO ROOM for UDP flows at %s: %s datagrams refused, %s flows. \"shaperd events\" says whether to raise max_flows or max_flows_per_source.",
				printable(l.Name), often(l.FlowsRefusedRate), flows(l))))
		}
		if l.AnswersWithheldRate > 0 {
			any = true
			p.line("Answers are withheld at %s: %s come to more than amplification allows.", printable(l.Name), often(l.AnswersWithheldRate))
		}
	}
	return any
}

// flows writes how many UDP flows a listener has.
func flows(l control.ListenerStatus) string {
	if l.MaxFlows == 0 {
		return fmt.Sprint(l.Flows)
	}
	return fmt.Sprintf("%d of %d", l.Flows, l.MaxFlows)
}

func unservedText(listener, why string) string {
	return fmt.Sprintf("NOBODY IS SERVED at %s: %s.", printable(listener), printable(why))
}

func unenforcedText(a control.AttachmentStatus) string {
	return fmt.Sprintf("NOT ENFORCED: attachment %s at %s, %s: %s", printable(a.Name), printable(a.Interface), a.Direction,
		strings.TrimPrefix(printable(a.Error), "not enforced: "))
}

func bypassText(s control.Status) string {
	return fmt.Sprintf("BYPASS IS ON since %s, %s: limits only observe, nothing is held back but what is blocked.",
		clock(s.Bypass.Since, s.Now), until(s.Bypass.Until, s.Now, `until "shaperd bypass off"`))
}

func unsavedText(s control.Status) string {
	return "NOT SAVED: a restart forgets, or brings back, what operators ordered: " + printable(s.Unsaved)
}

func (p *page) promise(s control.Status, limits []control.Limit) {
	switch {
	case s.Promise == "kept" && len(unenforced(s)) > 0:
		p.line("Where limits are enforced, the promise is kept.")
		return
	case s.Promise == "kept":
		p.line("The promise is kept.")
		return
	}
	p.line("%s", p.red("The promise was BROKEN in the last minute."))
	for _, l := range limits {
		if !l.Promise.Kept && !l.Promise.Unwatched {
			p.line("  %s: %s", l.Name, sigma(l.Promise))
		}
	}
}

// sigma writes how far a limit's buckets went beyond rate x time.
func sigma(p control.Promise) string {
	most, allowed := size(p.Sigma), size(p.Allowed)
	if p.InPackets {
		most, allowed = number(p.Sigma)+" packets", number(p.Allowed)
	}
	s := fmt.Sprintf("at most %s beyond rate x time, of %s allowed", most, allowed)
	if p.Violations > 0 {
		s += fmt.Sprintf("; %d units left beyond that since the start", p.Violations)
	}
	return s
}

// slows writes what a limit does to traffic now, "" when that is nothing.
func slows(l control.Limit) string {
	var parts []string
	if l.Slows && l.DelayedShare > 0 {
		s := percent(l.DelayedShare) + " of " + passes(l) + " delayed"
		if l.QueueDelay.Count > 0 {
			s += fmt.Sprintf(" by %s (p99 %s)", seconds(l.QueueDelay.P50), seconds(l.QueueDelay.P99))
		}
		parts = append(parts, s)
	}
	if l.Waiting > 0 {
		parts = append(parts, fmt.Sprintf("%s waiting, %d in flight", plural(l.Waiting, "connection"), l.InFlight))
	}
	if n := total(l.RefusedRate); n >= 0.005 {
		parts = append(parts, often(n)+" refused ("+reasons(l.RefusedRate)+")")
	}
	return strings.Join(parts, "; ")
}

// passes writes how fast traffic passes a limit, in what it is held to.
func passes(l control.Limit) string {
	switch {
	case l.Rate == 0 && l.Packets > 0:
		return strings.Replace(often(l.PacketsRate.S10), "/s", "pps", 1)
	case l.Rate == 0 && l.NewConnections > 0:
		return often(l.Admitted.S10)
	}
	return rate(l.Bytes.S10)
}

func total(by map[string]float64) (sum float64) {
	for _, v := range by {
		sum += v
	}
	return sum
}

// reasons names those that count, the most frequent first.
func reasons(by map[string]float64) string {
	names := slices.DeleteFunc(sorted(by), func(name string) bool { return by[name] < 0.005 })
	slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(by[b], by[a]) })
	return strings.Join(names, ", ")
}

// reload says what was wrong with the last one.
func (p *page) reload(r control.ReloadStatus, now time.Time) {
	if r.OK {
		p.line("configuration of %s, loaded in %s", clock(r.Loaded, now), seconds(r.Took))
		return
	}
	p.line("%s", p.red(fmt.Sprintf("The reload at %s found mistakes; the configuration of %s stays in force:", clock(r.At, now), clock(r.Loaded, now))))
	for _, mistake := range r.Errors {
		p.line("  %s", printable(mistake))
	}
}

// places writes where traffic meets limits.
func (p *page) places(s control.Status) {
	listeners := newTable("LISTENER", "ADDRESS", ">OPEN", ">FLOWS", ">TO", ">FROM", ">ACCEPTED", ">DIAL ERRORS")
	var down []control.DownstreamStatus
	for _, l := range s.Listeners {
		listeners.add(l.Name, strings.Join(l.Addresses, " "), fmt.Sprint(l.Open), flows(l), rate(l.ToDownstreamRate),
			rate(l.FromDownstreamRate), fmt.Sprint(l.Accepted), fmt.Sprint(l.DialErrors))
		down = append(down, l.Downstreams...)
	}
	p.section(listeners)
	p.section(p.downstreams(down))
	attachments := newTable("ATTACHMENT", "INTERFACE", "DIRECTION", "MODE", "STATE", ">QUEUED", ">DROPPED")
	for _, a := range s.Attachments {
		state, queued, dropped := "up", "", ""
		switch {
		case a.Waits != "":
			state = "waits for " + printable(a.Waits)
		case !a.Up:
			state = p.red(strings.TrimSuffix("down: "+printable(a.Error), ": "))
		case len(a.Before) > 0:
			state = "up, behind " + printable(strings.Join(a.Before, ", "))
		}
		if a.Queue != nil {
			queued, dropped = size(a.Queue.Bytes), fmt.Sprint(a.Queue.Drops)
		}
		attachments.add(a.Name, a.Interface, a.Direction, a.Mode, state, queued, dropped)
	}
	p.section(attachments)
}

// mostBlocks is how many blocks a status shows.
const mostBlocks = 10

// changes writes what is not as the configuration has it.
func (p *page) changes(s control.Status) {
	set := newTable("SET IN LIMIT", "WHAT", "SINCE", "UNTIL")
	for _, o := range s.Overrides {
		set.add(o.Limit, settings(o.Set), clock(o.Since, s.Now), strings.TrimPrefix(untilOf(o, s.Now), "until "))
	}
	p.section(set)
	shown := min(len(s.Blocks), mostBlocks)
	p.section(blocksTable(s.Blocks[:shown], s.Now))
	if more := s.BlocksTotal - shown; more > 0 {
		p.line("and %d more: shaperd blocks", more)
	}
}

// section writes t with an empty line before it, if it has rows.
func (p *page) section(t *table) {
	if len(t.rows) > 0 {
		p.line("")
		p.table(t)
	}
}
