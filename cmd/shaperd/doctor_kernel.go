package main

import (
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"

	"shaperd/bpf"
	"shaperd/conn"
	"shaperd/shaper/config"
)

// kernelVersion is the first two numbers of one.
type kernelVersion struct{ major, minor int }

func (v kernelVersion) before(major, minor int) bool {
	return v.major < major || v.major == major && v.minor < minor
}

func (d *doctor) release() (release string, v kernelVersion) {
	release = d.read("/proc/sys/kernel/osrelease")
	_, _ = fmt.Sscanf(release, "%d.%d", &v.major, &v.minor)
	return release, v
}

// kernel looks at what the version of the kernel says.
func (d *doctor) kernel() (found []finding) {
	release, v := d.release()
	if v.major == 0 {
		return find(healthSkip, "the version of the kernel cannot be read", "")
	}
	newer := func(what string, major, minor int) {
		if v.before(major, minor) {
			found = append(found, finding{
				State: healthFail, Text: fmt.Sprintf("%s Linux %d.%d or later, and this is %s", what, major, minor, release),
				Fix: fmt.Sprintf("boot a kernel from %d.%d on", major, minor),
			})
		}
	}
	newer("shaperd needs", 5, 11) // epoll_pwait2
	if len(d.loaded.attach) > 0 {
		newer("attachments need", 6, 1)
	}
	for _, a := range d.loaded.attach {
		if a.Hook == bpf.TCX && v.before(6, 6) {
			found = append(found, finding{
				State: healthFail, Text: fmt.Sprintf("attachment %q: hook = \"tcx\" needs Linux 6.6 or later, and this is %s", a.Name, release),
				Fix: `write hook = "auto" in it`,
			})
		}
	}
	return orOK(found, "Linux "+release)
}

// missingModules returns which of needed the kernel neither has nor can load, and whether
// there is a list of those that it can.
func (d *doctor) missingModules(needed []string) (missing []string, listed bool) {
	release, _ := d.release()
	known := ""
	for _, list := range []string{"builtin", "dep"} {
		text := d.read("/lib/modules/" + release + "/modules." + list)
		known, listed = known+text, listed || text != ""
	}
	for _, m := range needed {
		if _, err := fs.Stat(d.files, at("/sys/module/"+m)); err != nil && !strings.Contains(known, "/"+m+".ko") {
			missing = append(missing, m)
		}
	}
	return missing, listed
}

// modules looks for the modules that the kernel loads when they are asked for.
func (d *doctor) modules() (found []finding) {
	release, v := d.release()
	var needed []string
	for _, a := range d.loaded.attach {
		if a.Mode == bpf.Shape && !a.Ingress {
			needed = append(needed, "sch_fq")
		}
		if a.Mode == bpf.Shape && a.Ingress {
			needed = append(needed, "sch_fq", "ifb", "act_mirred", "cls_u32", "sch_ingress")
		}
		if a.Hook == bpf.Clsact || a.Hook == bpf.Auto && v.before(6, 6) {
			needed = append(needed, "sch_ingress", "cls_bpf")
		}
	}
	if !d.loaded.diversion().Empty() {
		needed = append(needed, "nf_tables", "nft_tproxy", "nft_socket")
	}
	slices.Sort(needed)
	needed = slices.Compact(needed)
	if len(needed) == 0 {
		return find(healthSkip, "the configuration needs none", "")
	}
	missing, listed := d.missingModules(needed)
	switch {
	case missing == nil:
		return find(healthOK, strings.Join(needed, ", "), "")
	case !listed:
		return find(healthSkip, "/lib/modules/"+release+" has no list of modules: whether the kernel has "+strings.Join(missing, ", ")+" cannot be seen", "")
	}
	return find(healthFail, "the kernel has no "+strings.Join(missing, ", "),
		fmt.Sprintf("apt-get install linux-modules-extra-%s, dnf install kernel-modules-extra, or boot a kernel of the distribution that has them", release))
}

// queue tries whether the kernel holds packets.
func (d *doctor) queue() []finding {
	if !d.loaded.shapes() {
		return find(healthSkip, `no attachment has mode = "shape"`, "")
	}
	if err := d.probeShape(); err != nil {
		fix := "modprobe sch_fq"
		if missing, _ := d.missingModules([]string{"sch_fq"}); missing != nil {
			fix = `write mode = "police", or boot a kernel that has sch_fq`
		}
		return find(healthFail, err.Error(), fix)
	}
	if !d.runner.unit && !d.runner.has("CAP_NET_ADMIN") {
		return find(healthSkip, "only root can try the queue fq", "")
	}
	return find(healthOK, "packets can be held (sch_fq)", "")
}

