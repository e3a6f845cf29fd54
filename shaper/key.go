package shaper

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"

	"shaperd.dev/shaperd/shaper/asn"
)

// Key identifies a bucket: a limit, and the fields of a flow that make up the limit's
// key, the others zero. Keys are comparable and stable over reloads.
type Key struct {
	Address    [16]byte // source or destination, masked; IPv4 as IPv4-mapped
	Connection uint64
	TLV        uint64 // Hash of it
	Limit      uint32 // LimitState.ID, or ID+1 for new connections
	ASN        uint32
	Port       uint16
	Origin     uint16 // ID of the listener or attachment
	Downstream uint16 // DownstreamID
	Country    asn.Country
}

// Key returns the key of f, routed as r, under limit i.
func (p *Policy) Key(i int, f *Flow, r Route) Key {
	l := &p.limits[i]
	k := Key{Limit: p.states[i].ID}
	switch {
	case l.Key&KeySource != 0:
		k.Address = maskAddress(f.Source, l.IPv4Prefix, l.IPv6Prefix)
	case l.Key&KeyDestination != 0:
		k.Address = maskAddress(f.Destination, l.IPv4Prefix, l.IPv6Prefix)
	}
	if l.Key&KeyASN != 0 {
		k.ASN = r.ASN
	}
	if l.Key&KeyPort != 0 {
		k.Port = f.Port
	}
	if l.Key&(KeyListen|KeyAttach) != 0 {
		k.Origin = p.origins[f.Origin].id
	}
	if l.Key&KeyCountry != 0 {
		k.Country = r.Country
	}
	if l.Key&KeyTLV != 0 {
		k.TLV = f.tlv(l.TLV)
	}
	if l.Key&KeyDownstream != 0 {
		k.Downstream = f.Downstream
	}
	if l.Key&KeyConnection != 0 {
		k.Connection = f.Connection
	}
	return k
}

// KeyOf returns the key of a source under limit i, whose key is the source alone, or nothing.
func (p *Policy) KeyOf(i int, source netip.Addr) Key {
	l := &p.limits[i]
	k := Key{Limit: p.states[i].ID}
	if l.Key&KeySource != 0 {
		k.Address = maskAddress(source, l.IPv4Prefix, l.IPv6Prefix)
	}
	return k
}

func maskAddress(a netip.Addr, bits4, bits6 int) [16]byte {
	b := a.As16()
	bits := bits6
	if a.Is4() {
		bits = 96 + bits4
	}
	if bits < 128 {
		i := bits / 8
		b[i] &= ^byte(0xff >> (bits % 8))
		clear(b[i+1:])
	}
	return b
}

// SourcePrefix returns the source prefix in k, a key of limit i, or false if the source is
// not part of the key.
func (p *Policy) SourcePrefix(i int, k Key) (netip.Prefix, bool) {
	l := &p.limits[i]
	if l.Key&KeySource == 0 {
		return netip.Prefix{}, false
	}
	return l.addressPrefix(k), true
}

// addressPrefix returns the source or destination prefix in k, a key of l, or the zero prefix if it has none.
func (l *Limit) addressPrefix(k Key) netip.Prefix {
	if l.Key&keyAddress == 0 {
		return netip.Prefix{}
	}
	if a := netip.AddrFrom16(k.Address); a.Is4In6() {
		return netip.PrefixFrom(a.Unmap(), l.IPv4Prefix)
	}
	return netip.PrefixFrom(netip.AddrFrom16(k.Address), l.IPv6Prefix)
}

// Describe returns the key of f under limit i as text.
func (p *Policy) Describe(i int, f *Flow, r Route) string {
	return p.DescribeKey(i, p.Key(i, f, r))
}

// DescribeKey returns a key of limit i as text. Connection 0 is "this connection".
func (p *Policy) DescribeKey(i int, k Key) string {
	l := &p.limits[i]
	if l.Key == 0 {
		return "all"
	}
	var parts []string
	add := func(field Fields, format string, arg any) {
		if l.Key&field != 0 {
			parts = append(parts, fmt.Sprintf(format, arg))
		}
	}
	prefix := l.addressPrefix(k)
	add(KeySource, "source %v", prefix)
	add(KeyDestination, "destination %v", prefix)
	add(KeyASN, "asn %d", k.ASN)
	add(KeyPort, "port %d", k.Port)
	name := p.originName(l, k.Origin)
	add(KeyListen, "listen %s", name)
	add(KeyAttach, "attach %s", name)
	add(KeyCountry, "country %v", k.Country)
	add(KeyDownstream, "downstream %s", p.downstreams.name(k.Downstream))
	add(KeyTLV, TLVName(l.TLV)+" %s", p.tlvNames.text(k.TLV))
	switch {
	case l.Key&KeyConnection == 0:
	case k.Connection == 0:
		parts = append(parts, "this connection")
	default:
		add(KeyConnection, "connection %d", k.Connection)
	}
	return strings.Join(parts, ", ")
}

// originName returns the name of the listener or attachment with an ID, for keys of l.
func (p *Policy) originName(l *Limit, id uint16) string {
	for i, o := range p.origins {
		if o.id == id && i < len(p.listeners) != l.InPacketPlane() {
			return cmp.Or(o.name, "none")
		}
	}
	return "none"
}
