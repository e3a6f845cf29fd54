package testutil

import (
	"io"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
)

var ports atomic.Uint32

// FreeAddr returns a loopback address for the network "tcp" or "udp" that is not in use.
// The kernel does not assign it to other sockets: connections leave from 127.0.0.1 and
// from higher ports, and the IP address is unique to this process.
func FreeAddr(t testing.TB, network string) string {
	t.Helper()
	pid := os.Getpid() // up to 22 bits
	ip := netip.AddrFrom4([4]byte{127, 128 | byte(pid>>16), byte(pid >> 8), byte(pid)})
	var err error
	for range 100 {
		at := netip.AddrPortFrom(ip, uint16(20_000+ports.Add(1)%10_000)).String()
		var c io.Closer
		if network == "udp" {
			c, err = net.ListenPacket(network, at)
		} else {
			c, err = net.Listen(network, at)
		}
		if err != nil {
			continue // the port is in use at the wildcard address
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		return at
	}
	t.Fatalf("no free port of %v: %v", ip, err)
	return ""
}

// FreePort returns a port for the network "tcp" or "udp" that is not in use at any IPv4 address. Neither the kernel nor
// [FreeAddr] assigns it, and other processes begin elsewhere.
func FreePort(t testing.TB, network string) uint16 {
	t.Helper()
	const first, n = 30_000, 2_768 // up to the ports that the kernel assigns
	var err error
	for range 100 {
		port := uint16(first + (uint32(os.Getpid())*97+ports.Add(1))%n)
		at := netip.AddrPortFrom(netip.IPv4Unspecified(), port).String()
		var c io.Closer
		if network == "udp" {
			c, err = net.ListenPacket("udp4", at)
		} else {
			c, err = net.Listen("tcp4", at)
		}
		if err != nil {
			continue
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		return port
	}
	t.Fatalf("no free port: %v", err)
	return 0
}
