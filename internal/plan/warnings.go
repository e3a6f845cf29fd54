package plan

import (
	"fmt"
	"net"
	"slices"
	"strings"

	"shaperd.dev/shaperd/bpf"
	"shaperd.dev/shaperd/control"
	"shaperd.dev/shaperd/shaper"
)

// Warnings describes valid settings that are probably not intended.
func (p *Plan) Warnings() (all []string) {
	for _, a := range p.Config.Attach {
		if !slices.ContainsFunc(p.Config.Limits, func(l shaper.Limit) bool { return slices.Contains(l.Match.Attach, a.Name) }) {
			all = append(all, fmt.Sprintf("attachment %q: no limit names it in match.attach, so it limits nothing", a.Name))
		}
	}
	for _, path := range p.files.Ignored() {
		all = append(all, fmt.Sprintf("%s is ignored: files in conf.d must be named *.toml", path))
	}
	for _, path := range p.old {
		all = append(all, fmt.Sprintf("%s has keys of an earlier version, which are read as the current ones: \"shaperd set limit\" with --save replaces them", path))
	}
	for _, e := range []struct{ key, addr string }{{"metrics", p.Config.Daemon.Metrics}, {"dashboard", p.Config.Daemon.Dashboard}} {
		if e.addr != "" && !control.Loopback(e.addr) {
			all = append(all, fmt.Sprintf("[daemon] %s = %q: other hosts can connect, without authentication", e.key, e.addr))
		}
	}
	for _, url := range p.Config.Shared.Store {
		protocol, rest, _ := strings.Cut(url, "://")
		hosts, _, _ := strings.Cut(rest, "/")
		remote := slices.ContainsFunc(strings.Split(hosts, ","), func(host string) bool { return !control.Loopback(host) })
		if plain := protocol == "redis" || strings.HasPrefix(protocol, "redis+"); plain && remote {
			all = append(all, fmt.Sprintf("[shared] store = %q is not encrypted: an attacker on the path can read the password and lift limits", url))
		}
	}
	return slices.Concat(all, p.timeoutWarnings(), p.crossedLimits(), p.openSharedLimits(), p.forgeableQuotas(), p.emptyCountries())
}

// forgeableQuotas returns a warning for each quota by source of which forged datagrams can take the keys.
func (p *Plan) forgeableQuotas() (all []string) {
	for i := range p.Config.Limits {
		l := &p.Config.Limits[i]
		if l.Quota.Amount == 0 || l.Key&shaper.KeySource == 0 || l.Match.Protocol == shaper.TCP {
			continue
		}
		if slices.ContainsFunc(p.Config.Listen, func(n shaper.Listener) bool {
			return n.Accepts(shaper.UDP) && (len(l.Match.Listen) == 0 || slices.Contains(l.Match.Listen, n.Name))
		}) {
			all = append(all, fmt.Sprintf("limit %q: forged sources of UDP can take all %d keys of its quota, and later sources share one: match protocol \"tcp\", or sources that cannot be forged", l.Name, shaper.MaxQuotaKeys))
		}
	}
	return all
}

// emptyCountries returns a warning for each country of a match that no address is in.
func (p *Plan) emptyCountries() (all []string) {
	known := map[shaper.Country]bool{0: true}
	for r := range p.asns.Countries() {
		known[r.Country] = true
	}
	for i := range p.Config.Limits {
		l := &p.Config.Limits[i]
		for _, c := range l.Match.Country {
			if !known[c] {
				all = append(all, fmt.Sprintf("limit %q: match.country: the files of [asn] have no address in %v: check the code, which is \"GB\" for the United Kingdom and \"GR\" for Greece", l.Name, c))
			}
		}
	}
	return all
}

// openSharedLimits returns a warning for each shared limit that packets are not under when the daemon has stopped,
// while the other hosts go on.
func (p *Plan) openSharedLimits() (all []string) {
	for i := range p.Config.Limits {
		l := &p.Config.Limits[i]
		for _, a := range p.Config.Attach {
			if l.Shared && !l.Observe && a.OnStop == shaper.StopOpen && slices.Contains(l.Match.Attach, a.Name) {
				all = append(all, fmt.Sprintf("limit %q: hosts share it, and attachment %q has on_stop = \"open\": "+
					"when this daemon has stopped, they exceed it together; on_stop = \"keep\" enforces this host's part", l.Name, a.Name))
			}
		}
	}
	return all
}

