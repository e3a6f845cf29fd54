package plan

import (
	"net/netip"

	"shaperd.dev/shaperd/conn"
	"shaperd.dev/shaperd/conn/tproxy"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// connListeners converts the listeners of a configuration. It expands ranges of ports.
func connListeners(c *config.Config) []conn.Listen {
	var all []conn.Listen
	for _, from := range c.Listen {
		to := conn.Listen{
			Name: from.Name,
			Balance: map[config.Balance]conn.Balance{
				config.RoundRobin: conn.RoundRobin, config.LeastConnections: conn.LeastConnections, config.SourceHash: conn.SourceHash,
			}[from.Balance],
			AcceptProxyFrom: from.AcceptProxyFrom, SendProxy: byte(from.SendProxy), Transparent: from.Transparent,
			SlowStart: from.SlowStart, Check: conn.Check(from.Check), EjectAfter: from.EjectAfter, EjectFor: from.EjectFor,
			Timeouts: conn.Timeouts{
				Connect: from.ConnectTimeout, FirstByte: from.FirstByteTimeout, Idle: from.TCPIdleTimeout,
				HalfClose: from.HalfCloseTimeout, Lifetime: from.MaxLifetime, MinThroughput: from.MinThroughput / 8,
			},
			IdleTimeout: from.UDPIdleTimeout, MaxFlows: from.MaxFlows,
			MaxFlowsPerSource: from.MaxFlowsPerSource, Amplification: from.Amplification,
			AccessLog: from.AccessLog,
		}
		for _, a := range from.Addresses {
			for port := int(a.Ports.First); port <= int(a.Ports.Last); port++ {
				to.Endpoints = append(to.Endpoints, conn.Endpoint{
					Protocol: a.Protocol,
					Addr:     netip.AddrPortFrom(a.Addr, uint16(port)),
					SamePort: a.Ports.First != a.Ports.Last,
				})
			}
		}
		for _, d := range from.Downstream {
			to.Downstream = append(to.Downstream, conn.Downstream{Host: d.Host, Port: d.Port, Weight: d.Weight, MaxConnections: d.MaxConnections})
		}
		all = append(all, to)
	}
	return all
}

// TCPListeners returns the TCP addresses of the proxy.
func (p *Plan) TCPListeners() (all []netip.AddrPort) {
	for _, listen := range p.Listens {
		for _, e := range listen.Endpoints {
			if e.Protocol == shaper.TCP {
				all = append(all, e.Addr)
			}
		}
	}
	return all
}

// TransparentRules returns the rules that the transparent listeners of p need.
func (p *Plan) TransparentRules() tproxy.Rules {
	r := tproxy.Rules{Mark: uint32(p.Config.Transparent.Mark)}
	for _, listen := range p.Config.Listen {
		if !listen.Transparent {
			continue
		}
		for _, a := range listen.Addresses {
			anyFamily := len(listen.AcceptProxyFrom) > 0 // a PROXY header can name a source of any family
			r.IPv4 = r.IPv4 || anyFamily || a.Addr.Is4()
			r.IPv6 = r.IPv6 || anyFamily || a.Addr.Is6()
			if !a.Addr.IsUnspecified() {
				r.Addresses = append(r.Addresses, tproxy.Address(a))
			}
		}
	}
	return r
}
