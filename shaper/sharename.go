package shaper

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"shaperd.dev/shaperd/shaper/asn"
)

// newSuffix marks the name of a bucket of new connections.
const newSuffix = "/new"

// ShareName returns the name of the bucket of k, a key of a limit of p: the same on all hosts, such as
// "per-source|source=192.0.2.0/24". It is "" if p does not have the limit, the listener or the attachment.
func (p *Policy) ShareName(k Key) string {
	i := p.LimitOf(k)
	if i < 0 {
		return ""
	}
	l := &p.limits[i]
	var b strings.Builder
	b.WriteString(l.Name)
	if k.Limit != p.states[i].ID {
		b.WriteString(newSuffix)
	}
	if l.Key&KeySource != 0 {
		fmt.Fprintf(&b, "|source=%v", l.addressPrefix(k))
	}
	if l.Key&KeyDestination != 0 {
		fmt.Fprintf(&b, "|destination=%v", l.addressPrefix(k))
	}
	if l.Key&KeyASN != 0 {
		fmt.Fprintf(&b, "|asn=%d", k.ASN)
	}
	if l.Key&KeyPort != 0 {
		fmt.Fprintf(&b, "|port=%d", k.Port)
	}
	if l.Key&(KeyListen|KeyAttach) != 0 {
		origin, ok := p.originOf(l, k.Origin)
		if !ok {
			return ""
		}
		b.WriteString("|origin=" + origin)
	}
	if l.Key&KeyCountry != 0 {
		fmt.Fprintf(&b, "|country=%v", k.Country)
	}
	if l.Key&KeyTLV != 0 {
		fmt.Fprintf(&b, "|tlv=%016x", k.TLV)
	}
	if l.Key&KeyDownstream != 0 {
		b.WriteString("|downstream=" + p.downstreams.name(k.Downstream))
	}
	return b.String()
}

// ParseShareName returns the key of the bucket with a name, and the index of its limit. The limit must
// be a shared one of p with the fields that the name has.
func (p *Policy) ParseShareName(name string) (k Key, limit int, err error) {
	fields := strings.Split(name, "|")
	limitName, isNew := strings.CutSuffix(fields[0], newSuffix)
	limit = p.Find(limitName)
	if limit < 0 || !p.limits[limit].Shared {
		return k, -1, fmt.Errorf("%q: no shared limit of this name", limitName)
	}
	k.Limit = p.states[limit].ID
	if isNew {
		k.Limit++
	}
	for _, field := range fields[1:] {
		if err := p.parseShareField(&k, limit, field); err != nil {
			return Key{}, -1, fmt.Errorf("%q: %w", name, err)
		}
	}
	if p.ShareName(k) != name {
		return Key{}, -1, fmt.Errorf("%q: not a key of limit %s", name, limitName)
	}
	return k, limit, nil
}

func (p *Policy) parseShareField(k *Key, limit int, field string) error {
	what, value, _ := strings.Cut(field, "=")
	switch what {
	case "source", "destination":
		prefix, err := netip.ParsePrefix(value)
		if err != nil {
			return err
		}
		k.Address = prefix.Masked().Addr().As16()
	case "asn":
		n, err := strconv.ParseUint(value, 10, 32)
		if err != nil {
			return err
		}
		k.ASN = uint32(n)
	case "port":
		n, err := strconv.ParseUint(value, 10, 16)
		if err != nil {
			return err
		}
		k.Port = uint16(n)
	case "origin":
		id, ok := p.originID(&p.limits[limit], value)
		if !ok {
			return fmt.Errorf("no listener or attachment %q", value)
		}
		k.Origin = id
	case "tlv":
		hash, err := strconv.ParseUint(value, 16, 64)
		if err != nil {
			return err
		}
		k.TLV = hash
	case "country":
		c, err := asn.ParseCountry(value)
		if err != nil {
			return err
		}
		k.Country = c
	case "downstream":
		if k.Downstream = p.downstreams.find(value); k.Downstream == 0 {
			return fmt.Errorf("no downstream %q", value)
		}
	default:
		return fmt.Errorf("unknown field %q", what)
	}
	return nil
}

// originID returns the ID of a listener or attachment in keys of l.
func (p *Policy) originID(l *Limit, name string) (uint16, bool) {
	for i, o := range p.origins {
		if o.name == name && i < len(p.listeners) != l.InPacketPlane() {
			return o.id, true
		}
	}
	return 0, name == ""
}

// originOf returns the name of the listener or attachment with an ID in keys of l, "" for 0.
func (p *Policy) originOf(l *Limit, id uint16) (name string, ok bool) {
	for i, o := range p.origins {
		if o.id == id && i < len(p.listeners) != l.InPacketPlane() {
			return o.name, true
		}
	}
	return "", id == 0
}

// LimitOf returns the index of the limit of a key of a bucket, or -1 if p does not have it.
func (p *Policy) LimitOf(k Key) int {
	for i, st := range p.states {
		if st.ID == k.Limit&^1 {
			return i
		}
	}
	return -1
}

// UnkeyedShares returns the names of the buckets of shared limits without key fields that have rates.
func (p *Policy) UnkeyedShares() (names []string) {
	for i := range p.limits {
		if l := &p.limits[i]; l.Shared && l.Key == 0 && p.paced&(1<<i) != 0 {
			names = append(names, l.Name)
		}
	}
	return names
}
