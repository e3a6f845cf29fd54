package segments

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

// Address is an address as a number, so that both families can be built with the same code.
//
// Next of the highest address and Prev of the lowest wrap around: callers compare before they
// step.
type Address[A any] interface {
	comparable
	Compare(A) int
	Next() A
	Prev() A
	Addr() netip.Addr

	// top is the highest 64 bits, or all of an IPv4 address.
	top() uint64
}

// Addr4 is an IPv4 address in host byte order.
type Addr4 uint32

// Compare is -1, 0 or 1 if a is below, equal to or above b.
func (a Addr4) Compare(b Addr4) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// Next is the address after a.
func (a Addr4) Next() Addr4 { return a + 1 }

// Prev is the address before a.
func (a Addr4) Prev() Addr4 { return a - 1 }

// Last returns the last address of the prefix of bits bits at a.
func (a Addr4) Last(bits int) Addr4 { return a | ^Addr4(0)>>bits } // a shift by 32 is 0 in Go

func (a Addr4) top() uint64 { return uint64(a) }

// Addr converts a.
func (a Addr4) Addr() netip.Addr {
	return netip.AddrFrom4([4]byte{byte(a >> 24), byte(a >> 16), byte(a >> 8), byte(a)})
}

// Addr6 is an IPv6 address in host byte order.
type Addr6 struct{ Hi, Lo uint64 }

// Compare is -1, 0 or 1 if a is below, equal to or above b.
func (a Addr6) Compare(b Addr6) int {
	switch {
	case a.Hi < b.Hi, a.Hi == b.Hi && a.Lo < b.Lo:
		return -1
	case a == b:
		return 0
	}
	return 1
}

// Next is the address after a.
func (a Addr6) Next() Addr6 {
	lo, carry := bits.Add64(a.Lo, 1, 0)
	return Addr6{a.Hi + carry, lo}
}

// Prev is the address before a.
func (a Addr6) Prev() Addr6 {
	lo, borrow := bits.Sub64(a.Lo, 1, 0)
	return Addr6{a.Hi - borrow, lo}
}

// Last returns the last address of the prefix of bits bits at a.
func (a Addr6) Last(bits int) Addr6 {
	// A shift by 64 is 0 in Go, which makes both masks right at the ends.
	if bits < 64 {
		return Addr6{a.Hi | ^uint64(0)>>bits, ^uint64(0)}
	}
	return Addr6{a.Hi, a.Lo | ^uint64(0)>>(bits-64)}
}

func (a Addr6) top() uint64 { return a.Hi }

// Addr converts a.
func (a Addr6) Addr() netip.Addr {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], a.Hi)
	binary.BigEndian.PutUint64(b[8:], a.Lo)
	return netip.AddrFrom16(b)
}

// ToAddr4 converts an IPv4 address.
func ToAddr4(a netip.Addr) Addr4 {
	b := a.As4()
	return Addr4(binary.BigEndian.Uint32(b[:]))
}

// ToAddr6 converts an IPv6 address; its zone is dropped.
func ToAddr6(a netip.Addr) Addr6 {
	b := a.As16()
	return Addr6{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

// LastAddr returns the last address of p.
func LastAddr(p netip.Prefix) netip.Addr {
	if p.Addr().Is4() {
		return ToAddr4(p.Addr()).Last(p.Bits()).Addr()
	}
	return ToAddr6(p.Addr()).Last(p.Bits()).Addr()
}
