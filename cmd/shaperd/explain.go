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
	address             netip.Addr // that it asks for; invalid when nobody said
	port                uint16
	listener            string // "" is the one that takes it
	attach              string // "" asks for a listener
}

func explainCommand(e env) *cobra.Command {
	var file string
	var ask control.Question
	cmd := &cobra.Command{
		Use:   "explain --source IP --to tcp|udp/[IP:]PORT [--listener NAME | --attach NAME [--destination IP]]",
		Short: "Tell which limits a connection is under, in what state, and which binds first",
		Long: `Tell which limits a connection of a source would be under, in which buckets, and which
binds first; with --attach, packets at an attachment. The running daemon is asked, and
tells the present state of the buckets and when the next unit would leave. Where
several listeners take the port, name one, or the address that the client asks for. With
--config, a file is asked instead, and no daemon is needed.`,
		Example: `  shaperd explain --source 192.0.2.7 --to tcp/5432
  shaperd explain --source 192.0.2.7 --to tcp/203.0.113.1:5432
  shaperd explain --config shaperd.toml --source 192.0.2.7 --to tcp/5432
  shaperd explain --attach plant --source 10.1.2.3 --destination 10.40.0.7 --to tcp/502`,
		Annotations: withJSON,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			q, err := parseQuestion(ask)
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
	cmd.Flags().StringVar(&ask.Source, "source", "", "`address` of the client")
	cmd.Flags().StringVar(&ask.To, "to", "", "`protocol/port` that the client asks for, such as tcp/5432 or tcp/192.0.2.1:5432; or icmp, at an attachment")
	cmd.Flags().StringVar(&ask.Listener, "listener", "", "`name` of the listener, where several take the port")
	cmd.Flags().StringVar(&ask.Attach, "attach", "", "`name` of an attachment: tell about packets there, not about a listener's connections")
	cmd.Flags().StringVar(&ask.Destination, "destination", "", "`address` that packets at the attachment are for")
	return cmd
}

// parseQuestion reads a question. What is wrong is told by the flags of "explain".
func parseQuestion(ask control.Question) (*question, error) {
	q := &question{listener: ask.Listener, attach: ask.Attach}
	var err error
	if q.source, err = parseAddr("source", ask.Source); err != nil {
		return nil, err
	}
	if err = q.parseTo(ask.To); err != nil {
		return nil, err
	}
	switch {
	case q.attach != "" && q.listener != "":
		return nil, usageError{errors.New("--listener and --attach: traffic meets one or the other")}
	case q.attach != "" && q.address.IsValid():
		return nil, usageError{errors.New("--to: at an attachment, name the address with --destination")}
	case q.address.IsValid() && q.source.Is4() != q.address.Is4():
		return nil, usageError{fmt.Errorf("--source %v and --to %v: both must be IPv4 or IPv6", q.source, q.address)}
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

// parseTo reads what the client asks for.
func (q *question) parseTo(s string) error {
	attached := q.attach != ""
	if attached && s == shaper.ICMP.String() {
		q.protocol = shaper.ICMP
		return nil
	}
	name, number, ok := strings.Cut(s, "/")
	if to, err := netip.ParseAddrPort(number); err == nil {
		q.address, number = to.Addr().Unmap().WithZone(""), strconv.Itoa(int(to.Port()))
	}
	port, err := strconv.ParseUint(number, 10, 16)
	if !ok || err != nil || port == 0 || name != "tcp" && name != "udp" {
		or := ""
		if attached {
			or = ", or icmp"
		}
		return usageError{fmt.Errorf("--to %q: a protocol and a port are needed, such as tcp/5432 or udp/53%s", s, or)}
	}
	q.protocol, q.port = shaper.UDP, uint16(port)
	if name == "tcp" {
		q.protocol = shaper.TCP
	}
	return nil
}

// service writes what is asked for, as --to has it.
func (q *question) service() string {
	switch {
	case q.port == 0:
		return q.protocol.String()
	case q.address.IsValid():
		return fmt.Sprintf("%v/%v", q.protocol, netip.AddrPortFrom(q.address, q.port))
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
		l, err := listener(c, q)
		if err != nil {
			return nil, err
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
			direction, observe = x.attach.Direction.String(), l.Observe || x.attach.Observe && !l.Always
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
		where = fmt.Sprintf("attachment %q, %v of %s, mode %v", a.Name, a.Direction, strings.Join(a.Interfaces, ", "), attachMode(a))
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
	if x.attach != nil && x.attach.Observe {
		fmt.Fprintln(e.stdout, "The attachment observes: nothing is held back.")
		return nil
	}
	for _, b := range x.BindsFirst {
		fmt.Fprintf(e.stdout, "%s: %q binds first.\n", b.What, b.Limit)
	}
	return nil
}

// listener returns the listener that takes a connection. An address takes what is for it
// before one that takes all, as in the kernel.
func listener(c *config.Config, q *question) (*config.Listen, error) {
	if q.listener != "" && !slices.ContainsFunc(c.Listen, func(l config.Listen) bool { return l.Name == q.listener }) {
		return nil, fmt.Errorf("there is no listener %q", q.listener)
	}
	var exact, any []*config.Listen // those that take it
	var where []string
	for i := range c.Listen {
		l := &c.Listen[i]
		if q.listener != "" && l.Name != q.listener {
			continue
		}
		for _, a := range l.Addresses {
			if a.Protocol != q.protocol || a.Addr.Is4() != q.source.Is4() || q.port < a.Ports.First || a.Ports.Last < q.port {
				continue
			}
			switch {
			case a.Addr == q.address:
				exact = append(exact, l)
			case !q.address.IsValid() || a.Addr.IsUnspecified():
				if !slices.Contains(any, l) {
					any = append(any, l)
					where = append(where, fmt.Sprintf("%q (%v)", l.Name, a))
				}
			}
		}
	}
	switch {
	case len(exact) > 0:
		return exact[0], nil
	case len(any) == 1:
		return any[0], nil
	case len(any) > 1:
		return nil, usageError{fmt.Errorf("%d listeners take %s: %s: name one with --listener, or an address with --to %v/ADDRESS:%d",
			len(any), q.service(), strings.Join(where, ", "), q.protocol, q.port)}
	case q.listener != "":
		return nil, fmt.Errorf("listener %q does not take %s from %v", q.listener, q.to(), q.source)
	case len(c.Attach) > 0:
		return nil, fmt.Errorf("no listener takes %s from %v: for packets at an attachment, name it with --attach", q.to(), q.source)
	}
	return nil, fmt.Errorf("no listener takes %s from %v", q.to(), q.source)
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
