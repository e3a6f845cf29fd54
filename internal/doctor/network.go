package doctor

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"

	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/shaper"
)

// interfaces checks that the interfaces of attachments exist.
func (d *doctor) interfaces() (found []Finding) {
	if len(d.plan.Config.Attach) == 0 {
		return oneFinding(Skip, "there are no attachments", "")
	}
	for _, warning := range d.plan.MissingInterfaces() {
		found = append(found, Finding{State: Warn, Text: warning, Fix: `"ip link" lists interfaces; the daemon attaches to one that appears later`})
	}
	return orOK(found, "all interfaces of attachments exist")
}

// checkForeign checks for other programs that packets pass before the limits, or that keep shaperd
// from attaching.
func (d *doctor) checkForeign() (found []Finding) {
	if len(d.plan.Config.Attach) == 0 {
		return oneFinding(Skip, "there are no attachments", "")
	}
	all, err := d.findForeign(d.plan.Config.Daemon.PinPath, d.plan.Config.Attach)
	if errors.Is(err, fs.ErrPermission) {
		return oneFinding(Skip, "only root can list other programs on the interfaces", "")
	}
	if err != nil {
		return oneFinding(Warn, err.Error(), "")
	}
	for _, f := range all {
		state := Warn
		if f.Refuses {
			state = Fail
		}
		found = append(found, Finding{State: state, Text: plan.ForeignWarning(f), Fix: f.Fix})
	}
	return orOK(found, "no other program precedes the limits")
}

// socket is a listening socket of any program.
type socket struct {
	protocol shaper.Protocol
	addr     netip.AddrPort
	inode    string
}

// listeningSockets returns the listening sockets of this network namespace (proc_net(5)).
func (d *doctor) listeningSockets() (all []socket) {
	for _, table := range []struct {
		name     string
		protocol shaper.Protocol
		state    string
	}{{"tcp", shaper.TCP, "0A"}, {"tcp6", shaper.TCP, "0A"}, {"udp", shaper.UDP, "07"}, {"udp6", shaper.UDP, "07"}} {
		for line := range strings.Lines(d.readText("/proc/self/net/" + table.name)) {
			f := strings.Fields(line)
			if len(f) < 10 || f[3] != table.state {
				continue
			}
			if addr, ok := parseProcAddr(f[1]); ok {
				all = append(all, socket{table.protocol, addr, f[9]})
			}
		}
	}
	return all
}

// parseProcAddr parses an address of /proc/net: 32-bit words in host byte order, which is
// little-endian on all machines that shaperd supports, and a port.
func parseProcAddr(s string) (netip.AddrPort, bool) {
	host, port, _ := strings.Cut(s, ":")
	b, err := hex.DecodeString(host)
	p, portErr := strconv.ParseUint(port, 16, 16)
	if err != nil || portErr != nil || len(b)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for word := range slices.Chunk(b, 4) {
		slices.Reverse(word)
	}
	addr, ok := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(addr.Unmap(), uint16(p)), ok
}

// conflictsWith reports whether s keeps others from listening on addr. Whether a socket on [::]
// accepts IPv4 too cannot be seen; it counts as a conflict.
func (s socket) conflictsWith(addr netip.AddrPort) bool {
	own, other := s.addr.Addr(), addr.Addr()
	if s.addr.Port() != addr.Port() {
		return false
	}
	if own.Is4() != other.Is4() {
		return own == netip.IPv6Unspecified()
	}
	return own == other || own.IsUnspecified() || other.IsUnspecified()
}

// ports checks whether other programs occupy ports of the configuration.
func (d *doctor) ports() (found []Finding) {
	if d.running {
		return oneFinding(Skip, "the running daemon has the ports", "")
	}
	if errors.Is(d.dialErr, fs.ErrPermission) {
		return oneFinding(Skip, "a daemon that this user may not query may have the ports", "")
	}
	taken := d.listeningSockets()
	look := func(at string, protocol shaper.Protocol, addr netip.AddrPort, instances int) {
		for _, s := range taken {
			if s.protocol != protocol || !s.conflictsWith(addr) {
				continue
			}
			owner := d.socketOwner(s.inode)
			if owner.pid == "1" { // systemd stores it for the daemon
				return
			}
			if instances > 1 && owner.name == "shaperd" { // presumably another instance
				return
			}
			state, doubt := Fail, ""
			if s.addr.Addr().Is4() != addr.Addr().Is4() {
				state, doubt = Warn, ", unless that is IPv6 only"
			}
			found = append(found, Finding{
				State: state, Text: fmt.Sprintf("%s: the port is in use by %s, at %v%s", at, owner, s.addr, doubt),
				Fix: "stop that program, or change the address; ss -lntup lists listening sockets",
			})
			return
		}
	}
	n := 0
	for _, l := range d.plan.Config.Listen {
		for _, e := range l.Endpoints() {
			n++
			look(fmt.Sprintf("listener %q, %v://%v", l.Name, e.Protocol, e.Addr), e.Protocol, e.Addr, l.Instances)
		}
	}
	for _, own := range d.plan.Config.OwnPorts() {
		n++
		look(own.Key, shaper.TCP, own.Addr, 1)
	}
	return orOK(found, fmt.Sprintf("all %d are free", n))
}

