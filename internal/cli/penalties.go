package cli

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
	"shaperd.dev/shaperd/shaper"
)

func penaltiesCommand(e env) *cobra.Command {
	var remembered bool
	cmd := &cobra.Command{
		Use:   "penalties",
		Short: "List the sources that penalties block; end a penalty",
		Long: `List the sources that penalties block because a limit has refused them often, and the
sources that penalties with observe = true would block. With --all, also list the sources
whose block has ended: they are remembered, so that their next block is longer.

"shaperd blocks" lists the blocks of operators.

"penalties end" ends the penalty of a source.`,
		Example: `  shaperd penalties
  shaperd penalties end 192.0.2.7`,
		Annotations: jsonAnnotations,
		Args:        noArgs(`: use "penalties end SOURCE"`),
		RunE: func(cmd *cobra.Command, _ []string) error {
			all, err := e.client().Penalties(cmd.Context())
			if err != nil {
				return err
			}
			return e.showPenalties(all, remembered)
		},
	}
	cmd.Flags().BoolVar(&remembered, "all", false, "also list sources whose block has ended")
	cmd.AddCommand(endPenaltyCommand(e))
	return cmd
}

func endPenaltyCommand(e env) *cobra.Command {
	var limit *string
	cmd := &cobra.Command{
		Use:   "end SOURCE",
		Short: "End the penalty of a source",
		Long: `End the penalty of a source, which is an address or a prefix that "shaperd penalties
--all" lists, and reset the count of its refusals. Its next block is as long as a first
one.`,
		Example: `  shaperd penalties end 192.0.2.7
  shaperd penalties end 2001:db8::/64 --limit per-source`,
		Annotations: changeAnnotations,
		Args:        wantArgs("SOURCE"),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) (sources []string, _ cobra.ShellCompDirective) {
			all, err := e.client().Penalties(cmd.Context())
			for _, y := range all {
				sources = append(sources, y.Source)
			}
			if err != nil || len(args) > 0 {
				sources = nil
			}
			return sources, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			source, err := parsePrefix(args[0])
			if err != nil {
				return err
			}
			left, err := e.client().EndPenalty(cmd.Context(), source.String(), *limit)
			if err != nil {
				return err
			}
			return e.showPenalties(left, false)
		},
	}
	limit = e.addLimitFlag(cmd, "of the limit whose penalty ends (default: all limits)")
	return cmd
}

// showPenalties prints the sources of all that are blocked, or would be, and with remembered the others too.
func (e env) showPenalties(all []api.Penalty, remembered bool) error {
	return e.show(all, func(p *term.Printer) {
		t := term.NewTable("SOURCE", "LIMIT", "STATE", "SINCE", "UNTIL", ">TIMES")
		now := time.Now()
		for _, y := range all {
			if y.Active || remembered {
				t.Add(y.Source, y.Limit, penaltyState(y), term.Clock(y.Since, now), term.Clock(y.Until, now), fmt.Sprint(y.Times))
			}
		}
		if len(t.Rows) == 0 {
			p.Line("No source is penalized.")
		}
		p.Table(t)
	})
}

func penaltyState(y api.Penalty) string {
	switch {
	case !y.Active:
		return "ended"
	case y.Mode == shaper.Observe.String():
		return "would be blocked"
	}
	return "blocked"
}

// penalizedText says how many sources are blocked, or would be; "" if none.
func penalizedText(blocked, would int64) string {
	switch {
	case blocked > 0 && would > 0:
		return fmt.Sprintf("Penalties block %s, and would block %d more: see \"shaperd penalties\".", term.Plural(blocked, "source"), would)
	case blocked > 0:
		return fmt.Sprintf("Penalties block %s: see \"shaperd penalties\".", term.Plural(blocked, "source"))
	case would > 0:
		return fmt.Sprintf("Penalties would block %s: see \"shaperd penalties\".", term.Plural(would, "source"))
	}
	return ""
}

// explainPenalty says that a source is blocked, or would be.
func explainPenalty(y api.Penalty, now time.Time) string {
	verb := "PENALIZED"
	if y.Mode == shaper.Observe.String() {
		verb = "Would be penalized"
	}
	return fmt.Sprintf("%s by limit %q until %s: %s was refused too often by %s; block number %d in a row.", verb, y.Limit,
		term.Clock(y.Until, now), api.Printable(y.Source), term.Clock(y.Since, now), y.Times)
}

// penaltyCountText says how near the source is to the penalty of a limit, "" if it is not.
func penaltyCountText(l api.LimitBucket) string {
	y := l.Penalty
	switch {
	case y == nil:
		return ""
	case y.Exempt:
		return fmt.Sprintf("Excepted from the penalty of limit %q.", l.Limit)
	case y.Refusals > 0:
		return fmt.Sprintf("Penalty of limit %q: refused %d of %d times, for another %s.", l.Limit, y.Refusals, y.After, term.Seconds(y.Left))
	}
	return ""
}
