package netns

import (
	"fmt"
	"net/netip"
	"strings"
)

// noPins has daemons without attachments keep away from what others of this host pinned.
const noPins = "/nowhere/pins"

// config is the text of a configuration with one listener called door, that
// hears TCP and UDP at every address of the family, in front of its downstream.
func config(f family, limits ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "[daemon]\nobserve = false\nmetrics = %q\npin_path = %q\n\n", metricsAddr, noPins)
	fmt.Fprintf(&b, "[[listen]]\nname = \"door\"\naddress = [%q, %q]\ndownstream = [%q]\n",
		fmt.Sprintf("tcp://%v", netip.AddrPortFrom(f.any, tcpPort)),
		fmt.Sprintf("udp://%v-8010", netip.AddrPortFrom(f.any, 8000)),
		bracketed(f.downstream))
	for _, l := range limits {
		fmt.Fprintf(&b, "\n[[limit]]\n%s\n", l)
	}
	return b.String()
}

// rpcListener is another one, called rpc, in front of a TCP server. It listens at the
// server's port, and at more addresses.
func rpcListener(to netip.AddrPort, more ...string) string {
	address := append([]string{fmt.Sprintf("tcp://0.0.0.0:%d", to.Port())}, more...)
	return fmt.Sprintf("\n[[listen]]\nname = \"rpc\"\naddress = [\"%s\"]\ndownstream = [\"%v\"]\n", strings.Join(address, `", "`), to)
}

// bracketed is a host without a port.
func bracketed(a netip.Addr) string {
	if a.Is6() {
		return "[" + a.String() + "]"
	}
	return a.String()
}

// limit is the lines of a limit called name.
func limit(name string, lines ...string) string {
	return fmt.Sprintf("name = %q\n%s", name, strings.Join(lines, "\n"))
}

// In most tests there is one limit for TCP or for UDP.
const (
	onTCP = `match = { listen = ["door"], protocol = "tcp" }`
	onUDP = `match = { listen = ["door"], protocol = "udp" }`

	keyAll    = `key = []`
	keySource = "key = [\"source\"]\nipv4_prefix = 24\nipv6_prefix = 56"
)

// door is where the client reaches the listener by TCP.
func (f family) door() netip.AddrPort { return netip.AddrPortFrom(f.proxy, tcpPort) }

// tcp is where the downstream listens.
func (f family) tcp() netip.AddrPort { return netip.AddrPortFrom(f.downstream, tcpPort) }

// udpDoor and udp are the same for datagrams.
func (f family) udpDoor() netip.AddrPort { return netip.AddrPortFrom(f.proxy, udpPort) }
func (f family) udp() netip.AddrPort     { return netip.AddrPortFrom(f.downstream, udpPort) }
