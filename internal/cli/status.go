package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
	"shaperd.dev/shaperd/shaper"
)

func statusCommand(e env) *cobra.Command {
	var check, ready bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the health of the daemon, and the traffic that it throttles",
		Long: `Show the health of the daemon: conformance, the limits that throttle traffic now and by
how much, and the most delayed sources. Then show listeners, downstreams, attachments,
overrides, blocks, and errors of the last reload.

Exits with 1 if a listener has no downstream that is up, if the limits of an attachment
are not enforced, or if conformance was violated in the last minute. With shared limits,
also exits with 1 if this host is alone, if hosts disagree about limits, or if two hosts
have the same name.

--check prints one line with performance data for monitoring, and exits with the codes of
Nagios and Icinga plugins: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN. --ready is for
keepalived and load balancers: it exits with 0 if this host can take traffic, and with 1
while the daemon starts or stops, hangs, or does not enforce the limits of an attachment.`,
		Example: `  shaperd status
  shaperd status --json | jq .conformance
  shaperd status --check
  shaperd status --ready`,
		Annotations: jsonAnnotations,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c := e.client()
			switch {
			case check && ready || e.flags.json && (check || ready):
				return usageError{errors.New("only one of --check, --ready and --json can be used")}
			case check:
				return e.printCheck(checkStatus(cmd.Context(), c))
			case ready:
				return e.printReady(cmd.Context(), c)
			}
			s, err := c.Status(cmd.Context())
			if err != nil {
				return err
			}
			if e.flags.json {
				return cmp.Or(e.printJSON(s), statusError(s))
			}
			limits, err := c.Limits(cmd.Context())
			if err != nil {
				return err
			}
			delayed := mostDelayed(cmd.Context(), c)
			return cmp.Or(e.show(s, func(p *term.Printer) { printStatus(p, s, limits, delayed) }), statusError(s))
		},
	}
	cmd.Flags().BoolVar(&check, "check", false, "print one line for Nagios or Icinga, and exit with their codes")
	cmd.Flags().BoolVar(&ready, "ready", false, "print whether this host can take traffic; exit with 1 if not")
	return cmd
}

// statusError returns the error of the verb status, or nil when the daemon is healthy.
func statusError(s api.Status) error {
	if names := unavailableListeners(s); len(names) > 0 {
		return fmt.Errorf("no downstream is up at %s", strings.Join(names, ", "))
	}
	if names := unenforcedAttachments(s); len(names) > 0 {
		return fmt.Errorf("limits are not enforced at %s", strings.Join(names, ", "))
	}
	if s.Conformance != "conformant" {
		return errors.New("conformance was violated in the last minute")
	}
	return sharedError(s.Shared)
}

// unenforcedAttachments returns the attachments whose limits are not enforced.
func unenforcedAttachments(s api.Status) (names []string) {
	for _, a := range s.Attachments {
		if !a.Up && a.Interface != "" {
			names = append(names, api.Printable(a.Name))
		}
	}
	return slices.Compact(names)
}

// unavailableListeners returns the listeners without a downstream that is up.
func unavailableListeners(s api.Status) (names []string) {
	for _, l := range s.Listeners {
		if l.Unavailable != "" {
			names = append(names, api.Printable(l.Name))
		}
	}
	return names
}

// minWait is the least delay that is shown, in seconds per second: the average decays, but
// never to 0.
const minWait = 1e-3

// mostDelayed returns the most delayed sources, or none when the request fails.
func mostDelayed(ctx context.Context, c *api.Client) (some []api.Talker) {
	talkers, err := c.Talkers(ctx, "source", "delayed", 3)
	if err != nil {
		return nil
	}
	for _, w := range talkers {
		if w.Delayed.Value > w.Delayed.Error && w.Delayed.Value >= minWait {
			some = append(some, w)
		}
	}
	return some
}

