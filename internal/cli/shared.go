package cli

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
)

func sharedCommand(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "shared",
		Short: "Show the hosts that share limits; remove a host",
		Long: `Show the group of hosts that share limits, and the parts of this host: see "shaperd shared
status". Remove a host that is gone from the group: see "shaperd shared forget".`,
		Example: `  shaperd shared status
  shaperd shared forget gw3`,
		RunE: func(*cobra.Command, []string) error {
			return usageError{errors.New("shared requires status, or forget HOST")}
		},
	}
	cmd.AddCommand(sharedStatusCommand(e), sharedForgetCommand(e))
	return cmd
}

func sharedStatusCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show the hosts that share limits, and their parts",
		Long: `Show whether this host is in its group, the end of its lease, and the number of live hosts.
Then show the state of each host in the ledger, and for each shared limit the part that
this host may use, and the part that it needs. SHARE is a fraction of the values for all
hosts together. A bucket is short if this host should get more of it, and tight if all
hosts together need more than the limit.

Exits with 1 if this host is alone, if hosts disagree about limits, or if two hosts have
the same name.`,
		Example: `  shaperd shared status
  shaperd shared status --json | jq '.ledger.hosts[] | select(.state == "absent") | .name'`,
		Annotations: jsonAnnotations,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := e.client().Shared(cmd.Context())
			if err != nil {
				return err
			}
			return cmp.Or(e.show(s, func(p *term.Printer) { printShared(p, s) }), sharedError(&s))
		},
	}
}

// sharedError returns the error that limits of s do not hold or let too little pass, or nil. s may be nil.
func sharedError(s *api.Shared) error {
	if s == nil {
		return nil
	}
	for _, problem := range s.Problems {
		if problem.Severity == "critical" {
			return fmt.Errorf("shared limits: %s", strings.ToLower(api.Printable(problem.Title)))
		}
	}
	return nil
}

