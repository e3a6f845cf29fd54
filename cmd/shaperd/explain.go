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

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// question is the traffic to explain: a connection, or packets.
type question struct {
	source, destination netip.Addr // destination is invalid when it was not given
	protocol            shaper.Protocol
	address             netip.Addr // requested by the client; invalid when it was not given
	port                uint16
	listener            string // "" means the one that accepts it
	attach              string // "" means a listener
}

func explainCommand(e env) *cobra.Command {
	var file string
	var ask control.ExplainRequest
	cmd := &cobra.Command{
		Use:   "explain --source IP --to tcp|udp/[IP:]PORT [--listener NAME | --attach NAME [--destination IP]]",
		Short: "Explain which limits apply to a connection, their state, and the bottleneck",
		Long: `Explain which limits apply to a connection from a source, in which buckets, and which
one is the bottleneck; with --attach, to packets at an attachment. The running daemon
adds the state of each bucket and when the next unit may leave. When several listeners
accept the port, name one, or the address that the client connects to. With --config,
explain a configuration file; this needs no daemon.`,
		Example: `  shaperd explain --source 192.0.2.7 --to tcp/5432
  shaperd explain --source 192.0.2.7 --to tcp/203.0.113.1:5432
  shaperd explain --config shaperd.toml --source 192.0.2.7 --to tcp/5432
  shaperd explain --attach plant --source 10.1.2.3 --destination 10.40.0.7 --to tcp/502`,
		Annotations: jsonAnnotations,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			q, err := parseQuestion(ask)
			if err != nil {
				return err
			}
			if file == "" {
				return explainFromDaemon(cmd.Context(), e, *q)
			}
			if e.flags.json {
				return usageError{errors.New("explain does not support --json with --config")}
			}
			l, err := load(file)
			if err != nil {
				return err
			}
			p, err := l.compile(shaper.New(1))
			if err != nil {
				return err
			}
			return explainFromConfig(e, l.config, p, *q)
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "explain this configuration `file`, not the running daemon")
	cmd.Flags().StringVar(&ask.Source, "source", "", "`address` of the client")
	cmd.Flags().StringVar(&ask.To, "to", "", "`protocol/port` that the client connects to, such as tcp/5432 or tcp/192.0.2.1:5432; icmp is for attachments")
	cmd.Flags().StringVar(&ask.Listener, "listener", "", "`name` of the listener, when several accept the port")
	cmd.Flags().StringVar(&ask.Attach, "attach", "", "`name` of an attachment: explain packets there")
	cmd.Flags().StringVar(&ask.Destination, "destination", "", "destination `address` of packets at the attachment")
	return cmd
}

// parseQuestion parses a question. Errors name the flags of "explain".
func parseQuestion(ask control.ExplainRequest) (*question, error) {
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
		return nil, usageError{errors.New("--listener and --attach cannot be combined")}
	case q.attach != "" && q.address.IsValid():
		return nil, usageError{errors.New("--to: with --attach, use --destination to name the address")}
	case q.address.IsValid() && q.source.Is4() != q.address.Is4():
		return nil, usageError{fmt.Errorf("--source %v and --to %v: must be of the same address family", q.source, q.address)}
	}
	if ask.Destination == "" {
		return q, nil
	}
	if ask.Attach == "" {
		return nil, usageError{errors.New("--destination requires --attach")}
	}
	if q.destination, err = parseAddr("destination", ask.Destination); err != nil {
		return nil, err
	}
	if q.source.Is4() != q.destination.Is4() {
		return nil, usageError{fmt.Errorf("--source %v and --destination %v: must be of the same address family", q.source, q.destination)}
	}
	return q, nil
}

func parseAddr(flag, s string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(s)
	if err != nil {
		return addr, usageError{fmt.Errorf("--%s %q: must be an IPv4 or IPv6 address", flag, s)}
	}
	return addr.Unmap().WithZone(""), nil
}

// parseTo parses --to.
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
		return usageError{fmt.Errorf("--to %q: must be a protocol and a port, such as tcp/5432 or udp/53%s", s, or)}
	}
	q.protocol, q.port = shaper.UDP, uint16(port)
	if name == "tcp" {
		q.protocol = shaper.TCP
	}
	return nil
}

// target formats protocol, address and port as --to takes them.
func (q *question) target() string {
	switch {
	case q.port == 0:
		return q.protocol.String()
	case q.address.IsValid():
		return fmt.Sprintf("%v/%v", q.protocol, netip.AddrPortFrom(q.address, q.port))
	}
	return fmt.Sprintf("%v/%d", q.protocol, q.port)
}

// destinationText formats the destination of the packets or the connection.
func (q *question) destinationText() string {
	if q.destination.IsValid() {
		return fmt.Sprintf("%v, %s", q.destination, q.target())
	}
	return q.target()
}

// explanation is the answer to a question, with the values it was computed from.
type explanation struct {
	api.Explanation
	flow   shaper.Flow
	route  shaper.Route
	attach *shaper.Attachment // nil at a listener
}