func printStatus(p *term.Printer, s api.Status, limits []api.Limit, delayed []api.Talker) {
	printHeadlines(p, s, limits)
	for i, w := range delayed {
		lead := "Most delayed: "
		if i > 0 {
			lead = "              "
		}
		p.Line("%s%s, %s per second", lead, strings.TrimSpace(api.Printable(w.Name)+" "+api.Printable(w.ASName)), estimate(w.Delayed, term.Seconds))
	}
	p.Line("")
	up := s.Now.Sub(s.Started)
	p.Line("shaperd %s, pid %d, up %s, mode %s, %s%s", api.Printable(s.Version), s.PID, term.Seconds(up.Seconds()), api.Printable(s.Mode), api.Printable(s.Config), revisionText(s))
	p.Line("memory %s, CPU %s of one core, descriptors %d of %d, pacing latency p99 %s", term.Size(s.Process.Memory),
		term.Percent(s.Process.CPUCores), s.Process.Descriptors, s.Process.MaxDescriptors, term.Seconds(s.Process.WakeupLatencyP99))
	printReload(p, s.Reload, s.Now)
	printTrafficTables(p, s)
	printRuntimeChanges(p, s)
}

// sheddingText says that a limit sheds, or cannot read what it looks at; "" if neither.
func sheddingText(l api.Limit) string {
	if l.Shed == nil {
		return ""
	}
	var short, failed []string
	for _, s := range l.Shed.Signals {
		switch {
		case s.Error != "":
			failed = append(failed, signalName(s))
		case s.Value >= s.Above:
			short = append(short, signalName(s))
		}
	}
	text := ""
	if l.Shed.Share > 0 {
		text = fmt.Sprintf("Limit %q %s %s of its new connections", l.Name, shedVerb(l.Mode), term.Percent(l.Shed.Share))
		if len(short) > 0 {
			text += ", because of " + strings.Join(short, ", ")
		} else {
			text += ", and recovers"
		}
		text += ". "
	}
	if len(failed) > 0 {
		text += fmt.Sprintf("Limit %q cannot read %s, and sheds nothing because of it.", l.Name, strings.Join(failed, ", "))
	}
	return strings.TrimSpace(text)
}

// printHeadlines prints what an operator must know first.
func printHeadlines(p *term.Printer, s api.Status, limits []api.Limit) {
	for _, l := range s.Listeners {
		if l.Unavailable != "" {
			p.Line("%s", p.Red(unavailableText(l.Name, l.Unavailable)))
		}
	}
	for _, l := range s.Listeners {
		if l.Hold != nil {
			p.Line("%s", p.Red(holdText(l.Name, l.Waiting, l.Hold)))
		}
	}
	for _, l := range limits {
		if text := sheddingText(l); text != "" {
			p.Line("%s", p.Red(text))
		}
	}
	for _, a := range s.Attachments {
		if !a.Up && a.Interface != "" {
			p.Line("%s", p.Red(unenforcedText(a)))
		}
	}
	if s.Shared != nil {
		printProblems(p, s.Shared)
	}
	if s.Bypass != nil {
		p.Line("%s", p.Red(bypassText(s)))
	}
	if r := s.RolledBack; r != nil {
		p.Line("%s", p.Red(fmt.Sprintf("ROLLED BACK to revision %s of %s, which differs from the configuration files: \"shaperd reload\" or a restart applies the files.",
			api.Printable(r.Revision), r.At.Local().Format(time.DateTime))))
	}
	for _, why := range s.SourceErrors {
		p.Line("%s", p.Red("OLD SOURCES are in use, because a file has an error: "+api.Printable(why)))
	}
	if s.ScheduleError != "" {
		p.Line("%s", p.Red("OLD VALUES are in use, because those of a schedule could not be applied: "+api.Printable(s.ScheduleError)))
	}
	if s.QuotaError != "" {
		p.Line("%s", p.Red("QUOTAS WAIT, because their file cannot be written: "+api.Printable(s.QuotaError)))
	}
	if s.StateError != "" {
		p.Line("%s", p.Red(unsavedText(s)))
	}
	for _, why := range s.EndpointErrors {
		p.Line("%s", p.Red("NOT AVAILABLE: "+api.Printable(why)))
	}
	if s.State == "stopping" {
		p.Line("%s", p.Red("STOPPING: new connections are refused, and the daemon exits when the open ones have ended."))
	}
	if text := penalizedText(s.Penalized, s.WouldBePenalized); text != "" {
		p.Line("%s", text)
	}
	printConformance(p, s, limits)
	slowed, watched := term.NewTable("THROTTLING", "HOW"), term.NewTable("WOULD THROTTLE", "HOW")
	for _, l := range limits {
		how := throttlingText(l)
		switch {
		case how == "":
		case l.Mode == shaper.Observe.String():
			watched.Add(l.Name, how)
		default:
			slowed.Add(l.Name, how)
		}
	}
	if !printFlowWarnings(p, s) && len(slowed.Rows) == 0 && len(unavailableListeners(s))+len(unenforcedAttachments(s)) == 0 {
		p.Line("No traffic is throttled.")
	}
	p.Table(slowed)
	p.Table(watched)
}

