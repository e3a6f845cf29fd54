// Package tproxy manages the nftables and policy routing rules that deliver packets to
// transparent sockets, which have addresses of other hosts: to listeners on the path to a
// server, and to the connections that a proxy makes from its clients' addresses.
//
// One nftables rule marks each packet for which there is a transparent socket, one policy
// routing rule sends marked packets to a routing table of its own, and that has a route of type
// "local". A tproxy rule that no packet reaches makes the kernel reassemble fragments before the
// lookup, so that every fragment of a datagram reaches the socket. Another chain drops packets
// that would be forwarded past a listener, in either direction, even if nothing listens: traffic
// never bypasses the shaper.
//
// The package owns what has the number of the mark: the nftables table "shaperd-<mark>", the routing
// table, and the routing rules and routes of protocol 83 that refer to it. Install replaces them, Remove
// deletes them, and nothing else on the host is changed. They outlive the process.
package tproxy

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	mdlayher "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
)

// Rules describes the rules of one mark in this network namespace.
type Rules struct {
	// Mark is the firewall mark of packets for transparent sockets, and the number of their
	// routing table. Rules of different marks are independent.
	Mark uint32

	// Addresses are those of transparent listeners. None is unspecified.
	Addresses []shaper.Address

	IPv4, IPv6 bool // the families in use
}

// Empty reports whether r has no rules.
func (r Rules) Empty() bool { return !r.IPv4 && !r.IPv6 }

// routeProtocol marks shaperd's routes and routing rules. No routing daemon uses this number.
const routeProtocol = 83

// priority is the priority of the routing rule: ahead of the rules that other programs add,
// which go ahead of the main table's.
const priority = 100

// table is the name of the nftables table.
func (r Rules) table() string { return fmt.Sprintf("shaperd-%d", r.Mark) }

// Install installs r, and replaces earlier rules of its mark. It takes CAP_NET_ADMIN. On an
// error the rules may be partly installed.
func (r Rules) Install() error {
	if err := r.installNFT(); err != nil {
		return explain("nftables", err)
	}
	if err := r.installRoutes(); err != nil {
		return explain("policy routing", err)
	}
	return nil
}

// Remove removes the rules of a mark, if there are any.
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
		what += " needs CAP_NET_ADMIN"
	}
	return fmt.Errorf("%s: %w", what, err)
}

// connect returns a netlink connection with buffers for a thousand rules.
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
	c.AddTable(table) // deleting a missing table would fail
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
	defrag := c.AddChain(&nftables.Chain{Name: "defrag", Table: table})
	c.AddRule(&nftables.Rule{Table: table, Chain: defrag, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
		&expr.Immediate{Register: 1, Data: binaryutil.BigEndian.PutUint16(1)},
		&expr.TProxy{Family: unix.NFPROTO_UNSPEC, TableFamily: unix.NFPROTO_INET, RegPort: 1},
	}})
	guard := chain("guard", nftables.ChainHookForward, nftables.ChainPriorityFilter)
	for _, a := range r.Addresses {
		c.AddRule(&nftables.Rule{Table: table, Chain: guard, Exprs: drop(a, true)})
		c.AddRule(&nftables.Rule{Table: table, Chain: guard, Exprs: drop(a, false)})
	}
	return c.Flush()
}

// drop returns a rule that counts and drops packets to a, or from a.
func drop(a shaper.Address, to bool) []expr.Any {
	addr := a.Addr.AsSlice()
	family, offset, port := byte(unix.NFPROTO_IPV4), uint32(12), uint32(0)
	if a.Addr.Is6() {
		family, offset = unix.NFPROTO_IPV6, 8
	}
	if to { // the destination fields follow the source fields
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
	if a.Single() {
		exprs = append(exprs, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: first})
	} else {
		exprs = append(exprs, &expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: first, ToData: last})
	}
	return append(exprs, &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop})
}

// family is an IP version, in the terms of netlink and ip(8).
type family struct {
	number int
	flag   string    // option of ip(8)
	all    net.IPNet // the default route
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
		if errors.Is(err, unix.EAFNOSUPPORT) { // no packets of this family either
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

// Installed reports whether rules of a mark are installed. It needs no privileges.
func Installed(mark uint32) (bool, error) {
	for _, f := range []family{ipv4, ipv6} {
		if rules, err := (Rules{Mark: mark}).routingRules(f); err != nil || len(rules) > 0 {
			return len(rules) > 0, err
		}
	}
	return false, nil
}

// routingRules returns the installed routing rules of r's mark.
func (r Rules) routingRules(f family) ([]netlink.Rule, error) {
	rules, err := netlink.RuleList(f.number)
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil // the host does not support the family
	}
	return slices.DeleteFunc(rules, func(rule netlink.Rule) bool {
		return rule.Protocol != routeProtocol || rule.Mark != r.Mark || uint32(rule.Table) != r.Mark
	}), err
}

// removeOtherRoutes removes routes and routing rules of r's mark in families that r does not use.
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

// Commands returns a shell script that does what Install does.
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
	chain defrag {
		# Never reached: a tproxy statement makes the kernel reassemble fragments.
		meta l4proto udp tproxy to :1
	}
	chain guard {
		type filter hook forward priority filter; policy accept;
`, r.table(), r.Mark)
	for _, a := range r.Addresses {
		ip := "ip"
		if a.Addr.Is6() {
			ip = "ip6"
		}
		fmt.Fprintf(&b, "\t\t%s daddr %s %s dport %s counter drop\n", ip, a.Addr, a.Protocol, a.Ports)
		fmt.Fprintf(&b, "\t\t%s saddr %s %s sport %s counter drop\n", ip, a.Addr, a.Protocol, a.Ports)
	}
	b.WriteString("\t}\n}\nEND\n")
	for _, f := range r.families() {
		fmt.Fprintf(&b, "ip %s route replace local default dev lo table %d protocol %d\n", f.flag, r.Mark, routeProtocol)
		rule := fmt.Sprintf("priority %d fwmark %d lookup %d protocol %d", priority, r.Mark, r.Mark, routeProtocol)
		fmt.Fprintf(&b, "ip %s rule del %s 2>/dev/null || true\nip %s rule add %s\n", f.flag, rule, f.flag, rule)
	}
	return b.String()
}

// RemovalCommands returns a shell script that does what Remove does after Install.
func (r Rules) RemovalCommands() string {
	var b strings.Builder
	b.WriteString("nft delete table inet " + r.table() + "\n")
	for _, f := range r.families() {
		fmt.Fprintf(&b, "ip %s rule del fwmark %d lookup %d protocol %d\n", f.flag, r.Mark, r.Mark, routeProtocol)
		fmt.Fprintf(&b, "ip %s route del local default dev lo table %d\n", f.flag, r.Mark)
	}
	return b.String()
}
