package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"shaperd/control"
	"shaperd/shaper"
	"shaperd/shaper/config"
)

// question is what is asked about: a connection, or packets.
type question struct {
	source, destination netip.Addr // the latter is invalid when nobody said
	protocol            shaper.Protocol
	port                uint16
	attach              string // "" asks for a listener
}

func explainCommand(e env) *cobra.Command {
	var file, source, destination, to, attach string
	cmd := &cobra.Command{
		Use:   "explain --source IP --to tcp|udp/PORT [--attach NAME [--destination IP]]",
		Short: "Tell which limits a connection is under, in what state, and which binds first",
		Long: `Tell which limits a connection of a source would be under, in which buckets, and which
binds first; with --attach, packets at an attachment. The running daemon is asked, and
tells the present state of the buckets and when the next unit would leave. With
--config, a file is asked instead, and no daemon is needed.`,
		Example: `  shaperd explain --source 192.0.2.7 --to tcp/5432
  shaperd explain --config shaperd.toml --source 192.0.2.7 --to tcp/5432
  shaperd explain --attach plant --source 10.1.2.3 --destination 10.40.0.7 --to tcp/502`,
		Annotations: withJSON,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			q, err := parseQuestion(control.Question{Source: source, To: to, Attach: attach, Destination: destination})
			if err != nil {
				return err
			}
			if file == "" {
				return explainLive(cmd.Context(), e, *q)
			}
			if e.flags.json {
				return usageError{errors.New("--json: with --config, explain prints no JSON")}
			}
			l, err := load(file)
			if err != nil {
				return err
			}
			p, err := l.compile(shaper.New(1))
			if err != nil {
				return err
			}
			return explain(e, l.config, p, *q)
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "configuration `file` to ask instead of the running daemon")
	cmd.Flags().StringVar(&source, "source", "", "`address` of the client")
	cmd.Flags().StringVar(&to, "to", "", "`protocol/port` that the client asks for, such as tcp/5432; or icmp, at an attachment")
	cmd.Flags().StringVar(&attach, "attach", "", "`name` of an attachment: tell about packets there, not about a listener's connections")
	cmd.Flags().StringVar(&destination, "destination", "", "`address` that packets at the attachment are for")
	return cmd
}

// parseQuestion reads a question. What is wrong is told by the flags of "explain".
func parseQuestion(ask control.Question) (*question, error) {
	q := &question{attach: ask.Attach}
	var err error
	if q.source, err = parseAddr("source", ask.Source); err != nil {
		return nil, err
	}
	if q.protocol, q.port, err = parseTo(ask.To, ask.Attach != ""); err != nil {
		return nil, err
	}
	if ask.Destination == "" {
		return q, nil
	}
	if ask.Attach == "" {
		return nil, usageError{errors.New("--destination is for packets at an attachment: name it with --attach")}
	}
	if q.destination, err = parseAddr("destination", ask.Destination); err != nil {
		return nil, err
	}
	if q.source.Is4() != q.destination.Is4() {
		return nil, usageError{fmt.Errorf("--source %v and --destination %v: both must be IPv4 or IPv6", q.source, q.destination)}
	}
	return q, nil
}

func parseAddr(flag, s string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(s)
	if err != nil {
		return addr, usageError{fmt.Errorf("--%s %q: an IPv4 or IPv6 address is needed", flag, s)}
	}
	return addr.Unmap().WithZone(""), nil
}

func parseTo(s string, attached bool) (shaper.Protocol, uint16, error) {
	if attached && s == shaper.ICMP.String() {
		return shaper.ICMP, 0, nil
	}
	name, number, ok := strings.Cut(s, "/")
	port, err := strconv.ParseUint(number, 10, 16)
	if !ok || err != nil || port == 0 || name != "tcp" && name != "udp" {
		or := ""
		if attached {
			or = ", or icmp"
		}
		return 0, 0, usageError{fmt.Errorf("--to %q: a protocol and a port are needed, such as tcp/5432 or udp/53%s", s, or)}
	}
	if name == "tcp" {
		return shaper.TCP, uint16(port), nil
	}
	return shaper.UDP, uint16(port), nil
}

