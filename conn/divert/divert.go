// Package divert has the kernel bring packets to transparent sockets, whose addresses
// are other hosts': to listeners that stand in the way of a server, and to connections
// that a proxy makes in the name of its sources.
//
// One nftables rule marks each packet for which there is such a socket, one rule of
// policy routing sends what is marked to a table of its own, and the route there is
// "local". A rule with tproxy, which no packet meets, has the kernel put fragments
// together before, so that all of a datagram has the socket. Another chain drops what
// would be forwarded past a listener, there or back, whether or not anyone listens: what
// is to be shaped never gets around the shaper.
package divert

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	mdlayher "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd/shaper"
)

// Rules are what is to be in force in this network namespace.
type Rules struct {
	// Mark is the firewall mark of what is diverted, and the number of the routing table
	// that it goes to. Rules of different marks do not touch each other.
	Mark uint32

	// Addresses are those of transparent listeners. None of them is unspecified.
	Addresses []Address

	IPv4, IPv6 bool // the families in use
}

// Address is where a transparent listener listens.
type Address struct {
	Protocol shaper.Protocol // TCP or UDP
	Addr     netip.Addr
	Ports    shaper.PortRange
}

// Empty reports whether r is no rules at all.
func (r Rules) Empty() bool { return !r.IPv4 && !r.IPv6 }

// routeProtocol is the origin of our routes and routing rules, by which they are told
// from others. No routing daemon has it.
const routeProtocol = 83

// priority is the place of our routing rule: before those that other programs add, which
// go before the one of the main table.
const priority = 100

// table is the name of the nftables table.
func (r Rules) table() string { return fmt.Sprintf("shaperd-%d", r.Mark) }

// Install puts r in force, in place of earlier rules of its mark. It takes
// CAP_NET_ADMIN. On an error a part may be in force.
func (r Rules) Install() error {
	if err := r.installNFT(); err != nil {
		return explain("nftables", err)
	}
	if err := r.installRoutes(); err != nil {
		return explain("policy routing", err)
	}
	return nil
}

// Remove takes away the rules of a mark, if there are any.
func Remove(mark uint32) error {
	none := Rules{Mark: mark}
	c, err := connect()
	if err != nil {
		return explain("nftables", err)
	}
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return explain("nftables", err)
	}
	for _, t := range tables {
		if t.Name != none.table() {
			continue
		}
		c.DelTable(t)
		if err := c.Flush(); err != nil {
			return explain("nftables", err)
		}
	}
	return explain("policy routing", none.removeOtherRoutes())
}

func explain(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EPERM):
		what += ": CAP_NET_ADMIN"
	}
	return fmt.Errorf("%s: %w", what, err)
}

// connect returns a connection that has room for the answers to a thousand rules.
func connect() (*nftables.Conn, error) {
	const buffer = 8 << 20
	return nftables.New(nftables.WithSockOptions(func(c *mdlayher.Conn) error {
		return errors.Join(c.SetReadBuffer(buffer), c.SetWriteBuffer(buffer))
	}))
}

// installNFT replaces the table in one transaction.
func (r Rules) installNFT() error {
	c, err := connect()
	if err != nil {
		return err
	}
	table := &nftables.Table{Name: r.table(), Family: nftables.TableFamilyINet}
	c.AddTable(table) // or there may be none to delete
	c.DelTable(table)
	c.AddTable(table)
	chain := func(name string, hook *nftables.ChainHook, priority *nftables.ChainPriority) *nftables.Chain {
		accept := nftables.ChainPolicyAccept
		return c.AddChain(&nftables.Chain{
			Name: name, Table: table, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: priority, Policy: &accept,
		})
	}
	divert := chain("divert", nftables.ChainHookPrerouting, nftables.ChainPriorityMangle)
	c.AddRule(&nftables.Rule{Table: table, Chain: divert, Exprs: []expr.Any{
		&expr.Socket{Key: expr.SocketKeyTransparent, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{1}},
		&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(r.Mark)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
		&expr.Verdict{Kind: expr.VerdictAccept},
	}})
	whole := c.AddChain(&nftables.Chain{Name: "whole", Table: table})
	c.AddRule(&nftables.Rule{Table: table, Chain: whole, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
		&expr.Immediate{Register: 1, Data: binaryutil.BigEndian.PutUint16(1)},
		&expr.TProxy{Family: unix.NFPROTO_UNSPEC, TableFamily: unix.NFPROTO_INET, RegPort: 1},
	}})
	guard := chain("guard", nftables.ChainHookForward, nftables.ChainPriorityFilter)
	for _, a := range r.Addresses {
		c.AddRule(&nftables.Rule{Table: table, Chain: guard, Exprs: a.drop(true)})
		c.AddRule(&nftables.Rule{Table: table, Chain: guard, Exprs: a.drop(false)})
	}
	return c.Flush()
}

// drop counts and drops what goes to a, or comes from there.
func (a Address) drop(to bool) []expr.Any {
	addr := a.Addr.AsSlice()
	family, offset, port := byte(unix.NFPROTO_IPV4), uint32(12), uint32(0)
	if a.Addr.Is6() {
		family, offset = unix.NFPROTO_IPV6, 8
	}
	if to { // it stands behind the source
		offset, port = offset+uint32(len(addr)), 2
	}
	protocol := byte(unix.IPPROTO_TCP)
	if a.Protocol == shaper.UDP {
		protocol = unix.IPPROTO_UDP
	}
	exprs := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(len(addr))},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: addr},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{protocol}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: port, Len: 2},
	}
	first, last := binaryutil.BigEndian.PutUint16(a.Ports.First), binaryutil.BigEndian.PutUint16(a.Ports.Last)
	if a.Ports.First == a.Ports.Last {
		exprs = append(exprs, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: first})
	} else {
		exprs = append(exprs, &expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: first, ToData: last})
	}
	return append(exprs, &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop})
}

