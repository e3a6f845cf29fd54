package sock

import (
	"net/netip"

	"golang.org/x/sys/unix"
)

// PermitOthers permits other sockets of this user, also of other processes, at the address of a socket (SO_REUSEPORT,
// socket(7)), if they permit it as well. It cannot be taken back: the kernel remembers it for a TCP port.
func PermitOthers(fd int) error {
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
}

// PermitsOthers reports whether [PermitOthers] was called for a socket.
func PermitsOthers(fd int) bool {
	on, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT)
	return err == nil && on != 0
}

// SpreadSources makes the kernel choose among n sockets at one address by the source of what arrives: an IPv4 address, or
// an IPv6 prefix of 64 bits, always has the same socket while the sockets are the same. While there are fewer, it chooses by
// address and port where a source has none. The socket receives already, and has the address a; the choice is that of all
// sockets there. It fails with EINVAL for a socket that was bound before it permitted others and that is still alone.
func SpreadSources(fd int, a netip.Addr, n int) error {
	program := unix.SockFprog{}
	filter := sourceHash(a.Is4(), uint32(n))
	program.Len, program.Filter = uint16(len(filter)), &filter[0]
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF, &program)
}

// sourceHash returns a program that maps the source of a packet to 0 to n-1, n at most 2^16. The multipliers and shifts are
// those of a finalizer of 32-bit hashes: Wellons, "Prospecting for Hash Functions", lowbias32.
func sourceHash(v4 bool, n uint32) []unix.SockFilter {
	const (
		ip       = 1<<32 - 1<<20 // SKF_NET_OFF: offsets in the IP header
		v4Source = ip + 12
		v6Source = ip + 8

		load, toX    = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_MISC | unix.BPF_TAX
		mul, rsh     = unix.BPF_ALU | unix.BPF_MUL | unix.BPF_K, unix.BPF_ALU | unix.BPF_RSH | unix.BPF_K
		xorX, result = unix.BPF_ALU | unix.BPF_XOR | unix.BPF_X, unix.BPF_RET | unix.BPF_A
	)
	var program []unix.SockFilter
	add := func(code uint16, k uint32) { program = append(program, unix.SockFilter{Code: code, K: k}) }
	shiftXor := func(bits uint32) { // a ^= a >> bits
		add(toX, 0)
		add(rsh, bits)
		add(xorX, 0)
	}
	mix := func() {
		shiftXor(16)
		add(mul, 0x7feb352d)
		shiftXor(15)
		add(mul, 0x846ca68b)
		shiftXor(16)
	}
	if v4 {
		add(load, v4Source)
	} else {
		add(load, v6Source)
		mix()
		add(toX, 0)
		add(load, v6Source+4)
		add(xorX, 0)
	}
	mix()
	add(rsh, 16) // a * n / 2^32
	add(mul, n)
	add(rsh, 16)
	add(result, 0)
	return program
}
