package asn

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

// key is an address as a number, so that a table of either family can be built with the
// same code.
//
// next of the highest address and prev of the lowest wrap around; callers
// compare before they step.
type key[A any] interface {
	comparable
	compare(A) int
	next() A
	prev() A
	addr() netip.Addr
	// top is the highest 64 bits, or all of an IPv4 address.
	top() uint64
}

// addr4 is an IPv4 address in host byte order.
type addr4 uint32

func (a addr4) compare(b addr4) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func (a addr4) next() addr4 { return a + 1 }
func (a addr4) prev() addr4 { return a - 1 }
func (a addr4) top() uint64 { return uint64(a) }

func (a addr4) addr() netip.Addr {
	return netip.AddrFrom4([4]byte{byte(a >> 24), byte(a >> 16), byte(a >> 8), byte(a)})
}

// addr6 is an IPv6 address in host byte order.
type addr6 struct{ hi, lo uint64 }

func (a addr6) compare(b addr6) int {
	switch {
	case a.hi < b.hi, a.hi == b.hi && a.lo < b.lo:
		return -1
	case a == b:
		return 0
	}
	return 1
}

func (a addr6) next() addr6 {
	lo, carry := bits.Add64(a.lo, 1, 0)
	return addr6{a.hi + carry, lo}
}

func (a addr6) prev() addr6 {
	lo, borrow := bits.Sub64(a.lo, 1, 0)
	return addr6{a.hi - borrow, lo}
}

func (a addr6) top() uint64 { return a.hi }

func (a addr6) addr() netip.Addr {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], a.hi)
	binary.BigEndian.PutUint64(b[8:], a.lo)
	return netip.AddrFrom16(b)
}

// mappedFirst and mappedLast bound ::ffff:0:0/96, the IPv4-mapped addresses.
var (
	mappedFirst = addr6{0, 0xffff_0000_0000}
	mappedLast  = addr6{0, 0xffff_ffff_ffff}
)

// toAddr4 converts an IPv4 address.
func toAddr4(a netip.Addr) addr4 {
	b := a.As4()
	return addr4(binary.BigEndian.Uint32(b[:]))
}

// toAddr6 converts an IPv6 address; its zone is dropped.
func toAddr6(a netip.Addr) addr6 {
	b := a.As16()
	return addr6{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

// last returns the highest address of the prefix of the given length, 0 to 128 bits,
// that starts at a.
func (a addr6) last(bits int) addr6 {
	// A shift by 64 is 0 in Go, which makes both masks right at the ends.
	if bits < 64 {
		return addr6{a.hi | ^uint64(0)>>bits, ^uint64(0)}
	}
	return addr6{a.hi, a.lo | ^uint64(0)>>(bits-64)}
}