// service writes what is asked for, as --to has it.
func (q *question) service() string {
	if q.port == 0 {
		return q.protocol.String()
	}
	return fmt.Sprintf("%v/%d", q.protocol, q.port)
}

// to writes what the packets or the connection are for.
func (q *question) to() string {
	if q.destination.IsValid() {
		return fmt.Sprintf("%v, %s", q.destination, q.service())
	}
	return q.service()
}

// explained is the answer to a question, and what it is about.
type explained struct {
	control.Explanation
	flow   shaper.Flow
	route  shaper.Route
	attach *config.Attach // nil at a listener
}

// answer tells what c, compiled to p, says to q.
func (q *question) answer(c *config.Config, p *shaper.Policy) (*explained, error) {
	x := &explained{flow: shaper.Flow{Source: q.source, Destination: q.destination, Port: q.port, Protocol: q.protocol}}
	x.Source, x.To = q.source.String(), q.to()
	x.Limits, x.BindsFirst, x.Connections = []control.BucketOf{}, []control.Binding{}, []control.Connection{}
	f := &x.flow
	if q.attach == "" {
		l := listener(c, q)
		if l == nil {
			if len(c.Attach) > 0 {
				return nil, fmt.Errorf("no listener takes %s from %v: for packets at an attachment, name it with --attach", q.to(), q.source)
			}
			return nil, fmt.Errorf("no listener takes %s from %v", q.to(), q.source)
		}
		x.Listener, f.Listen = l.Name, p.ListenIndex(l.Name)
	} else {
		var err error
		if x.attach, err = attachment(c, p, q); err != nil {
			return nil, err
		}
		x.Attachment, f.Listen = q.attach, p.AttachIndex(q.attach)
	}
	x.route = p.Route(f)
	if x.ASN = x.route.ASN; x.ASN == 0 {
		x.ASN = p.ASN(q.source)
	}
	x.ASName = p.ASName(x.ASN)
	for i := range x.route.Limits().All {
		l := p.Limit(i)
		direction, observe := l.Direction.String(), l.Observe
		if x.attach != nil {
			direction, observe = x.attach.Direction.String(), l.Observe || x.attach.Mode == config.Observe && !l.Always
		}
		x.Limits = append(x.Limits, control.BucketOf{
			Limit: l.Name, Key: p.Describe(i, f, x.route), Direction: direction, HeldTo: heldTo(l), Mode: mode(observe),
		})
	}
	x.bindsFirst(p)
	return x, nil
}