// answer explains q by the configuration c, which was compiled to p.
func (q *question) answer(c *config.Config, p *shaper.Policy) (*explanation, error) {
	x := &explanation{flow: shaper.Flow{Source: q.source, Destination: q.destination, Port: q.port, Protocol: q.protocol}}
	x.Source, x.To = q.source.String(), q.destinationText()
	x.Limits, x.Bottlenecks, x.Connections = []api.LimitBucket{}, []api.Bottleneck{}, []api.Connection{}
	f := &x.flow
	if q.attach == "" {
		l, err := findListener(c, q)
		if err != nil {
			return nil, err
		}
		x.Listener, f.Origin = l.Name, p.ListenerIndex(l.Name)
	} else {
		var err error
		if x.attach, err = findAttachment(c, p, q); err != nil {
			return nil, err
		}
		x.Attachment, f.Origin = q.attach, p.AttachmentIndex(q.attach)
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
		x.Limits = append(x.Limits, api.LimitBucket{
			Limit: l.Name, Key: p.Describe(i, f, x.route), Direction: direction, Summary: config.Summary(l), Mode: shaper.ModeName(observe),
		})
	}
	x.findBottlenecks(p)
	return x, nil
}

// explainFromConfig explains q by a configuration, and prints the answer.
func explainFromConfig(e env, c *config.Config, p *shaper.Policy, q question) error {
	x, err := q.answer(c, p)
	if err != nil {
		return err
	}
	where := fmt.Sprintf("listener %q", x.Listener)
	if a := x.attach; a != nil {
		where = fmt.Sprintf("attachment %q, %v of %s, mode %v", a.Name, a.Direction, strings.Join(a.Interfaces, ", "), a.EffectiveMode())
	}
	fmt.Fprintf(e.stdout, "%v to %s: %s", x.Source, x.To, where)
	switch {
	case x.ASN != 0:
		fmt.Fprintf(e.stdout, ", %s", asnLabel(x.ASN, x.ASName))
	case len(c.ASN.Files) > 0:
		fmt.Fprint(e.stdout, ", unknown AS")
	}
	fmt.Fprintln(e.stdout)
	if len(x.Limits) == 0 {
		fmt.Fprintln(e.stdout, "No limit matches.")
		return nil
	}
	fmt.Fprintln(e.stdout)
	w := tabwriter.NewWriter(e.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "LIMIT\tBUCKET\tDIRECTION\tLIMITS\tMODE")
	for _, l := range x.Limits {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", l.Limit, l.Key, l.Direction, l.Summary, l.Mode)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(e.stdout)
	if x.attach != nil && x.attach.Observe {
		fmt.Fprintln(e.stdout, "The attachment observes: nothing is delayed or dropped.")
		return nil
	}
	for _, b := range x.Bottlenecks {
		fmt.Fprintf(e.stdout, "%s: bottleneck is %q.\n", b.Resource, b.Limit)
	}
	return nil
}

// findListener returns the listener that accepts a connection. As in the kernel, an exact
// address takes precedence over a wildcard.
func findListener(c *config.Config, q *question) (*config.Listen, error) {
	if q.listener != "" && !slices.ContainsFunc(c.Listen, func(l config.Listen) bool { return l.Name == q.listener }) {
		return nil, fmt.Errorf("unknown listener %q", q.listener)
	}
	var exact, any []*config.Listen // that accept it
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
		return nil, usageError{fmt.Errorf("%d listeners accept %s: %s: use --listener to name one, or --to %v/ADDRESS:%d to name an address",
			len(any), q.target(), strings.Join(where, ", "), q.protocol, q.port)}
	case q.listener != "":
		return nil, fmt.Errorf("listener %q does not accept %s from %v", q.listener, q.destinationText(), q.source)
	case len(c.Attach) > 0:
		return nil, fmt.Errorf("no listener accepts %s from %v; for packets at an attachment, use --attach", q.destinationText(), q.source)
	}
	return nil, fmt.Errorf("no listener accepts %s from %v", q.destinationText(), q.source)
}

// findAttachment returns the attachment that q names.
func findAttachment(c *config.Config, p *shaper.Policy, q *question) (*shaper.Attachment, error) {
	n := slices.IndexFunc(c.Attach, func(a shaper.Attachment) bool { return a.Name == q.attach })
	if n < 0 {
		return nil, fmt.Errorf("unknown attachment %q", q.attach)
	}
	for i := range p.OriginSet(p.AttachmentIndex(q.attach)).All {
		if l := p.Limit(i); len(l.Match.Destination) > 0 && !q.destination.IsValid() {
			return nil, usageError{fmt.Errorf("limit %q matches destinations: use --destination to name one", l.Name)}
		}
	}
	return &c.Attach[n], nil
}

// findBottlenecks finds, for each limited quantity, the limit that a source which sends ever
// more reaches first.
func (x *explanation) findBottlenecks(p *shaper.Policy) {
	least := func(what string, set shaper.Set, value func(*shaper.Limit) float64) {
		best := -1
		for i := range set.All {
			l := p.Limit(i)
			if v := value(l); !l.Observe && v > 0 && (best < 0 || v < value(p.Limit(best))) {
				best = i
			}
		}
		if best >= 0 {
			x.Bottlenecks = append(x.Bottlenecks, api.Bottleneck{Resource: what, Limit: p.Limit(best).Name})
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
	least("Connections in flight", r.Limits(), func(l *shaper.Limit) float64 { return float64(l.MaxConnections) })
	least("New connections", r.Limits(), func(l *shaper.Limit) float64 { return l.NewConnections.PerSecond() })
}
