package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
)

func connectionsCommand(e env) *cobra.Command {
	var q api.ConnectionQuery
	var limit *string
	var sort *enumFlag
	var top *int
	cmd := &cobra.Command{
		Use:   "connections",
		Short: "List connections and the limits that throttle them",
		Long: `List TCP connections and UDP flows with their source, stage, bytes, total time waited,
the limit that throttles them now, and the limit that throttled them longest.
"connections kill" resets connections.`,
		Example: `  shaperd connections --source 192.0.2.0/24 --sort waited
  shaperd connections --limit per-source --top 5
  shaperd connections kill 4711`,
		Annotations: jsonAnnotations,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			q.Limit, q.Sort, q.Top = *limit, sort.value, *top
			c := e.client()
			if err := checkQueryNames(cmd.Context(), c, q); err != nil {
				return err
			}
			all, err := c.Connections(cmd.Context(), q)
			if err != nil {
				return usageFromAPI(err)
			}
			return e.show(all, func(p *term.Printer) {
				p.Table(connectionsTable(all.Connections))
				if left := all.Total - len(all.Connections); left > 0 {
					p.Line("and %d more; use --top", left)
				} else if all.Total == 0 {
					p.Line("No connection matches.")
				}
			})
		},
	}
	limit = e.addLimitFlag(cmd, "of a limit that applies to them")
	cmd.Flags().StringVar(&q.Listener, "listener", "", "`name` of the listener")
	cmd.Flags().StringVar(&q.Source, "source", "", "source `prefix` or address")
	sort = addEnumFlag(cmd, "sort", "sort by", "bytes", "age", "waited", "idle")
	top = addTopFlag(cmd)
	cmd.AddCommand(killCommand(e))
	return cmd
}

// checkQueryNames returns an error when q names an unknown limit or listener: no connection
// would match.
func checkQueryNames(ctx context.Context, c *api.Client, q api.ConnectionQuery) error {
	if q.Limit != "" {
		if _, err := c.Limit(ctx, q.Limit); err != nil {
			return limitError(ctx, c, q.Limit, err)
		}
	}
	if q.Listener == "" {
		return nil
	}
	s, err := c.Status(ctx)
	if err != nil {
		return err
	}
	var names []string
	for _, l := range s.Listeners {
		names = append(names, l.Name)
	}
	if !slices.Contains(names, q.Listener) {
		return unknownName("listener", q.Listener, names)
	}
	return nil
}

func connectionsTable(all []api.Connection) *term.Table {
	header := []string{">ID", "SOURCE", "LISTENER", "DOWNSTREAM", "STAGE", ">AGE", ">IDLE", ">TO", ">FROM", ">WAITED", "THROTTLED BY", "MOSTLY BY", "AS"}
	classes := slices.ContainsFunc(all, func(c api.Connection) bool { return c.Class != "" })
	if classes {
		header = append(header, "CLASS")
	}
	t := term.NewTable(header...)
	for _, c := range all {
		row := []string{
			strconv.FormatUint(c.ID, 10), api.Printable(c.Source), fmt.Sprintf("%s %s/%d", c.Listener, c.Protocol, c.Port), api.Printable(c.Downstream), c.Stage,
			term.Seconds(c.Age), term.Seconds(c.Idle), term.Size(c.ToDownstream), term.Size(c.FromDownstream), term.Seconds(c.Waited), c.ThrottledBy, c.MostlyThrottledBy, asnLabel(c.ASN, c.ASName),
		}
		if classes {
			row = append(row, api.Printable(c.Class))
		}
		t.Add(row...)
	}
	return t
}

func killCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "kill ID...",
		Short: "Reset connections",
		Long: `Reset connections by their ID in "shaperd connections". If an ID is unknown, the
others are reset nevertheless.`,
		Example:     `  shaperd connections kill 4711 4712`,
		Annotations: jsonAnnotations,
		Args:        wantArgs("ID..."),
		RunE: func(cmd *cobra.Command, args []string) error {
			var ids []uint64
			for _, arg := range args {
				id, err := strconv.ParseUint(arg, 10, 64)
				if err != nil {
					return usageError{fmt.Errorf(`%q is not an ID: the first column of "shaperd connections" shows them`, arg)}
				}
				ids = append(ids, id)
			}
			ended, errs := []uint64{}, []error{}
			for _, id := range ids {
				if err := e.client().Kill(cmd.Context(), id); err != nil {
					errs = append(errs, fmt.Errorf("reset connection %d: %w", id, err))
					continue
				}
				ended = append(ended, id)
			}
			err := e.show(ended, func(p *term.Printer) {
				for _, id := range ended {
					p.Line("connection %d was reset", id)
				}
			})
			return errors.Join(append(errs, err)...)
		},
	}
}