// program is a running program.
type program struct{ pid, name string }

func (p program) String() string {
	if p.pid == "" {
		return "another program"
	}
	return fmt.Sprintf("%s (process %s)", p.name, p.pid)
}

// socketOwner returns the program that has the socket of an inode, if this user may see it.
func (d *doctor) socketOwner(inode string) program {
	all, _ := fs.Glob(d.files, "proc/[0-9]*/fd/*")
	for _, p := range all {
		if to, err := fs.ReadLink(d.files, p); err == nil && to == "socket:["+inode+"]" {
			pid := strings.Split(p, "/")[1]
			return program{pid, d.readText("/proc/" + pid + "/comm")}
		}
	}
	return program{}
}

// downstreams checks that the names of downstreams resolve and, with --probe, that they accept
// connections.
func (d *doctor) downstreams() []Finding {
	type target struct{ listener, host, connect string }
	var targets []target
	for _, l := range d.plan.Config.Listen {
		tcp := slices.IndexFunc(l.Addresses, func(a shaper.Address) bool { return a.Protocol == shaper.TCP })
		for _, to := range l.Downstream {
			t := target{listener: l.Name, host: to.Host}
			if d.probe && tcp >= 0 {
				a := l.Addresses[tcp]
				port := to.PortFor(a.Ports.First, !a.Single())
				t.connect = net.JoinHostPort(to.Host, strconv.Itoa(int(port)))
			}
			targets = append(targets, t)
		}
	}
	if len(targets) == 0 {
		return oneFinding(Skip, "there are no listeners", "")
	}
	found := make([][]Finding, len(targets))
	var wg sync.WaitGroup
	for i, t := range targets {
		wg.Go(func() {
			if _, err := netip.ParseAddr(t.host); err != nil {
				if err := d.resolve(t.host); err != nil {
					found[i] = oneFinding(Fail, fmt.Sprintf("listener %q: downstream %s: %v", t.listener, t.host, err), "getent ahosts "+t.host+"; or use an address")
					return
				}
			}
			if t.connect == "" {
				return
			}
			if err := d.dial("tcp", t.connect); err != nil {
				found[i] = oneFinding(Fail, fmt.Sprintf("listener %q: downstream %s: %v", t.listener, t.host, err), "check that it runs and can be reached: ss, ip route get "+t.host)
			}
		})
	}
	wg.Wait()
	found = append(found, d.forwardLoops())
	text := "all %d resolve; use --probe to connect to them"
	if d.probe {
		text = "all %d resolve, and those of TCP accept connections"
	}
	return orOK(slices.Concat(found...), fmt.Sprintf(text, len(targets)))
}

// forwardLoops reports downstreams at an address of this host, at which a listener on all addresses accepts connections. The address may
// be of another host by the time it matters, so that the configuration is valid.
func (d *doctor) forwardLoops() (found []Finding) {
	addrs, err := d.addresses()
	if err != nil {
		return nil
	}
	for _, l := range d.plan.Config.Listen {
		for _, to := range l.Downstream {
			ip, err := netip.ParseAddr(to.Host)
			local := func(a net.Addr) bool { n, ok := a.(*net.IPNet); return ok && n.IP.Equal(ip.AsSlice()) }
			if err != nil || !slices.ContainsFunc(addrs, local) {
				continue
			}
			for _, a := range l.Addresses {
				if a.Addr.IsUnspecified() && a.Addr.Is4() == ip.Is4() && to.PortFor(a.Ports.First, !a.Single()) == a.Ports.First {
					found = append(found, Finding{
						State: Warn, Text: fmt.Sprintf("listener %q: downstream %s is an address of this host, and the listener accepts its connections at %s", l.Name, to, a),
						Fix: "use another port for one of them, or the addresses of the listener instead of " + a.Addr.String(),
					})
				}
			}
		}
	}
	return found
}