// pins looks at the folder of what attachments leave in the kernel.
func (d *doctor) pins() []finding {
	if len(d.loaded.attach) == 0 {
		return find(healthSkip, "there are no attachments", "")
	}
	pins := d.loaded.config.Daemon.Pins
	var mount, kind string
	for line := range strings.Lines(d.read("/proc/self/mounts")) {
		f := strings.Fields(line)
		if len(f) > 2 && len(f[1]) >= len(mount) && (f[1] == "/" || f[1] == pins || strings.HasPrefix(pins, f[1]+"/")) {
			mount, kind = f[1], f[2]
		}
	}
	if kind != "bpf" {
		const usual = "/sys/fs/bpf"
		fix := "mount -t bpf bpf " + usual
		if !strings.HasPrefix(pins, usual+"/") {
			fix = "name a folder below " + usual + ", or mount a bpf file system above this one"
		}
		return find(healthFail, fmt.Sprintf("[daemon] pin_path: %s is not on a bpf file system", pins), fix)
	}
	if info, err := fs.Stat(d.files, at(pins)); err == nil {
		owner, is := info.Sys().(*syscall.Stat_t)
		if is && d.runner.uid != 0 && int(owner.Uid) != d.runner.uid {
			return find(healthFail, fmt.Sprintf("[daemon] pin_path: %s belongs to another user than %s", pins, d.runner.name),
				fmt.Sprintf("shaperd detach --pins %s; the daemon makes it anew", pins))
		}
	}
	return find(healthOK, pins, "")
}

// buffers looks at what the system lets sockets hold.
func (d *doctor) buffers() (found []finding) {
	tcp, udp := false, false
	for _, l := range d.loaded.config.Listeners() {
		tcp, udp = tcp || l.TCP, udp || l.UDP
	}
	if !tcp && !udp {
		return find(healthSkip, "there are no listeners", "")
	}
	const few = 1024
	if n, is := d.number("/proc/sys/net/core/somaxconn"); tcp && is && n < few {
		found = append(found, finding{
			State: healthWarn, Text: fmt.Sprintf("net.core.somaxconn: only %d connections wait in the kernel while shaperd restarts, or is overloaded", n),
			Fix: sysctlCommand("net.core.somaxconn", conn.Backlog),
		})
	}
	n, is := d.number("/proc/sys/net/ipv4/tcp_max_syn_backlog")
	if cookies, _ := d.number("/proc/sys/net/ipv4/tcp_syncookies"); tcp && is && n < few && cookies == 0 {
		found = append(found, finding{
			State: healthWarn, Text: fmt.Sprintf("net.ipv4.tcp_syncookies is 0, and %d connections that are half open (net.ipv4.tcp_max_syn_backlog) keep others out", n),
			Fix: sysctlCommand("net.ipv4.tcp_syncookies", 1),
		})
	}
	// With CAP_NET_ADMIN the bound does not hold.
	if n, is := d.number("/proc/sys/net/core/rmem_max"); udp && is && n < conn.UDPBuffer && !d.runner.has("CAP_NET_ADMIN") {
		found = append(found, finding{
			State: healthWarn, Text: fmt.Sprintf("net.core.rmem_max: a UDP port holds %d bytes of datagrams in the kernel, and shaperd asks for %d: the kernel drops what a burst brings beyond that, uncounted", n, conn.UDPBuffer),
			Fix: sysctlCommand("net.core.rmem_max", conn.UDPBuffer),
		})
	}
	return orOK(found, "net.core.somaxconn, net.core.rmem_max")
}

// routing looks at what transparent listeners need of it.
func (d *doctor) routing() (found []finding) {
	if d.loaded.diversion().Empty() {
		return find(healthSkip, "no listener is transparent", "")
	}
	all, _ := fs.Glob(d.files, "proc/sys/net/ipv4/conf/*/src_valid_mark")
	for _, p := range all {
		if d.read(p) == "1" {
			name := strings.TrimPrefix(p, "proc/sys/")
			if !strings.Contains(name, ".") { // as eth0.100 has, which sysctl takes with slashes alone
				name = strings.ReplaceAll(name, "/", ".")
			}
			found = append(found, finding{
				State: healthFail, Text: name + " is 1: answers of transparent downstreams look as if they came from nowhere, and are dropped",
				Fix: sysctlCommand(name, 0),
			})
		}
	}
	for _, l := range d.loaded.config.Listen {
		name := forwarding(l)
		if name != "" && d.read("/proc/sys/"+strings.ReplaceAll(name, ".", "/")) == "0" {
			found = append(found, finding{
				State: healthWarn, Text: fmt.Sprintf("listener %q: nothing but its own traffic gets to its downstream through this host, as %s is 0", l.Name, name),
				Fix: sysctlCommand(name, 1),
			})
		}
	}
	return orOK(found, "forwarding, src_valid_mark")
}

