package lab

import (
	"fmt"
	"net/netip"
	"strings"
)

// A Cut is a network that loses all packets of some hosts, seen from one of them.
type Cut struct {
	From []netip.Addr // packets from these do not arrive
	To   []netip.Addr // packets to these do not leave
}

// Apply makes packets get lost at the host. It replaces the cut of before; the zero Cut mends it.
// Connections stay open and see silence, as behind a firewall or a dead switch.
func (h *Host) Apply(c Cut) error {
	var b strings.Builder
	b.WriteString("add table inet cut; flush table inet cut; ")
	for _, way := range []struct {
		hook, field string
		addrs       []netip.Addr
	}{{"input", "saddr", c.From}, {"output", "daddr", c.To}} {
		fmt.Fprintf(&b, "add chain inet cut %s { type filter hook %s priority 0; }; ", way.hook, way.hook)
		for _, a := range way.addrs {
			family := "ip"
			if a.Is6() {
				family = "ip6"
			}
			fmt.Fprintf(&b, "add rule inet cut %s %s %s %s drop; ", way.hook, family, way.field, a)
		}
	}
	return h.Run("nft", b.String())
}
