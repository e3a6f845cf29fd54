package main

import (
	"errors"
	"net/netip"
	"slices"

	"shaperd.dev/shaperd/bpf"
	"shaperd.dev/shaperd/conn"
	"shaperd.dev/shaperd/conn/tproxy"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/asn"
	"shaperd.dev/shaperd/shaper/config"
)

// loadedConfig is a configuration with everything that it refers to.
type loadedConfig struct {
	files   *config.Files
	old     []string // paths of saved overrides with keys of an earlier version
	config  *config.Config
	asns    *asn.Table // nil when the configuration names no files
	listens []conn.Listen
	blocks  []shaper.Limit // limits that implement the blocks of operators
	observe bool           // all limits of config only observe
}

// load loads a configuration for a verb: its main file may be a pipe.
func load(path string) (*loadedConfig, error) {
	return loadWith(&config.Reader{Pipes: true}, path)
}

func loadWith(r *config.Reader, path string) (*loadedConfig, error) {
	files, err := r.Read(path)
	if err != nil {
		return nil, err
	}
	return loadFiles(files, r.Opening)
}

// loadFiles loads files that were read, and what they refer to. opening is the one of
// [config.Reader].
func loadFiles(files *config.Files, opening func(path string)) (*loadedConfig, error) {
	files, old := migrateSaved(files)
	c, err := files.Load()
	if err != nil {
		return nil, err
	}
	l := newLoadedConfig(files, c)
	l.old = old
	if len(c.ASN.Files) > 0 {
		if opening != nil {
			opening("the files of [asn]")
		}
		if l.asns, err = asn.Load(c.ASN.Files...); err != nil {
			return nil, c.ASNError(err)
		}
	}
	return l, nil
}

func newLoadedConfig(files *config.Files, c *config.Config) *loadedConfig {
	return &loadedConfig{files: files, config: c, listens: connListeners(c), observe: c.Daemon.Observe}
}

// withOverrides returns l with the overrides of texts, the limits of blocks, and, with bypass, with
// limits that only observe. It does not read files again.
func (l *loadedConfig) withOverrides(texts []config.Text, blocks []shaper.Limit, bypass bool) (*loadedConfig, error) {
	c, err := l.files.Load(texts...)
	if err != nil {
		return nil, err
	}
	changed := newLoadedConfig(l.files, c)
	changed.old = l.old
	changed.asns, changed.blocks = l.asns, blocks
	changed.observe = changed.observe || bypass
	return changed, nil
}

// compile builds the policy of l for s.
func (l *loadedConfig) compile(s *shaper.Shaper) (*shaper.Policy, error) {
	p, err := s.Compile(slices.Concat(l.config.Limits, l.blocks), l.config.Listeners(), l.config.Attach, l.asns, l.observe)
	var at *shaper.LimitError
	if errors.As(err, &at) {
		return nil, l.config.Error(at.Limit, at.Key, at.Msg)
	}
	if err != nil {
		return nil, err
	}
	return p, l.checkQueues(p)
}

// hasShaping reports whether any attachment shapes.
func (l *loadedConfig) hasShaping() bool {
	return slices.ContainsFunc(l.config.Attach, func(a shaper.Attachment) bool { return a.Shapes() })
}

// checkQueues returns an error when the queue of an attachment is too small for a limit of p.
func (l *loadedConfig) checkQueues(p *shaper.Policy) error {
	for i := range p.Len() {
		limit := p.Limit(i)
		if limit.Block {
			continue
		}
		for j := range l.config.Attach {
			a := &l.config.Attach[j]
			if !slices.Contains(limit.Match.Attach, a.Name) {
				continue
			}
			if err := bpf.CheckQueue(a, p.Shape(i)); err != nil {
				at := slices.IndexFunc(l.config.Limits, func(o shaper.Limit) bool { return o.Name == limit.Name })
				return l.config.Error(at, "max_delay", "max_delay: "+err.Error())
			}
		}
	}
	return nil
}

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

// tcpListeners returns the TCP addresses of the proxy.
func (l *loadedConfig) tcpListeners() (all []netip.AddrPort) {
	for _, listen := range l.listens {
		for _, e := range listen.Endpoints {
			if e.Protocol == shaper.TCP {
				all = append(all, e.Addr)
			}
		}
	}
	return all
}

// tproxyRules returns the rules that the transparent listeners of l need.
func (l *loadedConfig) tproxyRules() tproxy.Rules {
	r := tproxy.Rules{Mark: uint32(l.config.Transparent.Mark)}
	for _, listen := range l.config.Listen {
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

// configErrors returns the errors of loading the configuration at path, one by one. One that
// is not of a place in a file has no line.
func configErrors(path string, err error) config.Errors {
	var all config.Errors
	var one *config.Error
	switch {
	case errors.As(err, &all):
		return all
	case errors.As(err, &one):
		return config.Errors{one}
	}
	return config.Errors{{File: path, Msg: err.Error()}}
}
