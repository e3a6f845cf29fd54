package main

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

	"shaperd/conn"
	"shaperd/shaper"
)

// interfaces looks for those that attachments name.
func (d *doctor) interfaces() (found []finding) {
	if len(d.loaded.attach) == 0 {
		return find(healthSkip, "there are no attachments", "")
	}
	for _, note := range d.loaded.missingInterfaces() {
		found = append(found, finding{State: healthWarn, Text: note, Fix: `"ip link" lists those that are here; one that appears later is picked up`})
	}
	return orOK(found, "those that attachments name are here")
}

// foreign looks for what packets meet at attachments before the limits, or what keeps these
// from being attached there.
func (d *doctor) foreign() (found []finding) {
	if len(d.loaded.attach) == 0 {
		return find(healthSkip, "there are no attachments", "")
	}
	all, err := d.findForeign(d.loaded.config.Daemon.Pins, d.loaded.attach)
	if errors.Is(err, fs.ErrPermission) {
		return find(healthSkip, "only root can see what else is at the interfaces", "")
	}
	if err != nil {
		return find(healthWarn, err.Error(), "")
	}
	for _, f := range all {
		state := healthWarn
		if f.Refuses {
			state = healthFail
		}
		found = append(found, finding{State: state, Text: foreignNote(f), Fix: f.Fix})
	}
	return orOK(found, "packets meet the limits first")
}

// socket is one that listens, of whatever program.
type socket struct {
	protocol shaper.Protocol
	addr     netip.AddrPort
	inode    string
}

// listening returns the sockets of this network namespace that listen (proc_net(5)).
func (d *doctor) listening() (all []socket) {
	for _, table := range []struct {
		name     string
		protocol shaper.Protocol
		state    string
	}{{"tcp", shaper.TCP, "0A"}, {"tcp6", shaper.TCP, "0A"}, {"udp", shaper.UDP, "07"}, {"udp6", shaper.UDP, "07"}} {
		for line := range strings.Lines(d.read("/proc/self/net/" + table.name)) {
			f := strings.Fields(line)
			if len(f) < 10 || f[3] != table.state {
				continue
			}
			if addr, ok := procAddr(f[1]); ok {
				all = append(all, socket{table.protocol, addr, f[9]})
			}
		}
	}
	return all
}

// procAddr reads an address of /proc/net: words of 32 bits in the host's order, which is
// the other way round on all that shaperd runs on, and a port.
func procAddr(s string) (netip.AddrPort, bool) {
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

// takes reports whether s keeps others from addr. A socket at [::] may take IPv4 too: that
// cannot be seen.
func (s socket) takes(addr netip.AddrPort) bool {
	of, to := s.addr.Addr(), addr.Addr()
	if s.addr.Port() != addr.Port() {
		return false
	}
	if of.Is4() != to.Is4() {
		return of == netip.IPv6Unspecified()
	}
	return of == to || of.IsUnspecified() || to.IsUnspecified()
}

// ports looks for others that listen where the daemon is to.
func (d *doctor) ports() (found []finding) {
	if d.running {
		return find(healthSkip, "the daemon runs, and has them", "")
	}
	if errors.Is(d.asked, fs.ErrPermission) {
		return find(healthSkip, "a daemon may have them, that does not let this user ask", "")
	}
	taken := d.listening()
	look := func(at string, protocol shaper.Protocol, addr netip.AddrPort) {
		for _, s := range taken {
			if s.protocol != protocol || !s.takes(addr) {
				continue
			}
			who := d.owner(s.inode)
			if who.pid == "1" { // systemd keeps it for the daemon
				return
			}
			state, doubt := healthFail, ""
			if s.addr.Addr().Is4() != addr.Addr().Is4() {
				state, doubt = healthWarn, ", unless that takes IPv6 alone"
			}
			found = append(found, finding{
				State: state, Text: fmt.Sprintf("%s: %s has taken the port, at %v%s", at, who, s.addr, doubt),
				Fix: "stop that, or change the address; ss -lntup lists who listens",
			})
			return
		}
	}
	n := 0
	for _, l := range d.loaded.listens {
		for _, e := range l.Endpoints {
			n++
			look(fmt.Sprintf("listener %q, %v://%v", l.Name, e.Protocol, e.Addr), e.Protocol, e.Addr)
		}
	}
	for _, own := range d.loaded.config.Daemon.OwnPorts() {
		n++
		look("[daemon] "+own.Key, shaper.TCP, own.Addr)
	}
	return orOK(found, fmt.Sprintf("all %d are free", n))
}

// program is one that runs.
type program struct{ pid, name string }

func (p program) String() string {
	if p.pid == "" {
		return "another program"
	}
	return fmt.Sprintf("%s (process %s)", p.name, p.pid)
}

// owner returns who has the socket of an inode, as far as this user may see it.
func (d *doctor) owner(inode string) program {
	all, _ := fs.Glob(d.files, "proc/[0-9]*/fd/*")
	for _, p := range all {
		if to, err := fs.ReadLink(d.files, p); err == nil && to == "socket:["+inode+"]" {
			pid := strings.Split(p, "/")[1]
			return program{pid, d.read("/proc/" + pid + "/comm")}
		}
	}
	return program{}
}

// downstreams looks whether their names have addresses and, if asked to, whether they
// take connections.
func (d *doctor) downstreams() []finding {
	type target struct{ listener, host, connect string }
	var targets []target
	for _, l := range d.loaded.listens {
		tcp := slices.IndexFunc(l.Endpoints, func(e conn.Endpoint) bool { return e.Protocol == shaper.TCP })
		for _, to := range l.Downstream {
			t := target{listener: l.Name, host: to.Host}
			if d.probe && tcp >= 0 {
				port := to.Port
				if e := l.Endpoints[tcp]; port == 0 || e.SamePort {
					port = e.Addr.Port()
				}
				t.connect = net.JoinHostPort(to.Host, strconv.Itoa(int(port)))
			}
			targets = append(targets, t)
		}
	}
	if len(targets) == 0 {
		return find(healthSkip, "there are no listeners", "")
	}
	found := make([][]finding, len(targets))
	var wg sync.WaitGroup
	for i, t := range targets {
		wg.Go(func() {
			if _, err := netip.ParseAddr(t.host); err != nil {
				if err := d.resolve(t.host); err != nil {
					found[i] = find(healthFail, fmt.Sprintf("listener %q: downstream %s: %v", t.listener, t.host, err), "getent ahosts "+t.host+"; or write its address")
					return
				}
			}
			if t.connect == "" {
				return
			}
			if err := d.dial("tcp", t.connect); err != nil {
				found[i] = find(healthFail, fmt.Sprintf("listener %q: downstream %s: %v", t.listener, t.host, err), "see whether it runs, and what is on the way: ss, ip route get "+t.host)
			}
		})
	}
	wg.Wait()
	text := "all %d have addresses; --probe connects to them, too"
	if d.probe {
		text = "all %d have addresses, and those of TCP take connections"
	}
	return orOK(slices.Concat(found...), fmt.Sprintf(text, len(targets)))
}
