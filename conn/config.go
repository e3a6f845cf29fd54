package conn

import (
	"net"
	"net/netip"
	"strconv"
	"time"

	"shaperd/shaper"
)

// Listen is a named set of places where traffic enters, and where it goes.
type Listen struct {
	Name       string
	Endpoints  []Endpoint
	Downstream []Downstream // taken in turn; the next one when a dial fails

	ConnectTimeout time.Duration // for one dial
	IdleTimeout    time.Duration // after which a UDP flow is forgotten
	MaxFlows       int           // UDP flows at once
}

// Endpoint is one port to listen on. Listening on an IPv6 address takes no IPv4
// traffic.
type Endpoint struct {
	Protocol shaper.Protocol
	Addr     netip.AddrPort
	SamePort bool // go to the same port of the downstream, whatever port it names
}

// place is where an Endpoint listens.
func (e Endpoint) place() Endpoint { return Endpoint{Protocol: e.Protocol, Addr: e.Addr} }

// Downstream is a host to forward to. Port 0 is the port the source asked for.
type Downstream struct {
	Host string
	Port uint16
}

// port returns the port that traffic for port goes to.
func (d Downstream) port(port uint16, same bool) uint16 {
	if d.Port != 0 && !same {
		return d.Port
	}
	return port
}

func (d Downstream) address(port uint16, same bool) string {
	return net.JoinHostPort(d.Host, strconv.Itoa(int(d.port(port, same))))
}