// crossedLimits returns a warning for each limit whose buckets can exceed their rate because of
// other limits.
func (p *Plan) crossedLimits() (all []string) {
	policy, err := p.Compile(shaper.New(1))
	if err != nil {
		return nil // reported as an error
	}
	for i := range policy.ChargedOnArrival().All {
		limit := policy.Limit(i)
		if slices.ContainsFunc(p.Config.Attach, func(a shaper.Attachment) bool {
			return a.Shapes() && slices.Contains(limit.Match.Attach, a.Name)
		}) {
			all = append(all, fmt.Sprintf("limit %q: other limits delay its packets differently, so that delayed packets can leave one of its buckets at once, "+
				"up to %v at its rate; a limit without a key never exceeds its rate", limit.Name, policy.MaxTotalDelay(i).Duration()))
		}
	}
	return all
}

// timeoutWarnings returns a warning for each listener whose connections are capped, but on which
// no timeout ends silent connections: a few clients can occupy all slots forever.
func (p *Plan) timeoutWarnings() (all []string) {
	for _, listen := range p.Config.Listen {
		tcp := slices.ContainsFunc(listen.Addresses, func(a shaper.Address) bool { return a.Protocol == shaper.TCP })
		if !tcp || listen.TCPIdleTimeout > 0 || listen.FirstByteTimeout > 0 {
			continue
		}
		caps := ""
		for _, limit := range p.Config.Limits {
			m := &limit.Match
			if limit.CapsConnections() && !limit.InPacketPlane() && m.Protocol != shaper.UDP && (len(m.Listen) == 0 || slices.Contains(m.Listen, listen.Name)) {
				caps = fmt.Sprintf("limit %q caps connections", limit.Name)
				break
			}
		}
		if slices.ContainsFunc(listen.Downstream, func(d shaper.Downstream) bool { return d.MaxConnections > 0 }) {
			caps = "a downstream caps connections"
		}
		if caps != "" {
			all = append(all, fmt.Sprintf("listener %q: %s, and silent clients keep their slots forever: set tcp_idle_timeout or first_byte_timeout", listen.Name, caps))
		}
	}
	return all
}

// HostWarnings describes what keeps this host from running the configuration as intended.
func (p *Plan) HostWarnings() (all []string) {
	var err error
	if len(p.Config.Attach) > 0 {
		err = bpf.CheckProcessor()
	}
	if err == nil && p.Shapes() {
		err = bpf.ProbeShape()
	}
	if err != nil {
		all = append(all, fmt.Sprintf("\"run\" would fail on this host: %v", err))
	}
	// Without the privileges to look there is no warning: any user can check a configuration.
	foreign, _ := bpf.FindForeign(p.Config.Daemon.PinPath, p.Config.Attach)
	for _, f := range foreign {
		all = append(all, ForeignWarning(f)+": "+f.Fix)
	}
	return append(all, p.MissingInterfaces()...)
}

// ForeignWarning describes another program on an interface of an attachment, and its effect.
func ForeignWarning(f bpf.Foreign) string {
	at := fmt.Sprintf("attachment %q: at %s, %s", f.Attachment, f.Interface, f.Direction)
	if f.Refuses {
		return fmt.Sprintf("%s, there is %s: \"run\" does not attach next to it", at, f.What)
	}
	return fmt.Sprintf("%s, packets pass %s before the limits: the limits do not see packets that it drops or redirects, and see packets that it rewrites in their new form", at, f.What)
}

// MissingInterfaces returns a warning for each named interface that does not exist.
func (p *Plan) MissingInterfaces() (all []string) {
	for _, a := range p.Config.Attach {
		for _, name := range a.Interfaces {
			if strings.ContainsAny(name, `*?[\`) {
				continue
			}
			if _, err := net.InterfaceByName(name); err != nil {
				all = append(all, fmt.Sprintf("attachment %q: interface %s does not exist yet", a.Name, name))
			}
		}
	}
	return all
}
