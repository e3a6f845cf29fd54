package main

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"shaperd/shaper"
	"shaperd/shaper/config"
)

func explainCommand(e env) *cobra.Command {
	var file, source, to string
	cmd := &cobra.Command{
		Use:   "explain --config FILE --source IP --to tcp|udp/PORT",
		Short: "Tell which limits a connection would be under, and which binds first",
		Args:  noArgs(""),
		RunE: func(*cobra.Command, []string) error {
			addr, err := netip.ParseAddr(source)
			if err != nil {
				return usageError{fmt.Errorf("--source %q: an IPv4 or IPv6 address is needed", source)}
			}
			protocol, port, err := parseTo(to)
			if err != nil {
				return err
			}
			l, err := load(file)
			if err != nil {
				return err
			}
			p, err := l.compile(shaper.New(1))
			if err != nil {
				return err
			}
			return explain(e, l.config, p, addr.Unmap().WithZone(""), protocol, port)
		},
	}
	cmd.Flags().StringVar(&file, "config", "/etc/shaperd/shaperd.toml", "configuration `file`")
	cmd.Flags().StringVar(&source, "source", "", "`address` of the client")
	cmd.Flags().StringVar(&to, "to", "", "`protocol/port` that the client asks for, such as tcp/5432")
	return cmd
}

func parseTo(s string) (shaper.Protocol, uint16, error) {
	name, number, ok := strings.Cut(s, "/")
	port, err := strconv.ParseUint(number, 10, 16)
	if !ok || err != nil || port == 0 || name != "tcp" && name != "udp" {
		return 0, 0, usageError{fmt.Errorf("--to %q: a protocol and a port are needed, such as tcp/5432 or udp/53", s)}
	}
	if name == "tcp" {
		return shaper.TCP, uint16(port), nil
	}
	return shaper.UDP, uint16(port), nil
}

func explain(e env, c *config.Config, p *shaper.Policy, source netip.Addr, protocol shaper.Protocol, port uint16) error {
	listen := -1
	for i, l := range c.Listen {
		for _, a := range l.Addresses {
			if a.Protocol == protocol && a.Addr.Is4() == source.Is4() && a.Ports.First <= port && port <= a.Ports.Last {
				listen = i
			}
		}
	}
	if listen < 0 {
		return fmt.Errorf("no listener takes %s/%d from %v", protocol, port, source)
	}
	f := shaper.Flow{Source: source, Port: port, Protocol: protocol, Listen: uint16(listen)}
	r := p.Route(&f)
	fmt.Fprintf(e.stdout, "%v to %s/%d: listener %q", source, protocol, port, c.Listen[listen].Name)
	switch {
	case r.ASN != 0:
		fmt.Fprintf(e.stdout, ", AS%d", r.ASN)
	case len(c.ASN.Files) > 0:
		fmt.Fprint(e.stdout, ", unknown AS")
	}
	fmt.Fprintln(e.stdout)
	if r.Limits() == 0 {
		fmt.Fprintln(e.stdout, "No limit matches: nothing is held back.")
		return nil
	}
	fmt.Fprintln(e.stdout)
	w := tabwriter.NewWriter(e.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "LIMIT\tBUCKET\tDIRECTION\tHELD TO\tMODE")
	for i := range r.Limits().All {
		l := p.Limit(i)
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", l.Name, p.Describe(i, &f, r), l.Direction, heldTo(l), mode(l.Observe))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(e.stdout)
	bindsFirst(e, p, r)
	return nil
}

// heldTo writes what one bucket of l is held to.
func heldTo(l *shaper.Limit) string {
	var parts []string
	if l.Rate != 0 {
		s := config.FormatRate(l.Rate)
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
	if l.Connections != 0 || l.NewConnections.N != 0 {
		parts = append(parts, "wait "+l.MaxWait.String())
	}
	return strings.Join(parts, ", ")
}

// bindsFirst tells, for each thing that is limited, which limit a source that
// asks for ever more would meet first.
func bindsFirst(e env, p *shaper.Policy, r shaper.Route) {
	least := func(what string, set shaper.Set, value func(*shaper.Limit) float64) {
		best := -1
		for i := range set.All {
			l := p.Limit(i)
			if v := value(l); !l.Observe && v > 0 && (best < 0 || v < value(p.Limit(best))) {
				best = i
			}
		}
		if best >= 0 {
			fmt.Fprintf(e.stdout, "%s: %q binds first.\n", what, p.Limit(best).Name)
		}
	}
	rate := func(l *shaper.Limit) float64 { return float64(l.Rate) }
	packets := func(l *shaper.Limit) float64 { return perSecond(l.Packets) }
	least("Bytes to the downstream", r.ToDownstream, rate)
	least("Bytes from the downstream", r.FromDownstream, rate)
	least("Packets to the downstream", r.ToDownstream, packets)
	least("Packets from the downstream", r.FromDownstream, packets)
	least("Connections in flight", r.Limits(), func(l *shaper.Limit) float64 { return float64(l.Connections) })
	least("New connections", r.Limits(), func(l *shaper.Limit) float64 { return perSecond(l.NewConnections) })
}

func perSecond(f shaper.Frequency) float64 {
	if f.N == 0 {
		return 0
	}
	return float64(f.N) / f.Per.Seconds()
}