// explain prints what c says to q.
func explain(e env, c *config.Config, p *shaper.Policy, q question) error {
	x, err := q.answer(c, p)
	if err != nil {
		return err
	}
	where := fmt.Sprintf("listener %q", x.Listener)
	if a := x.attach; a != nil {
		where = fmt.Sprintf("attachment %q, %v of %s, mode %v", a.Name, a.Direction, strings.Join(a.Interfaces, ", "), a.Mode)
	}
	fmt.Fprintf(e.stdout, "%v to %s: %s", x.Source, x.To, where)
	switch {
	case x.ASN != 0:
		fmt.Fprintf(e.stdout, ", %s", system(x.ASN, x.ASName))
	case len(c.ASN.Files) > 0:
		fmt.Fprint(e.stdout, ", unknown AS")
	}
	fmt.Fprintln(e.stdout)
	if len(x.Limits) == 0 {
		fmt.Fprintln(e.stdout, "No limit matches: nothing is held back.")
		return nil
	}
	fmt.Fprintln(e.stdout)
	w := tabwriter.NewWriter(e.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "LIMIT\tBUCKET\tDIRECTION\tHELD TO\tMODE")
	for _, l := range x.Limits {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", l.Limit, l.Key, l.Direction, l.HeldTo, l.Mode)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(e.stdout)
	if x.attach != nil && x.attach.Mode == config.Observe {
		fmt.Fprintln(e.stdout, "The attachment observes: nothing is held back.")
		return nil
	}
	for _, b := range x.BindsFirst {
		fmt.Fprintf(e.stdout, "%s: %q binds first.\n", b.What, b.Limit)
	}
	return nil
}

// listener returns the listener that takes a connection, or nil.
func listener(c *config.Config, q *question) *config.Listen {
	for i, l := range c.Listen {
		for _, a := range l.Addresses {
			if a.Protocol == q.protocol && a.Addr.Is4() == q.source.Is4() && a.Ports.First <= q.port && q.port <= a.Ports.Last {
				return &c.Listen[i]
			}
		}
	}
	return nil
}

// attachment returns the attachment that q names.
func attachment(c *config.Config, p *shaper.Policy, q *question) (*config.Attach, error) {
	n := slices.IndexFunc(c.Attach, func(a config.Attach) bool { return a.Name == q.attach })
	if n < 0 {
		return nil, fmt.Errorf("there is no attachment %q", q.attach)
	}
	for i := range p.PlaceSet(p.AttachIndex(q.attach)).All {
		if l := p.Limit(i); len(l.Match.Destination) > 0 && !q.destination.IsValid() {
			return nil, usageError{fmt.Errorf("limit %q matches destinations: name one with --destination", l.Name)}
		}
	}
	return &c.Attach[n], nil
}

// heldTo writes what one bucket of l is held to.
func heldTo(l *shaper.Limit) string {
	var parts []string
	if l.Block {
		return "nothing: it blocks"
	}
	if l.Rate != 0 {
		s := config.FormatRate(l.Rate)
		if l.Overhead > 0 {
			s += " with " + config.FormatSize(uint64(l.Overhead)) + " a packet"
		}
		if l.Burst > 0 {
			s += " burst " + config.FormatSize(l.Burst)
		}
		parts = append(parts, s)
	}
	if l.Packets.N != 0 {
		s := config.FormatFrequency(l.Packets) + " packets"
		if l.BurstPackets > 0 {
			s += " burst " + strconv.FormatUint(l.BurstPackets, 10)
		}
		parts = append(parts, s)
	}
	if l.Rate != 0 || l.Packets.N != 0 {
		parts = append(parts, "queue "+l.MaxDelay.String())
	}
	if l.Connections != 0 {
		parts = append(parts, fmt.Sprintf("%d connections", l.Connections))
	}
	if l.NewConnections.N != 0 {
		parts = append(parts, config.FormatFrequency(l.NewConnections)+" new connections")
	}
	if l.Connections != 0 && !l.OfAttachments() || l.NewConnections.N != 0 {
		parts = append(parts, "wait "+l.MaxWait.String())
	}
	return strings.Join(parts, ", ")
}

// bindsFirst tells, for each thing that is limited, which limit a source that
// asks for ever more would meet first.
func (x *explained) bindsFirst(p *shaper.Policy) {
	least := func(what string, set shaper.Set, value func(*shaper.Limit) float64) {
		best := -1
		for i := range set.All {
			l := p.Limit(i)
			if v := value(l); !l.Observe && v > 0 && (best < 0 || v < value(p.Limit(best))) {
				best = i
			}
		}
		if best >= 0 {
			x.BindsFirst = append(x.BindsFirst, control.Binding{What: what, Limit: p.Limit(best).Name})
		}
	}
	rate := func(l *shaper.Limit) float64 { return float64(l.Rate) }
	packets := func(l *shaper.Limit) float64 { return l.Packets.PerSecond() }
	r := x.route
	if x.attach != nil {
		least("Bytes", r.ToDownstream, rate)
		least("Packets", r.ToDownstream, packets)
	} else {
		least("Bytes to the downstream", r.ToDownstream, rate)
		least("Bytes from the downstream", r.FromDownstream, rate)
		least("Packets to the downstream", r.ToDownstream, packets)
		least("Packets from the downstream", r.FromDownstream, packets)
	}
	least("Connections in flight", r.Limits(), func(l *shaper.Limit) float64 { return float64(l.Connections) })
	least("New connections", r.Limits(), func(l *shaper.Limit) float64 { return l.NewConnections.PerSecond() })
}
