package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// Explanation is the answer to a question, with the values it was computed from.
type Explanation struct {
	api.Explanation
	Flow   shaper.Flow
	Route  shaper.Route
	Attach *shaper.Attachment // nil at a listener
}

// Answer explains q by the configuration c, which was compiled to p. Connections, and the state of
// buckets, are for the caller to add.
func (q *Question) Answer(c *config.Config, p *shaper.Policy) (*Explanation, error) {
	x := &Explanation{Flow: shaper.Flow{Source: q.Source, Destination: q.Destination, Port: q.Port, Protocol: q.Protocol, DSCP: q.DSCP, Mark: q.Mark, Cgroup: q.Cgroup}}
	x.Source, x.To = q.Source.String(), q.DestinationText()
	x.Limits, x.Bottlenecks, x.Connections = []api.LimitBucket{}, []api.Bottleneck{}, []api.Connection{}
	f := &x.Flow
	if q.Attach == "" {
		l, err := findListener(c, q)
		if err != nil {
			return nil, err
		}
		x.Listener, f.Origin, f.Destination = l.Name, p.ListenerIndex(l.Name), q.addressAt(l)
		if q.TLVType != 0 && (len(l.AcceptProxyFrom) == 0 || q.Protocol != shaper.TCP) {
			return nil, QuestionError{fmt.Errorf("--tlv: %v at listener %q has no PROXY header: set accept_proxy_from", q.Protocol, l.Name)}
		}
		if q.TLVType != 0 {
			f.TLVs = []shaper.TLV{p.NewTLV(q.TLVType, []byte(q.TLV))}
		}
		if f.Downstream, err = q.downstreamAt(l, p); err != nil {
			return nil, err
		}
	} else {
		var err error
		if x.Attach, err = findAttachment(c, p, q); err != nil {
			return nil, err
		}
		x.Attachment, f.Origin = q.Attach, p.AttachmentIndex(q.Attach)
	}
	if err := q.tellsBuckets(p, f); err != nil {
		return nil, err
	}
	x.Route = p.Route(f)
	if x.ASN = x.Route.ASN; x.ASN == 0 {
		x.ASN = p.ASN(q.Source)
	}
	x.ASName = p.ASName(x.ASN)
	if country := p.Country(q.Source); country != 0 {
		x.Country = country.String()
	}
	if x.Attach == nil && p.Classes() > 1 {
		c := p.Class(p.ClassOf(f, x.Route, false))
		x.Class = &api.Class{Name: c.Name, Weight: c.Weight, Priority: c.Priority}
	}
	for i := range p.Exempt(f).All {
		x.Exempt = append(x.Exempt, p.Limit(i).Name)
	}
	for i := range x.Route.Limits().All {
		key := p.Key(i, f, x.Route)
		l := p.LimitFor(i, &key)
		direction, observe := l.Direction.String(), l.Observe
		if x.Attach != nil {
			direction, observe = x.Attach.Direction.String(), l.Observe || x.Attach.Observe && !l.Always
		}
		own := *l // without those of others
		own.For, own.BySource = nil, nil
		slotFor := ""
		if l.SlotFor.InTurns() {
			slotFor = l.SlotFor.String()
		}
		var near *api.SourcePenalty
		if l.Penalty != nil {
			near = &api.SourcePenalty{Exempt: p.Penalizes(f.Source)>>i&1 == 0, After: l.Penalty.After.N}
		}
		reserved, reservedRate := 0, 0
		if x.Attach == nil {
			percent := l.ReservedFor(p.ClassState(p.ClassOf(f, x.Route, false)).Name)
			reserved = l.MaxConnections * percent / 100
			if l.HasRate() {
				reservedRate = percent
			}
		}
		x.Limits = append(x.Limits, api.LimitBucket{
			Penalty: near, Reserved: reserved, ReservedRate: reservedRate,
			SlotFor: slotFor, OwnValues: l.Values() != p.Limit(i).Values(), Limit: l.Name, Key: p.Describe(i, f, x.Route), Direction: direction, Summary: c.Summary(&own), Mode: shaper.Mode(observe).String(),
		})
	}
	x.findBottlenecks(p)
	return x, nil
}

// addressAt returns the address that the client connects to at l, or none if it is not known.
func (q *Question) addressAt(l *shaper.Listener) netip.Addr {
	if q.Address.IsValid() {
		return q.Address
	}
	if len(l.AcceptProxyFrom) > 0 && q.Protocol == shaper.TCP {
		return netip.Addr{} // a header names it
	}
	var only netip.Addr
	for _, a := range l.Addresses {
		if a.Protocol != q.Protocol || q.Port < a.Ports.First || a.Ports.Last < q.Port || a.Addr == only {
			continue
		}
		if only.IsValid() || a.Addr.IsUnspecified() {
			return netip.Addr{}
		}
		only = a.Addr
	}
	return only
}

// downstreamAt returns the number of q's downstream of l, or 0 if it does not say which. The daemon and Compile have
// numbered those of the configuration.
func (q *Question) downstreamAt(l *shaper.Listener, p *shaper.Policy) (uint16, error) {
	switch {
	case q.Downstream == "" && len(l.Downstream) == 1:
		return p.DownstreamID(l.Downstream[0].Name()), nil
	case q.Downstream == "":
		return 0, nil
	case !slices.ContainsFunc(l.Downstream, func(d shaper.Downstream) bool { return d.Name() == q.Downstream }):
		return 0, fmt.Errorf("listener %q has no downstream %q: it has %s", l.Name, q.Downstream, downstreamNames(l))
	}
	return p.DownstreamID(q.Downstream), nil
}

func downstreamNames(l *shaper.Listener) string {
	var names []string
	for _, d := range l.Downstream {
		names = append(names, d.Name())
	}
	return strings.Join(names, ", ")
}

