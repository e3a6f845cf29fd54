package plan

import (
	"net/netip"

	"shaperd.dev/shaperd/conn/tproxy"
	"shaperd.dev/shaperd/shaper"
)

// TCPListeners returns the TCP addresses of the proxy.
func (p *Plan) TCPListeners() (all []netip.AddrPort) {
	for _, listen := range p.Config.Listen {
		for _, e := range listen.Endpoints() {
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
				r.Addresses = append(r.Addresses, a)
			}
		}
	}
	return r
}
