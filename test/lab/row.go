package lab

import (
	"errors"
	"net/netip"
)

// A Row is three hosts in a row. What is tested runs on the middle one.
type Row struct{ Client, Middle, Downstream *Host }

// The names of the interfaces of a row.
const (
	ClientLink     = "up"
	MiddleLeft     = "left"
	MiddleRight    = "right"
	DownstreamLink = "in"
)

// RowAddresses are the addresses of one IP version in a row.
type RowAddresses struct {
	Clients    []netip.Addr
	Outer      []netip.Addr // of the middle, on the client's side; the first is the client's router
	OuterBits  int
	Inner      netip.Addr // of the middle, on the downstream's side
	Downstream netip.Addr
	InnerBits  int
}

// NewRow creates three hosts and connects them. The middle does not forward.
func NewRow(all ...RowAddresses) (r *Row, err error) {
	r = &Row{}
	for _, h := range []struct {
		role string
		to   **Host
	}{{"client", &r.Client}, {"middle", &r.Middle}, {"downstream", &r.Downstream}} {
		if *h.to, err = NewHost(h.role); err != nil {
			r.Remove()
			return nil, err
		}
	}
	err = errors.Join(
		Join(r.Client, ClientLink, r.Middle, MiddleLeft),
		Join(r.Middle, MiddleRight, r.Downstream, DownstreamLink))
	for _, a := range all {
		err = errors.Join(err,
			r.Client.AddAddress(ClientLink, a.OuterBits, a.Clients...),
			r.Middle.AddAddress(MiddleLeft, a.OuterBits, a.Outer...),
			r.Middle.AddAddress(MiddleRight, a.InnerBits, a.Inner),
			r.Downstream.AddAddress(DownstreamLink, a.InnerBits, a.Downstream),
			r.Client.AddDefaultRoute(a.Outer[0]),
			r.Downstream.AddDefaultRoute(a.Inner))
	}
	if err != nil {
		r.Remove()
		return nil, err
	}
	return r, nil
}

// Remove removes the hosts.
func (r *Row) Remove() {
	for _, h := range []*Host{r.Client, r.Middle, r.Downstream} {
		if h != nil {
			h.Remove()
		}
	}
}