func sharedForgetCommand(e env) *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:   "forget HOST",
		Short: "Remove a host that is gone for good, so that others use its part",
		Long: `Remove HOST, which is gone for good or never existed, from the ledger, so that the other
hosts use its part of each shared limit. If the host still runs, and is only cut off, all
hosts together may exceed the limits. The ledger refuses this for a host that has called
recently. A host that returns is in the group again. A host that was stopped with "shaperd
stop" or systemctl need not be removed.

With failover = "strict", which several shaperd:// addresses imply, a host that is gone may
have joined at another ledger. Its part, also that of a stopped host, is therefore kept
until another host takes its place, or until hosts is lowered on all hosts.`,
		Example: `  shaperd shared forget gw3
  shaperd shared forget gw3 --yes`,
		Annotations:       jsonAnnotations,
		Args:              wantArgs("HOST"),
		ValidArgsFunction: e.completeHosts,
		RunE: func(cmd *cobra.Command, args []string) error {
			if !yes {
				if err := e.confirm(fmt.Sprintf("If %s still runs, all hosts together may exceed the limits. Forget it?", api.Printable(args[0]))); err != nil {
					return err
				}
			}
			s, err := e.client().ForgetHost(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return e.show(s, func(p *term.Printer) { p.Line("%s is forgotten: %s", api.Printable(args[0]), forgottenText(&s)) })
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask for confirmation")
	return cmd
}

// forgottenText says what follows for a group when a host is gone.
func forgottenText(s *api.Shared) string {
	if s.Failover == "strict" {
		return "another host may take its place. With failover = \"strict\" its part is kept until one does, or hosts is lowered on all hosts."
	}
	return "the others use its part."
}

// confirm asks the user, and returns an error unless the answer is yes.
func (e env) confirm(question string) error {
	if e.stdin == nil || !term.IsTerminal(e.stdin) {
		return usageError{errors.New("standard input is not a terminal: use --yes to confirm")}
	}
	fmt.Fprintf(e.stderr, "%s [y/N] ", question)
	answer, err := bufio.NewReader(e.stdin).ReadString('\n')
	if a := strings.ToLower(strings.TrimSpace(answer)); err != nil || a != "y" && a != "yes" {
		return errors.New("nothing was changed")
	}
	return nil
}

// completeHosts completes the first argument with the hosts that are absent.
func (e env) completeHosts(cmd *cobra.Command, args []string, _ string) (names []string, _ cobra.ShellCompDirective) {
	s, err := e.client().Shared(cmd.Context())
	if err == nil && s.Ledger != nil && len(args) == 0 {
		for _, h := range s.Ledger.Hosts {
			if h.State == "absent" {
				names = append(names, h.Name)
			}
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// printProblems prints what an operator must know about the group.
func printProblems(p *term.Printer, s *api.Shared) {
	for _, problem := range s.Problems {
		paint := p.Yellow
		if problem.Severity == "critical" {
			paint = p.Red
		}
		p.Line("%s", paint(problemText(problem)))
	}
}

func problemText(problem api.Problem) string {
	return strings.ToUpper(api.Printable(problem.Title)) + ": " + api.Printable(problem.Text)
}

func printShared(p *term.Printer, s api.Shared) {
	printProblems(p, &s)
	switch s.State {
	case "none":
		p.Line("No limit is shared: the configuration has no [shared].")
		return
	case "static":
		p.Line("No ledger: this host, one of %d, always has 1/%d of each shared limit.", s.Hosts, s.Hosts)
	default:
		printMember(p, s)
		printHosts(p, s)
	}
	limits := term.NewTable("LIMIT", "BUCKET", "SHARE", ">WANT", "STATE", "OTHERS")
	for _, l := range s.Limits {
		addSharedLimit(limits, s, l)
	}
	p.Section(limits)
}

// printMember prints what this host knows of its group.
func printMember(p *term.Printer, s api.Shared) {
	counted := ""
	if s.State == "joined" && !s.Counted {
		counted = ", not counted by the others yet"
	}
	live := ""
	if s.State == "joined" {
		live = fmt.Sprintf("; %d of %d hosts live", liveHosts(&s), s.Hosts)
		if s.Gone > 0 {
			live += fmt.Sprintf(", %d gone", s.Gone)
		}
	}
	since := "just now"
	if s.For >= 0.05 {
		since = "for " + term.Seconds(s.For)
	}
	p.Line("%s: %s %s, group %s%s%s", api.Printable(s.Name), s.State, since, api.Printable(s.Group), counted, live)
	lease := "ended"
	if s.LeaseLeft > 0 {
		lease = fmt.Sprintf("%s old, ends in %s", term.Seconds(s.LeaseAge), term.Seconds(s.LeaseLeft))
	}
	p.Line("lease: %s; alone = %q; %s", lease, s.Alone, term.Plural(int64(s.HotBuckets), "hot bucket"))
	server, epoch := "", ""
	if s.Epoch != 0 {
		epoch = fmt.Sprintf(", epoch %d", s.Epoch)
	}
	stores := strings.Join(s.Stores, ", ")
	if s.Server != "" && (len(s.Stores) > 1 || !strings.Contains(stores, s.Server)) {
		server = fmt.Sprintf("; %s answered last", s.Server)
	}
	p.Line("ledger: %s%s%s", api.Printable(stores), api.Printable(server), epoch)
	if s.StoreError != "" && s.State == "joined" {
		p.Line("last call: %s", p.Red(api.Printable(s.StoreError)))
	}
}

// liveHosts returns the number of hosts that others count on and that are not gone.
func liveHosts(s *api.Shared) int {
	if s.Failover == "strict" {
		return s.Live
	}
	return max(0, s.Live-s.Gone)
}

// printHosts prints what the ledger knows of the hosts.
func printHosts(p *term.Printer, s api.Shared) {
	if s.Ledger == nil {
		p.Line("The hosts are unknown: %s.", api.Printable(cmp.Or(s.LedgerError, "the ledger was not queried")))
		return
	}
	if !s.Ledger.Settled {
		p.Line("The ledger began %s ago, and does not know the use of all hosts yet.", term.Seconds(s.Ledger.Age))
	}
	t := term.NewTable("HOST", "STATE", ">LAST CALL", ">LEASE LEFT", "LIMITS", "VERSION")
	for _, h := range s.Ledger.Hosts {
		row := []string{api.Printable(h.Name), h.State, term.Seconds(h.Age) + " ago", "-", "same", api.Printable(h.Version)}
		switch {
		case h.State == "absent":
			row[1] = p.Yellow(fmt.Sprintf("absent, 1/%d kept", s.Hosts))
		case h.State == "gone":
			row[2], row[4] = "-", "-"
			if s.Failover == "strict" {
				row[1] = fmt.Sprintf("gone, 1/%d kept", s.Hosts)
			}
		case h.LeaseLeft > 0:
			row[3] = term.Seconds(h.LeaseLeft)
		}
		if h.Differs {
			row[4] = p.Red("differ")
		}
		if h.Name == s.Name {
			row[0] += " (this host)"
		}
		t.Add(row...)
	}
	p.Section(t)
	if n := s.Ledger.Unknown; n > 0 {
		p.Line("%s unknown yet. 1/%d of each shared limit is kept for each.", term.Plural(int64(n), "more host"), s.Hosts)
	}
	for _, d := range s.Differences {
		p.Line("%s differs at %s: here %s; there %s", api.Printable(cmp.Or(d.Limit, "a limit")), api.Printable(d.Host),
			api.Printable(cmp.Or(d.Here, "?")), api.Printable(cmp.Or(d.There, "?")))
	}
}

// addSharedLimit adds the rows of a limit.
func addSharedLimit(t *term.Table, s api.Shared, l api.SharedLimit) {
	name := api.Printable(l.Limit)
	ofSlots := func(b api.SharedBucket) bool { return b.Slots }
	switch {
	case l.MaxConnections == 0:
	case l.Key != "all":
		t.Add(name, "cold ones", fmt.Sprintf("%d of %s", l.HostConnections, slotsText(l.MaxConnections)), "", "", "")
	case !slices.ContainsFunc(l.Buckets, ofSlots):
		t.Add(name, "connections", fmt.Sprintf("%d of %s", l.HostConnections, slotsText(l.MaxConnections)), "", "", "")
	}
	if l.Key != "all" {
		if l.Rate+l.Packets > 0 {
			t.Add(name, "cold ones", shareText(l, l.ColdShare, false), "", "", "")
		}
		if l.NewConnections > 0 {
			t.Add(name, "cold ones", shareText(l, l.ColdShare, true), "", "", "")
		}
	}
	for _, b := range l.Buckets {
		want := ""
		if b.Hot && !b.Tickets {
			want = partOf(l, b, b.Want)
		}
		t.Add(name, api.Printable(b.Key), bucketText(l, b), want, bucketState(b), othersText(s.Name, l, b))
	}
	if more := l.HotBuckets - len(l.Buckets); more > 0 {
		t.Add(name, fmt.Sprintf("and %d more hot ones", more), "", "", "", "")
	}
}

// bucketText formats what this host may use of a bucket: "12 of 40 slots", or as shareText does.
func bucketText(l api.SharedLimit, b api.SharedBucket) string {
	if b.Slots {
		return fmt.Sprintf("%s of %s", partOf(l, b, b.Share), slotsText(l.MaxConnections))
	}
	if b.Tickets {
		return shareText(l, b.Share, true) + ", in turn"
	}
	return shareText(l, b.Share, b.NewConnections)
}

// partOf formats a share of a bucket: "31%", or a number of slots.
func partOf(l api.SharedLimit, b api.SharedBucket, share float64) string {
	if b.Slots {
		return fmt.Sprint(math.Round(share * float64(l.MaxConnections)))
	}
	return term.Percent(share)
}

func slotsText(n int) string { return term.Plural(int64(n), "slot") }

// shareText formats a share of the values of l: "31% of 80Mbit/s = 24.8Mbit/s".
func shareText(l api.SharedLimit, share float64, newConnections bool) string {
	if newConnections {
		return fmt.Sprintf("%s of %s = %s new connections", term.Percent(share), term.PerSecond(l.NewConnections), term.PerSecond(share*l.NewConnections))
	}
	return fmt.Sprintf("%s of %s = %s", term.Percent(share), ratesText(l.Rate, l.Packets), ratesText(share*l.Rate, share*l.Packets))
}

// ratesText formats the rates of a limit, of which one may be 0: "80Mbit/s, 2000/s".
func ratesText(rate, packets float64) string {
	var all []string
	if rate > 0 || packets == 0 {
		all = append(all, term.Rate(rate))
	}
	if packets > 0 {
		all = append(all, term.Number(packets)+"pps")
	}
	return strings.Join(all, ", ")
}

func bucketState(b api.SharedBucket) string {
	state := "hot"
	switch {
	case !b.Hot:
		return "cold"
	case b.Short && b.Tight:
		state += ", short, tight"
	case b.Short:
		state += ", short"
	case b.Tight:
		state += ", tight"
	}
	return state
}

// othersText formats what the other hosts have of a bucket.
func othersText(name string, l api.SharedLimit, b api.SharedBucket) string {
	var all []string
	for _, h := range b.Holders {
		if h.Host != name {
			all = append(all, fmt.Sprintf("%s %s", api.Printable(h.Host), partOf(l, b, h.Share)))
		}
	}
	return strings.Join(all, ", ")
}