// revisionText says which revision of the configuration is effective.
func revisionText(s api.Status) string {
	if s.Revision == "" {
		return ""
	}
	return " at revision " + api.Printable(s.Revision)
}

// printFlowWarnings prints which listeners refuse UDP flows or suppress replies, and reports whether
// there are any.
func printFlowWarnings(p *term.Printer, s api.Status) (any bool) {
	for _, l := range s.Listeners {
		if l.FlowsRefusedRate > 0 {
			any = true
			p.Line("%s", p.Red(fmt.Sprintf("UDP FLOW QUOTA EXHAUSTED at %s: %s datagrams refused, %s flows. \"shaperd events\" shows whether to raise max_flows or max_flows_per_source.",
				api.Printable(l.Name), term.PerSecond(l.FlowsRefusedRate), flowCount(l))))
		}
		if l.RepliesSuppressedRate > 0 {
			any = true
			p.Line("Replies suppressed at %s: %s exceed the amplification limit.", api.Printable(l.Name), term.PerSecond(l.RepliesSuppressedRate))
		}
	}
	return any
}

// flowCount formats the number of UDP flows of a listener.
func flowCount(l api.ListenerStatus) string {
	if l.MaxFlows == 0 {
		return fmt.Sprint(l.Flows)
	}
	return fmt.Sprintf("%d of %d", l.Flows, l.MaxFlows)
}

func unavailableText(listener, why string) string {
	return fmt.Sprintf("NO DOWNSTREAM IS UP at %s: %s.", api.Printable(listener), api.Printable(why))
}

func unenforcedText(a api.AttachmentStatus) string {
	return fmt.Sprintf("NOT ENFORCED: attachment %s at %s, %s: %s", api.Printable(a.Name), api.Printable(a.Interface), a.Direction,
		strings.TrimPrefix(api.Printable(a.Error), "not enforced: "))
}

func bypassText(s api.Status) string {
	return fmt.Sprintf("BYPASS IS ON since %s, %s: limits only observe; blocks stay enforced.",
		term.Clock(s.Bypass.Since, s.Now), term.Until(s.Bypass.Until, s.Now, `until "shaperd bypass off"`))
}

func unsavedText(s api.Status) string {
	return "NOT SAVED: a restart loses the latest overrides: " + api.Printable(s.StateError)
}

func printConformance(p *term.Printer, s api.Status, limits []api.Limit) {
	switch {
	case s.Conformance == "conformant" && len(unenforcedAttachments(s)) > 0:
		p.Line("conformance: ok where limits are enforced")
		return
	case s.Conformance == "conformant":
		p.Line("conformance: ok")
		return
	}
	p.Line("%s", p.Red("conformance: VIOLATED in the last minute"))
	for _, l := range limits {
		if !l.Conformance.Conformant && !l.Conformance.Unmonitored {
			p.Line("  %s: %s", l.Name, excessText(l.Conformance))
		}
	}
}

// excessText formats by how much the buckets of a limit exceeded rate x time.
func excessText(p api.Conformance) string {
	most, allowed := term.Size(p.Sigma), term.Size(p.Allowed)
	if p.InPackets {
		most, allowed = term.Number(p.Sigma), term.Number(p.Allowed)+" packets"
	}
	s := fmt.Sprintf("largest excess %s, allowed %s", most, allowed)
	if p.Violations > 0 {
		s += fmt.Sprintf("; %d violations since the start", p.Violations)
	}
	return s
}

// throttlingText describes what a limit does to traffic now. It returns "" when the limit
// affects none.
func throttlingText(l api.Limit) string {
	var parts []string
	if l.Throttling && l.DelayedShare > 0 {
		s := term.Percent(l.DelayedShare) + " of " + throughput(l) + " delayed"
		if l.QueueDelay.Count > 0 {
			s += fmt.Sprintf(" by %s (p99 %s)", term.Seconds(l.QueueDelay.P50), term.Seconds(l.QueueDelay.P99))
		}
		parts = append(parts, s)
	}
	if l.Waiting > 0 {
		parts = append(parts, fmt.Sprintf("%s waiting, %d in flight", term.Plural(l.Waiting, "connection"), l.InFlight))
	}
	if n := sumValues(l.RefusedRate); n >= 0.005 {
		parts = append(parts, term.PerSecond(n)+" refused ("+topReasons(l.RefusedRate)+")")
	}
	return strings.Join(parts, "; ")
}