// forwarding returns the sysctl of forwarding for a listener with the address of its own
// downstream, to which this host is a gateway, or "".
func forwarding(l config.Listen) string {
	if !l.Transparent {
		return ""
	}
	for _, a := range l.Addresses {
		for _, to := range l.Downstream {
			switch {
			case to.Host != a.Addr.String():
			case a.Addr.Is4():
				return "net.ipv4.ip_forward"
			default:
				return "net.ipv6.conf.all.forwarding"
			}
		}
	}
	return ""
}

// conntrack looks at how full the kernel's table of connections is.
func (d *doctor) conntrack() []finding {
	count, counted := d.number("/proc/sys/net/netfilter/nf_conntrack_count")
	most, bounded := d.number("/proc/sys/net/netfilter/nf_conntrack_max")
	if !counted || !bounded || most == 0 {
		return find(healthSkip, "the kernel tracks no connections", "")
	}
	text := fmt.Sprintf("the kernel tracks %d connections, of at most %d (net.netfilter.nf_conntrack_max)", count, most)
	fix := sysctlCommand("net.netfilter.nf_conntrack_max", 2*most)
	switch {
	case count >= most:
		return find(healthFail, text+": it drops packets of new ones", fix)
	case count > most*8/10:
		return find(healthWarn, text+": beyond that it drops packets of new ones", fix)
	}
	return find(healthOK, text, "")
}

// clock looks at what it takes to read the time, which shaperd does for each batch.
func (d *doctor) clock() []finding {
	const folder = "/sys/devices/system/clocksource/clocksource0/"
	source := d.read(folder + "current_clocksource")
	switch source {
	case "":
		return find(healthSkip, "the clock source cannot be read", "")
	case "hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit":
	default:
		return find(healthOK, source, "")
	}
	fix := "add tsc=reliable to the kernel's command line if the hardware's clock is sound, or ask who runs the virtual machine"
	for _, better := range []string{"tsc", "kvm-clock"} {
		if slices.Contains(strings.Fields(d.read(folder+"available_clocksource")), better) {
			fix = fmt.Sprintf("echo %s > %scurrent_clocksource", better, folder)
			break
		}
	}
	return find(healthWarn, fmt.Sprintf("the clock source is %s: to read it takes a microsecond or more, and departures are late by that", source), fix)
}

// localPorts looks at whether there are ports of this host for all flows and connections
// towards downstreams.
func (d *doctor) localPorts() (found []finding) {
	var low, high, flows int
	if n, _ := fmt.Sscan(d.read("/proc/sys/net/ipv4/ip_local_port_range"), &low, &high); n < 2 {
		return find(healthSkip, "net.ipv4.ip_local_port_range cannot be read", "")
	}
	ports := high - low + 1
	const lowest, highest = 10240, 65535
	fix := func(needed int, otherwise string) string {
		if most := highest - lowest + 1; needed > most {
			return otherwise
		}
		return sysctlCommand("net.ipv4.ip_local_port_range", fmt.Sprint(lowest, " ", highest)) + "; or " + otherwise
	}
	for i, l := range d.loaded.config.Listeners() {
		listen := d.loaded.config.Listen[i]
		if l.UDP {
			flows += listen.MaxFlows
		}
		if limit := d.loaded.countsAll(l.Name); l.TCP && limit != nil && limit.Connections > ports*len(listen.Downstream) {
			each := (limit.Connections-1)/len(listen.Downstream) + 1
			found = append(found, finding{
				State: healthWarn, Fix: fix(each, fmt.Sprintf("lower max_connections of limit %q", limit.Name)),
				Text: fmt.Sprintf("listener %q: up to %d connections, and net.ipv4.ip_local_port_range has %d ports towards each of %d downstreams", l.Name, limit.Connections, ports, len(listen.Downstream)),
			})
		}
	}
	if flows > ports {
		found = append(found, finding{
			State: healthWarn, Fix: fix(flows, "lower max_flows"),
			Text: fmt.Sprintf("up to %d UDP flows (max_flows), and net.ipv4.ip_local_port_range has %d ports for them", flows, ports),
		})
	}
	return orOK(found, fmt.Sprintf("%d (net.ipv4.ip_local_port_range)", ports))
}
