package cli

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/explain"
	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/internal/term"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

func planCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "plan FILE",
		Short: "Show the changes that a reload would make",
		Long: `Compare a configuration file with the configuration of the running daemon, and show the
changes that a reload would make: the keys that change, and the limits that change for
sources that have connections or flows now. Nothing is changed. Both sides exclude the
overrides of operators. Exits with 1 if a reload would refuse the file.`,
		Example: `  shaperd plan /etc/shaperd/shaperd.toml
  shaperd plan new.toml && cp new.toml /etc/shaperd/shaperd.toml && shaperd reload`,
		Annotations: jsonAnnotations,
		Args:        wantArgs("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			r := check(args[0])
			if !r.OK {
				if err := r.print(e); err != nil {
					return err
				}
				return errInvalidConfig
			}
			changes, err := comparePlan(cmd.Context(), e.client(), r.loaded)
			if err != nil {
				return err
			}
			if err := e.show(changes, changes.print); err != nil {
				return err
			}
			if changes.Refused != "" {
				return fmt.Errorf("a reload would fail: %s", changes.Refused)
			}
			return nil
		},
	}
}

// planChanges is what a reload would change.
type planChanges struct {
	Old     string          `json:"old"` // revision
	New     string          `json:"new"`
	Refused string          `json:"refused,omitempty"` // why a reload would fail
	Tables  []config.Change `json:"tables"`
	Sources int             `json:"sources"` // with connections or flows that were compared
	Skipped int             `json:"skipped"` // connections and flows that were not: they are too many, or of an earlier configuration
	Changed []sourceChanges `json:"changed"`
}

// sourceChanges is what changes alike for some sources at a listener.
type sourceChanges struct {
	Listener    string   `json:"listener"`
	Sources     []string `json:"sources"`
	Connections int      `json:"connections"` // and flows
	Changes     []string `json:"changes"`
}

// maxPlanned is how many connections and flows are compared.
const maxPlanned = 10_000

func comparePlan(ctx context.Context, c *api.Client, next *plan.Plan) (*planChanges, error) {
	running, err := c.Configuration(ctx)
	if err != nil {
		return nil, err
	}
	var files config.Files
	for _, f := range running.Files {
		files.Add(f.Path, f.Text)
	}
	was, err := plan.LoadFiles(&files, nil)
	if err != nil {
		return nil, fmt.Errorf("the configuration of the daemon, with the present state of the files that it names: %w", err)
	}
	found, err := c.Connections(ctx, api.ConnectionQuery{Top: maxPlanned})
	if err != nil {
		return nil, err
	}
	changes := &planChanges{
		Old: running.Revision, New: next.Revision(), Tables: config.Diff(was.Config, next.Config), Skipped: found.Total - len(found.Connections), Changed: []sourceChanges{},
	}
	if err := was.CheckReload(next); err != nil {
		changes.Refused = err.Error()
	}
	var sides [2]explain.Side
	for i, p := range []*plan.Plan{was, next} {
		if p, err = p.At(time.Now()); err != nil {
			return nil, err
		}
		policy, err := p.Compile(shaper.New(1))
		if err != nil {
			return nil, err
		}
		sides[i] = explain.Side{Config: p.Config, Policy: policy}
	}
	changes.compareSources(found.Connections, sides[0], sides[1])
	return changes, nil
}

// compareSources compares what the sources of connections get.
func (p *planChanges) compareSources(all []api.Connection, was, is explain.Side) {
	counts := map[explain.Question]int{}
	sources := map[netip.Addr]bool{}
	for _, c := range all {
		source, err := netip.ParseAddrPort(c.Source)
		q := explain.Question{Source: source.Addr().Unmap(), Protocol: shaper.TCP, Port: c.Port, Listener: c.Listener, AnyBucket: true}
		if c.Protocol == shaper.UDP.String() {
			q.Protocol = shaper.UDP
		}
		if err == nil {
			counts[q]++
			sources[q.Source] = true
		}
	}
	p.Sources = len(sources)
	alike := map[string]*sourceChanges{}
	for q, n := range counts {
		lines, err := q.Compare(was, is)
		if err != nil {
			p.Skipped += n
		}
		if len(lines) == 0 {
			continue
		}
		key := q.Listener + "\n" + strings.Join(lines, "\n")
		if alike[key] == nil {
			alike[key] = &sourceChanges{Listener: q.Listener, Changes: lines}
		}
		c := alike[key]
		c.Connections += n
		c.Sources = append(c.Sources, q.Source.String())
	}
	for _, c := range alike {
		slices.Sort(c.Sources)
		c.Sources = slices.Compact(c.Sources)
		p.Changed = append(p.Changed, *c)
	}
	slices.SortFunc(p.Changed, func(a, b sourceChanges) int {
		if a.Connections != b.Connections {
			return b.Connections - a.Connections
		}
		return strings.Compare(a.Listener+strings.Join(a.Changes, ""), b.Listener+strings.Join(b.Changes, ""))
	})
}

// maxNamed is how many sources are named of those for which the same changes.
const maxNamed = 5

func (p *planChanges) print(out *term.Printer) {
	switch {
	case p.Old == p.New:
		out.Line("Nothing changes: revision %s is effective. The files that it names, such as those of groups, were not compared.", p.Old)
		return
	case len(p.Tables) == 0:
		out.Line("From revision %s to %s: only the order of tables changes.", p.Old, p.New)
	default:
		out.Line("From revision %s to %s:", p.Old, p.New)
	}
	for _, t := range p.Tables {
		out.Line("")
		switch {
		case t.Removed:
			out.Line("%s  is removed", api.Printable(t.Table))
			continue
		case t.Added:
			out.Line("%s  is added", api.Printable(t.Table))
		default:
			out.Line("%s", api.Printable(t.Table))
		}
		for _, k := range t.Keys {
			switch {
			case k.Old == "":
				out.Line("  %-20s %s", k.Key, api.Printable(k.New))
			case k.New == "":
				out.Line("  %-20s %s  ->  not set", k.Key, api.Printable(k.Old))
			default:
				out.Line("  %-20s %s  ->  %s", k.Key, api.Printable(k.Old), api.Printable(k.New))
			}
		}
	}
	out.Line("")
	if len(p.Changed) == 0 {
		out.Line("For the %d sources with connections or flows through listeners now, nothing changes.", p.Sources)
	} else {
		out.Line("Sources with connections or flows through listeners now, of %d in all:", p.Sources)
	}
	for _, c := range p.Changed {
		named := strings.Join(c.Sources[:min(len(c.Sources), maxNamed)], ", ")
		if more := len(c.Sources) - maxNamed; more > 0 {
			named += fmt.Sprintf(" and %d others", more)
		}
		out.Line("  %s, at listener %q, with %d:", named, c.Listener, c.Connections)
		for _, line := range c.Changes {
			out.Line("    %s", api.Printable(line))
		}
	}
	if p.Skipped > 0 {
		out.Line("%d other connections and flows were not compared: they are too many, or belong to an earlier configuration.", p.Skipped)
	}
}