// throughput formats the throughput of a limit in the quantity that it limits.
func throughput(l api.Limit) string {
	switch {
	case l.Rate == 0 && l.Packets > 0:
		return strings.Replace(term.PerSecond(l.PacketsRate.S10), "/s", "pps", 1)
	case l.Rate == 0 && l.NewConnections > 0:
		return term.PerSecond(l.Admitted.S10)
	}
	return term.Rate(l.Bytes.S10)
}

func sumValues(by map[string]float64) (sum float64) {
	for _, v := range by {
		sum += v
	}
	return sum
}

// topReasons returns the reasons that are not negligible, the most frequent first.
func topReasons(by map[string]float64) string {
	names := slices.DeleteFunc(slices.Sorted(maps.Keys(by)), func(name string) bool { return by[name] < 0.005 })
	slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(by[b], by[a]) })
	return strings.Join(names, ", ")
}

// printReload prints the result of the last reload.
func printReload(p *term.Printer, r api.ReloadStatus, now time.Time) {
	if r.OK {
		p.Line("configuration loaded at %s in %s", term.Clock(r.Loaded, now), term.Seconds(r.Duration))
		return
	}
	p.Line("%s", p.Red(fmt.Sprintf("RELOAD FAILED at %s; the configuration loaded at %s stays effective:", term.Clock(r.At, now), term.Clock(r.Loaded, now))))
	for _, msg := range r.Errors {
		p.Line("  %s", api.Printable(msg))
	}
}

// printTrafficTables prints listeners, downstreams and attachments.
func printTrafficTables(p *term.Printer, s api.Status) {
	listeners := term.NewTable("LISTENER", "ADDRESS", ">OPEN", ">FLOWS", ">TO", ">FROM", ">ACCEPTED", ">DIAL ERRORS")
	var down []api.DownstreamStatus
	for _, l := range s.Listeners {
		listeners.Add(l.Name, strings.Join(l.Addresses, " "), fmt.Sprint(l.Connections), flowCount(l), term.Rate(l.ToDownstreamRate),
			term.Rate(l.FromDownstreamRate), fmt.Sprint(l.Accepted), fmt.Sprint(l.DialErrors))
		down = append(down, l.Downstreams...)
	}
	p.Section(listeners)
	p.Section(downstreamsTable(p, down))
	attachments := term.NewTable("ATTACHMENT", "INTERFACE", "DIRECTION", "MODE", "STATE", ">QUEUED", ">DROPPED")
	for _, a := range s.Attachments {
		state, queued, dropped := "up", "", ""
		switch {
		case a.UnmatchedPatterns != "":
			state = "waiting for " + api.Printable(a.UnmatchedPatterns)
		case !a.Up:
			state = p.Red(strings.TrimSuffix("down: "+api.Printable(a.Error), ": "))
		case len(a.PrecedingPrograms) > 0:
			state = "up, after " + api.Printable(strings.Join(a.PrecedingPrograms, ", "))
		}
		if a.Queue != nil {
			queued, dropped = term.Size(a.Queue.Bytes), fmt.Sprint(a.Queue.Drops)
		}
		attachments.Add(a.Name, a.Interface, a.Direction, a.Mode, state, queued, dropped)
	}
	p.Section(attachments)
}

// maxStatusBlocks is the number of blocks that status shows.
const maxStatusBlocks = 10

// printRuntimeChanges prints overrides and blocks.
func printRuntimeChanges(p *term.Printer, s api.Status) {
	set := term.NewTable("OVERRIDE OF", "VALUES", "SINCE", "UNTIL")
	for _, o := range s.Overrides {
		set.Add(o.Limit, overrideText(o), term.Clock(o.Since, s.Now), strings.TrimPrefix(overrideUntil(o, s.Now), "until "))
	}
	p.Section(set)
	shown := min(len(s.Blocks), maxStatusBlocks)
	p.Section(blocksTable(s.Blocks[:shown], s.Now))
	if more := s.BlocksTotal - shown; more > 0 {
		p.Line("and %d more; see \"shaperd blocks\"", more)
	}
}
