package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"shaperd.dev/shaperd/shaper"
)

// checkForwardLoops reports downstreams that are the listener's own address, or lead back to it through other listeners: one
// connection would become as many as there are descriptors. It reports each loop once.
func (l *loader) checkForwardLoops() {
	if len(l.addresses) > maxAddresses {
		return
	}
	local := make([][]item[shaper.Downstream], len(l.downstreams)) // of these few, loops are looked for
	for i, all := range l.downstreams {
		local[i] = slices.DeleteFunc(slices.Clone(all), func(d item[shaper.Downstream]) bool {
			return !slices.ContainsFunc(l.addresses, func(a locatedAddress) bool { return l.accepts(a, d.value) })
		})
	}
	for i, a := range l.addresses {
		for _, d := range local[a.listen] {
			back := forwardLoop{loader: l, local: local, start: i, seen: map[int]bool{}}
			switch through, ok := back.find(i, a.Ports, d.value); {
			case ok && len(through) == 0:
				l.add(d.at, fmt.Sprintf("downstream: %q is this listener's own address %q: use another port for one of them", d.value, a.Address))
			case ok:
				l.add(d.at, fmt.Sprintf("downstream: %q leads back to this listener, at %q, through listener %s: remove the loop", d.value, a.Address, strings.Join(through, ", ")))
			}
		}
	}
}

// accepts reports whether what is sent to the host of d certainly arrives at a, if the port is right. A transparent listener may have
// the address of its downstream, which then is another host.
func (l *loader) accepts(a locatedAddress, d shaper.Downstream) bool {
	ip, err := netip.ParseAddr(d.Host)
	if err != nil {
		return isLocalhost(d.Host) && (a.Addr.IsUnspecified() || a.Addr == netip.IPv6Loopback() || a.Addr == netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	}
	if a.Addr.IsUnspecified() {
		return ip.IsLoopback() && ip.Is4() == a.Addr.Is4()
	}
	return ip == a.Addr && !l.c.Listen[a.listen].Transparent
}

// isLocalhost reports whether a name is that of the loopback interface (RFC 6761, section 6.3).
func isLocalhost(name string) bool {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	return name == "localhost" || strings.HasSuffix(name, ".localhost")
}

// forwardLoop is the search for a way back to an address.
type forwardLoop struct {
	*loader
	local [][]item[shaper.Downstream] // of each listener, those that may be an address of l
	start int                         // index of the address
	seen  map[int]bool                // indices of addresses
}

// find returns the names of the listeners between d, where an address sends what arrives at some of its ports, and the start.
func (f *forwardLoop) find(from int, ports shaper.PortRange, d shaper.Downstream) (through []string, ok bool) {
	a := f.addresses[from]
	if d.Port != 0 && a.Single() {
		ports = shaper.PortRange{First: d.Port, Last: d.Port}
	}
	for i := f.start; i < len(f.addresses); i++ { // loops with an earlier address were found from there
		b := f.addresses[i]
		if b.Protocol != a.Protocol || !intersects(ports, b.Ports) || !f.accepts(b, d) {
			continue
		}
		if i == f.start {
			return nil, true
		}
		if f.seen[i] || b.listen == f.addresses[f.start].listen { // a loop through another address of the listener contains a shorter one
			continue
		}
		f.seen[i] = true
		both := shaper.PortRange{First: max(ports.First, b.Ports.First), Last: min(ports.Last, b.Ports.Last)}
		for _, next := range f.local[b.listen] {
			if through, ok := f.find(i, both, next.value); ok {
				return append([]string{quote(f.c.Listen[b.listen].Name)}, through...), true
			}
		}
	}
	return nil, false
}
