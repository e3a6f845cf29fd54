package cli

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
	"shaperd.dev/shaperd/shaper/config"
)

func quotaCommand(e env) *cobra.Command {
	top := 20
	cmd := &cobra.Command{
		Use:   "quota [LIMIT]",
		Short: "List the use of quotas; reset a quota",
		Long: `List the use of quotas in the present period, largest part first. "quota reset" resets a
quota.`,
		Example: `  shaperd quota
  shaperd quota a-month --top 5
  shaperd quota --json | jq '.quotas[] | select(.used >= .amount) | .key'`,
		Annotations:       jsonAnnotations,
		Args:              wantArgs("[LIMIT]"),
		ValidArgsFunction: e.completeLimits,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, limit := e.client(), ""
			if len(args) > 0 {
				limit = args[0]
				if _, err := c.Limit(cmd.Context(), limit); err != nil {
					return limitError(cmd.Context(), c, limit, err)
				}
			}
			all, err := c.Quotas(cmd.Context(), limit, top)
			if err != nil {
				return err
			}
			return e.show(all, func(p *term.Printer) { printQuotas(p, all) })
		},
	}
	cmd.Flags().IntVar(&top, "top", top, "show at most this `number` of quotas")
	cmd.AddCommand(resetQuotaCommand(e))
	return cmd
}

func resetQuotaCommand(e env) *cobra.Command {
	var source string
	cmd := &cobra.Command{
		Use:   "reset LIMIT",
		Short: "Reset the quota of a limit",
		Long: `Reset the use of a quota in the present period, as soon as the reset is in the file of
quotas. If the key of the limit has "source", name a source with --source. The log records
the author.`,
		Example:           `  shaperd quota reset a-month --source 192.0.2.7`,
		Annotations:       changeAnnotations,
		Args:              wantArgs("LIMIT"),
		ValidArgsFunction: e.completeLimits,
		RunE: func(cmd *cobra.Command, args []string) error {
			c := e.client()
			if err := c.ResetQuota(cmd.Context(), args[0], source); err != nil {
				return limitError(cmd.Context(), c, args[0], err)
			}
			return e.show(struct{}{}, func(p *term.Printer) {
				if source == "" {
					p.Line("The quota of limit %s is reset.", args[0])
				} else {
					p.Line("The quota of limit %s is reset for %s.", args[0], source)
				}
			})
		},
	}
	cmd.Flags().StringVar(&source, "source", "", "`address` of the source")
	return cmd
}

func printQuotas(p *term.Printer, all api.Quotas) {
	if all.Error != "" {
		p.Line("%s", p.Red("QUOTAS WAIT, because their file cannot be written: "+api.Printable(all.Error)))
	}
	if all.Total == 0 {
		p.Line("No quota is in use.")
		return
	}
	t := term.NewTable("LIMIT", "KEY", ">USED", ">OF", ">PART", "PERIOD", ">ENDS IN", "THEN")
	for _, q := range all.Quotas {
		then := "refuse"
		if q.Slow > 0 {
			then = config.FormatRate(uint64(8 * q.Slow))
		}
		if q.Used >= q.Amount {
			then = p.Red(then)
		}
		t.Add(api.Printable(q.Limit), api.Printable(cmp.Or(q.Key, "all")), quotaAmount(q.Unit, q.Used), quotaAmount(q.Unit, q.Amount),
			term.Percent(float64(q.Used)/float64(q.Amount)), api.Printable(q.Period), term.Seconds(q.Ends), then)
	}
	p.Table(t)
	if more := all.Total - len(all.Quotas); more > 0 {
		p.Line("and %d more", more)
	}
	if all.UsedUp > 0 {
		p.Line("%d of %d used up.", all.UsedUp, all.Total)
	}
}

// quotaAmount formats an amount of a unit.
func quotaAmount(unit string, n uint64) string {
	if unit == "bytes" {
		return term.Size(n)
	}
	return fmt.Sprint(n)
}

// quotaText says what was used of a quota.
func quotaText(q *api.Quota) string {
	until := "the period ends"
	if strings.HasSuffix(q.Period, "h") || strings.HasSuffix(q.Period, "min") {
		until = "a part of it may be free again"
	}
	return fmt.Sprintf("Quota of limit %q: %s of %s used, per %s; %s in %s.",
		api.Printable(q.Limit), quotaAmount(q.Unit, q.Used), quotaAmount(q.Unit, q.Amount), api.Printable(q.Period), until, term.Seconds(q.Ends))
}