// family is a version of IP, as netlink has it.
type family struct {
	number int
	flag   string // of ip(8)
	all    net.IPNet
}

var (
	ipv4 = family{netlink.FAMILY_V4, "-4", net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}}
	ipv6 = family{netlink.FAMILY_V6, "-6", net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}}
)

func (r Rules) families() (list []family) {
	if r.IPv4 {
		list = append(list, ipv4)
	}
	if r.IPv6 {
		list = append(list, ipv6)
	}
	return list
}

func (r Rules) installRoutes() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	for _, f := range r.families() {
		err := netlink.RouteReplace(&netlink.Route{
			Family: f.number, Dst: &f.all, LinkIndex: lo.Attrs().Index, Table: int(r.Mark),
			Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, Protocol: routeProtocol,
		})
		if errors.Is(err, unix.EAFNOSUPPORT) { // then there are no such packets
			continue
		}
		if err != nil {
			return err
		}
		rules, err := r.routingRules(f)
		if err != nil {
			return err
		}
		if len(rules) > 0 {
			continue
		}
		rule := netlink.NewRule()
		rule.Family, rule.Mark, rule.Table, rule.Protocol, rule.Priority = f.number, r.Mark, int(r.Mark), routeProtocol, priority
		if err := netlink.RuleAdd(rule); err != nil {
			return err
		}
	}
	return r.removeOtherRoutes()
}

// Installed reports whether there are rules of a mark. It takes no privilege.
func Installed(mark uint32) (bool, error) {
	for _, f := range []family{ipv4, ipv6} {
		if rules, err := (Rules{Mark: mark}).routingRules(f); err != nil || len(rules) > 0 {
			return len(rules) > 0, err
		}
	}
	return false, nil
}

// routingRules returns those of r's mark that are there.
func (r Rules) routingRules(f family) ([]netlink.Rule, error) {
	rules, err := netlink.RuleList(f.number)
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil // this host lacks the family
	}
	return slices.DeleteFunc(rules, func(rule netlink.Rule) bool {
		return rule.Protocol != routeProtocol || rule.Mark != r.Mark || uint32(rule.Table) != r.Mark
	}), err
}

// removeOtherRoutes removes what earlier rules of the mark had, and r has not.
func (r Rules) removeOtherRoutes() error {
	for _, f := range []family{ipv4, ipv6} {
		if slices.ContainsFunc(r.families(), func(o family) bool { return o.number == f.number }) {
			continue
		}
		rules, err := r.routingRules(f)
		if err != nil {
			return err
		}
		for _, rule := range rules {
			if err := f.removeRoute(rule); err != nil {
				return err
			}
		}
	}
	return nil
}

func (f family) removeRoute(rule netlink.Rule) error {
	filter := &netlink.Route{Table: rule.Table, Protocol: routeProtocol, Type: unix.RTN_LOCAL}
	routes, err := netlink.RouteListFiltered(f.number, filter, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TYPE)
	if err != nil {
		return err
	}
	for _, route := range routes {
		if err := netlink.RouteDel(&route); err != nil {
			return err
		}
	}
	rule.Family = f.number
	return netlink.RuleDel(&rule)
}

// Commands is a shell script that does what Install does.
func (r Rules) Commands() string {
	var b strings.Builder
	fmt.Fprintf(&b, `nft -f - <<'END'
table inet %[1]s
delete table inet %[1]s
table inet %[1]s {
	chain divert {
		type filter hook prerouting priority mangle; policy accept;
		socket transparent 1 meta mark set %[2]d accept
	}
	chain whole {
		# Nothing comes here: that there is a tproxy has the kernel put fragments together.
		meta l4proto udp tproxy to :1
	}
	chain guard {
		type filter hook forward priority filter; policy accept;
`, r.table(), r.Mark)
	for _, a := range r.Addresses {
		ip, ports := "ip", fmt.Sprint(a.Ports.First)
		if a.Addr.Is6() {
			ip = "ip6"
		}
		if a.Ports.Last != a.Ports.First {
			ports += fmt.Sprint("-", a.Ports.Last)
		}
		fmt.Fprintf(&b, "\t\t%s daddr %s %s dport %s counter drop\n", ip, a.Addr, a.Protocol, ports)
		fmt.Fprintf(&b, "\t\t%s saddr %s %s sport %s counter drop\n", ip, a.Addr, a.Protocol, ports)
	}
	b.WriteString("\t}\n}\nEND\n")
	for _, f := range r.families() {
		fmt.Fprintf(&b, "ip %s route replace local default dev lo table %d protocol %d\n", f.flag, r.Mark, routeProtocol)
		rule := fmt.Sprintf("priority %d fwmark %d lookup %d protocol %d", priority, r.Mark, r.Mark, routeProtocol)
		fmt.Fprintf(&b, "ip %s rule del %s 2>/dev/null || true\nip %s rule add %s\n", f.flag, rule, f.flag, rule)
	}
	return b.String()
}

// RemovalCommands is a shell script that does what Remove does after Install.
func (r Rules) RemovalCommands() string {
	var b strings.Builder
	b.WriteString("nft delete table inet " + r.table() + "\n")
	for _, f := range r.families() {
		fmt.Fprintf(&b, "ip %s rule del fwmark %d lookup %d protocol %d\n", f.flag, r.Mark, r.Mark, routeProtocol)
		fmt.Fprintf(&b, "ip %s route del local default dev lo table %d\n", f.flag, r.Mark)
	}
	return b.String()
}
