package netns

import (
	"fmt"
	"net/netip"
	"strings"

	"shaperd.dev/shaperd/test/lab"
)

// unusedPinPath keeps daemons without attachments away from the pins of other daemons on this machine.
const unusedPinPath = "/nowhere/pins"

// config returns a configuration with one listener called door for TCP and UDP on all addresses
// of the family, in front of its downstream.
func config(f family, limits ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "[daemon]\nobserve = false\nmetrics = %q\npin_path = %q\n\n", lab.MetricsAddr, unusedPinPath)
	fmt.Fprintf(&b, "[[listen]]\nname = \"door\"\naddress = [%q, %q]\ndownstream = [%q]\n",
		fmt.Sprintf("tcp://%v", netip.AddrPortFrom(f.any, tcpPort)),
		fmt.Sprintf("udp://%v-8010", netip.AddrPortFrom(f.any, 8000)),
		bracketed(f.downstream))
	for _, l := range limits {
		fmt.Fprintf(&b, "\n[[limit]]\n%s\n", l)
	}
	return b.String()
}

// rpcListener returns another listener called rpc, in front of a TCP server. It listens on the
// server's port, and on more addresses.
func rpcListener(to netip.AddrPort, more ...string) string {
	address := append([]string{fmt.Sprintf("tcp://0.0.0.0:%d", to.Port())}, more...)
	return fmt.Sprintf("\n[[listen]]\nname = \"rpc\"\naddress = [\"%s\"]\ndownstream = [\"%v\"]\n", strings.Join(address, `", "`), to)
}

// bracketed returns a URL host without a port.
func bracketed(a netip.Addr) string {
	if a.Is6() {
		return "[" + a.String() + "]"
	}
	return a.String()
}

// limit returns the lines of a limit called name.
func limit(name string, lines ...string) string {
	return fmt.Sprintf("name = %q\n%s", name, strings.Join(lines, "\n"))
}

// Lines that most limits in tests have.
const (
	onTCP = `match = { listen = ["door"], protocol = "tcp" }`
	onUDP = `match = { listen = ["door"], protocol = "udp" }`

	keyAll    = `key = []`
	keySource = "key = [\"source\"]\nipv4_prefix = 24\nipv6_prefix = 56"
)

// listenAddr returns the listener's TCP address for the client.
func (f family) listenAddr() netip.AddrPort { return netip.AddrPortFrom(f.proxy, tcpPort) }

// tcp returns the downstream's TCP address.
func (f family) tcp() netip.AddrPort { return netip.AddrPortFrom(f.downstream, tcpPort) }

// udpListenAddr and udp return the UDP addresses of listener and downstream.
func (f family) udpListenAddr() netip.AddrPort { return netip.AddrPortFrom(f.proxy, udpPort) }
func (f family) udp() netip.AddrPort           { return netip.AddrPortFrom(f.downstream, udpPort) }
