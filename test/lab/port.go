package lab

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
)

var ports atomic.Uint32

// FreeAddr returns an address of the loopback interface that nobody listens at, for the
// network "tcp" or "udp". The kernel gives it to nobody else: connections leave from
// 127.0.0.1, and from ports above these, and the IP address is of this process alone.
func FreeAddr(network string) (string, error) {
	pid := os.Getpid() // of 22 bits
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
		if err == nil { // or somebody listens at this port of all addresses
			return at, c.Close()
		}
	}
	return "", fmt.Errorf("find a free port of %v: %w", ip, err)
}