// tellsBuckets returns an error if q does not say which bucket of a limit f is in.
func (q *Question) tellsBuckets(p *shaper.Policy, f *shaper.Flow) error {
	if q.AnyBucket {
		return nil
	}
	if name := keyedBy(p, f, shaper.KeyDownstream); name != "" && f.Downstream == 0 {
		return QuestionError{fmt.Errorf("limit %q has a bucket for each downstream: use --downstream to name one, as \"shaperd downstreams\" does", name)}
	}
	if name := keyedBy(p, f, shaper.KeyDestination); name != "" && !f.Destination.IsValid() {
		how := fmt.Sprintf("--to %v/ADDRESS:%d", q.Protocol, q.Port)
		if q.Attach != "" {
			how = "--destination"
		}
		return QuestionError{fmt.Errorf("limit %q has a bucket for each destination: use %s to name one", name, how)}
	}
	return nil
}

// keyedBy returns the name of a limit of f whose key has a field, or "".
func keyedBy(p *shaper.Policy, f *shaper.Flow, field shaper.Fields) string {
	for i := range p.Route(f).Limits().All {
		if l := p.Limit(i); l.Key&field != 0 {
			return l.Name
		}
	}
	return ""
}

// findListener returns the listener that accepts a connection. As in the kernel, an exact
// address takes precedence over a wildcard.
func findListener(c *config.Config, q *Question) (*shaper.Listener, error) {
	if q.Listener != "" && !slices.ContainsFunc(c.Listen, func(l shaper.Listener) bool { return l.Name == q.Listener }) {
		return nil, fmt.Errorf("unknown listener %q", q.Listener)
	}
	var exact, any []*shaper.Listener // that accept it
	var where []string
	for i := range c.Listen {
		l := &c.Listen[i]
		if q.Listener != "" && l.Name != q.Listener {
			continue
		}
		for _, a := range l.Addresses {
			family := a.Addr.Is4() == q.Source.Is4() || q.Listener != "" && len(l.AcceptProxyFrom) > 0 // a header names the source
			if a.Protocol != q.Protocol || !family || q.Port < a.Ports.First || a.Ports.Last < q.Port {
				continue
			}
			switch {
			case a.Addr == q.Address:
				exact = append(exact, l)
			case !q.Address.IsValid() || a.Addr.IsUnspecified() || q.Listener != "" && len(l.AcceptProxyFrom) > 0:
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
		return nil, QuestionError{fmt.Errorf("%d listeners accept %s: %s: use --listener to name one, or --to %v/ADDRESS:%d to name an address",
			len(any), q.Target(), strings.Join(where, ", "), q.Protocol, q.Port)}
	case q.Listener != "":
		return nil, fmt.Errorf("listener %q does not accept %s from %v", q.Listener, q.DestinationText(), q.Source)
	case len(c.Attach) > 0:
		return nil, fmt.Errorf("no listener accepts %s from %v; for packets at an attachment, use --attach", q.DestinationText(), q.Source)
	}
	return nil, fmt.Errorf("no listener accepts %s from %v", q.DestinationText(), q.Source)
}

// findAttachment returns the attachment that q names.
func findAttachment(c *config.Config, p *shaper.Policy, q *Question) (*shaper.Attachment, error) {
	n := slices.IndexFunc(c.Attach, func(a shaper.Attachment) bool { return a.Name == q.Attach })
	if n < 0 {
		return nil, fmt.Errorf("unknown attachment %q", q.Attach)
	}
	for i := range p.OriginSet(p.AttachmentIndex(q.Attach)).All {
		if l := p.Limit(i); len(l.Match.Destination) > 0 && !q.Destination.IsValid() {
			return nil, QuestionError{fmt.Errorf("limit %q matches destinations: use --destination to name one", l.Name)}
		}
	}
	return &c.Attach[n], nil
}

// findBottlenecks finds, for each limited quantity, the limit that a source which sends ever
// more reaches first.
func (x *Explanation) findBottlenecks(p *shaper.Policy) {
	limitOf := func(i int) *shaper.Limit {
		key := p.Key(i, &x.Flow, x.Route)
		return p.LimitFor(i, &key)
	}
	least := func(what string, set shaper.Set, value func(*shaper.Limit) float64) {
		best := -1
		for i := range set.All {
			l := limitOf(i)
			if v := value(l); !l.Observe && v > 0 && (best < 0 || v < value(limitOf(best))) {
				best = i
			}
		}
		if best >= 0 {
			x.Bottlenecks = append(x.Bottlenecks, api.Bottleneck{Resource: what, Limit: p.Limit(best).Name})
		}
	}
	rate := func(l *shaper.Limit) float64 { return float64(l.Rate) }
	packets := func(l *shaper.Limit) float64 { return l.Packets.PerSecond() }
	r := x.Route
	if x.Attach != nil {
		least("Bytes", r.ToDownstream, rate)
		least("Packets", r.ToDownstream, packets)
	} else {
		least("Bytes to the downstream", r.ToDownstream, rate)
		least("Bytes from the downstream", r.FromDownstream, rate)
		least("Packets to the downstream", r.ToDownstream, packets)
		least("Packets from the downstream", r.FromDownstream, packets)
	}
	slots := func(inTurns bool) func(*shaper.Limit) float64 {
		return func(l *shaper.Limit) float64 {
			if l.SlotFor.InTurns() != inTurns {
				return 0
			}
			return float64(l.MaxConnections)
		}
	}
	least("Connections in flight", r.Limits(), slots(false))
	least("Turns at once", r.Limits(), slots(true))
	least("New connections", r.Limits(), func(l *shaper.Limit) float64 { return l.NewConnections.PerSecond() })
}
