package doctor

import (
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"

	"shaperd.dev/shaperd/conn"
	"shaperd.dev/shaperd/shaper"
)

// kernelVersion is the first two numbers of a kernel version.
type kernelVersion struct{ major, minor int }

func (v kernelVersion) before(major, minor int) bool {
	return v.major < major || v.major == major && v.minor < minor
}

func (d *doctor) kernelRelease() (release string, v kernelVersion) {
	release = d.readText("/proc/sys/kernel/osrelease")
	_, _ = fmt.Sscanf(release, "%d.%d", &v.major, &v.minor)
	return release, v
}

// kernel checks the version of the kernel.
func (d *doctor) kernel() (found []Finding) {
	release, v := d.kernelRelease()
	if v.major == 0 {
		return oneFinding(Skip, "cannot read the kernel version", "")
	}
	newer := func(what string, major, minor int) {
		if v.before(major, minor) {
			found = append(found, Finding{
				State: Fail, Text: fmt.Sprintf("%s Linux %d.%d or later; this is %s", what, major, minor, release),
				Fix: fmt.Sprintf("boot Linux %d.%d or later", major, minor),
			})
		}
	}
	newer("shaperd needs", 5, 11) // epoll_pwait2
	if len(d.plan.Config.Attach) > 0 {
		newer("attachments need", 6, 1)
	}
	for _, a := range d.plan.Config.Attach {
		if a.Hook == shaper.HookTCX && v.before(6, 6) {
			found = append(found, Finding{
				State: Fail, Text: fmt.Sprintf("attachment %q: hook = \"tcx\" needs Linux 6.6 or later; this is %s", a.Name, release),
				Fix: `set hook = "auto"`,
			})
		}
	}
	return orOK(found, "Linux "+release)
}

// missingModules returns the modules of needed that the kernel neither has nor can load, and
// whether there is a list of those that it can load.
func (d *doctor) missingModules(needed []string) (missing []string, listed bool) {
	release, _ := d.kernelRelease()
	known := ""
	for _, list := range []string{"builtin", "dep"} {
		text := d.readText("/lib/modules/" + release + "/modules." + list)
		known, listed = known+text, listed || text != ""
	}
	for _, m := range needed {
		if _, err := fs.Stat(d.files, fsPath("/sys/module/"+m)); err != nil && !strings.Contains(known, "/"+m+".ko") {
			missing = append(missing, m)
		}
	}
	return missing, listed
}

// modules checks for the kernel modules that the configuration needs.
func (d *doctor) modules() (found []Finding) {
	release, v := d.kernelRelease()
	var needed []string
	for _, a := range d.plan.Config.Attach {
		if a.Shapes() && a.Direction == shaper.Egress {
			needed = append(needed, "sch_fq")
		}
		if a.Shapes() && a.Direction == shaper.Ingress {
			needed = append(needed, "sch_fq", "ifb", "act_mirred", "cls_u32", "sch_ingress")
		}
		if a.Hook == shaper.HookClsact || a.Hook == shaper.HookAuto && v.before(6, 6) {
			needed = append(needed, "sch_ingress", "cls_bpf")
		}
	}
	if !d.plan.TransparentRules().Empty() {
		needed = append(needed, "nf_tables", "nft_tproxy", "nft_socket")
	}
	slices.Sort(needed)
	needed = slices.Compact(needed)
	if len(needed) == 0 {
		return oneFinding(Skip, "the configuration needs no kernel module", "")
	}
	missing, listed := d.missingModules(needed)
	switch {
	case missing == nil:
		return oneFinding(OK, strings.Join(needed, ", "), "")
	case !listed:
		return oneFinding(Skip, "/lib/modules/"+release+" has no list of modules: cannot check for "+strings.Join(missing, ", "), "")
	}
	return oneFinding(Fail, "the kernel has no "+strings.Join(missing, ", "),
		fmt.Sprintf("apt-get install linux-modules-extra-%s, dnf install kernel-modules-extra, or boot a distribution kernel that has them", release))
}

// queue checks whether the kernel can shape packets.
func (d *doctor) queue() []Finding {
	if !d.plan.Shapes() {
		return oneFinding(Skip, "no attachment shapes packets", "")
	}
	if err := d.probeShape(); err != nil {
		fix := "modprobe sch_fq"
		if missing, _ := d.missingModules([]string{"sch_fq"}); missing != nil {
			fix = `set mode = "police", or boot a kernel that has sch_fq`
		}
		return oneFinding(Fail, err.Error(), fix)
	}
	if !d.runner.unit && !d.runner.has("CAP_NET_ADMIN") {
		return oneFinding(Skip, "only root can test the fq qdisc", "")
	}
	return oneFinding(OK, "packets can be delayed (sch_fq)", "")
}

// pins checks the folder for pinned BPF objects.
func (d *doctor) pins() []Finding {
	if len(d.plan.Config.Attach) == 0 {
		return oneFinding(Skip, "there are no attachments", "")
	}
	pins := d.plan.Config.Daemon.PinPath
	var mount, kind string
	for line := range strings.Lines(d.readText("/proc/self/mounts")) {
		f := strings.Fields(line)
		if len(f) > 2 && len(f[1]) >= len(mount) && (f[1] == "/" || f[1] == pins || strings.HasPrefix(pins, f[1]+"/")) {
			mount, kind = f[1], f[2]
		}
	}
	if kind != "bpf" {
		const usual = "/sys/fs/bpf"
		fix := "mount -t bpf bpf " + usual
		if !strings.HasPrefix(pins, usual+"/") {
			fix = "use a directory below " + usual + ", or mount a bpf file system there"
		}
		return oneFinding(Fail, fmt.Sprintf("[daemon] pin_path: %s is not on a bpf file system", pins), fix)
	}
	if info, err := fs.Stat(d.files, fsPath(pins)); err == nil {
		owner, is := info.Sys().(*syscall.Stat_t)
		if is && d.runner.uid != 0 && int(owner.Uid) != d.runner.uid {
			return oneFinding(Fail, fmt.Sprintf("[daemon] pin_path: %s does not belong to %s", pins, d.runner.name),
				fmt.Sprintf("shaperd detach --pin-path %s; the daemon recreates it", pins))
		}
	}
	return oneFinding(OK, pins, "")
}

// buffers checks the system limits of socket queues and buffers.
func (d *doctor) buffers() (found []Finding) {
	tcp, udp := false, false
	for _, l := range d.plan.Config.Listen {
		tcp, udp = tcp || l.Accepts(shaper.TCP), udp || l.Accepts(shaper.UDP)
	}
	if !tcp && !udp {
		return oneFinding(Skip, "there are no listeners", "")
	}
	const minBacklog = 1024
	if n, is := d.readInt("/proc/sys/net/core/somaxconn"); tcp && is && n < minBacklog {
		found = append(found, Finding{
			State: Warn, Text: fmt.Sprintf("net.core.somaxconn: the kernel queues only %d connections while shaperd restarts or is overloaded", n),
			Fix: sysctlCommand("net.core.somaxconn", conn.Backlog),
		})
	}
	n, is := d.readInt("/proc/sys/net/ipv4/tcp_max_syn_backlog")
	if cookies, _ := d.readInt("/proc/sys/net/ipv4/tcp_syncookies"); tcp && is && n < minBacklog && cookies == 0 {
		found = append(found, Finding{
			State: Warn, Text: fmt.Sprintf("net.ipv4.tcp_syncookies is 0: %d half-open connections (net.ipv4.tcp_max_syn_backlog) block all others", n),
			Fix: sysctlCommand("net.ipv4.tcp_syncookies", 1),
		})
	}
	// The bound does not apply with CAP_NET_ADMIN.
	if n, is := d.readInt("/proc/sys/net/core/rmem_max"); udp && is && n < conn.UDPBuffer && !d.runner.has("CAP_NET_ADMIN") {
		found = append(found, Finding{
			State: Warn, Text: fmt.Sprintf("net.core.rmem_max: UDP sockets can buffer %d bytes, and shaperd requests %d: the kernel drops larger bursts, and shaperd does not count them", n, conn.UDPBuffer),
			Fix: sysctlCommand("net.core.rmem_max", conn.UDPBuffer),
		})
	}
	return orOK(found, "net.core.somaxconn, net.core.rmem_max")
}

// routing checks the routing settings that transparent listeners need.
func (d *doctor) routing() (found []Finding) {
	if d.plan.TransparentRules().Empty() {
		return oneFinding(Skip, "no listener is transparent", "")
	}
	all, _ := fs.Glob(d.files, "proc/sys/net/ipv4/conf/*/src_valid_mark")
	for _, p := range all {
		if d.readText(p) == "1" {
			name := strings.TrimPrefix(p, "proc/sys/")
			if !strings.Contains(name, ".") { // for eth0.100, sysctl needs slashes
				name = strings.ReplaceAll(name, "/", ".")
			}
			found = append(found, Finding{
				State: Fail, Text: name + " is 1: the kernel drops replies of transparent downstreams as martians",
				Fix: sysctlCommand(name, 0),
			})
		}
	}
	for _, l := range d.plan.Config.Listen {
		name := forwarding(l)
		if name != "" && d.readText("/proc/sys/"+strings.ReplaceAll(name, ".", "/")) == "0" {
			found = append(found, Finding{
				State: Warn, Text: fmt.Sprintf("listener %q: %s is 0, so this host forwards no other traffic to its downstream", l.Name, name),
				Fix: sysctlCommand(name, 1),
			})
		}
	}
	return orOK(found, "forwarding, src_valid_mark")
}

// forwarding returns the forwarding sysctl for a listener on the address of its downstream, for
// which this host is a gateway. It returns "" for other listeners.
func forwarding(l shaper.Listener) string {
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

// conntrack checks how full the connection table of the kernel is.
func (d *doctor) conntrack() []Finding {
	count, counted := d.readInt("/proc/sys/net/netfilter/nf_conntrack_count")
	most, bounded := d.readInt("/proc/sys/net/netfilter/nf_conntrack_max")
	if !counted || !bounded || most == 0 {
		return oneFinding(Skip, "the kernel does not track connections", "")
	}
	text := fmt.Sprintf("the kernel tracks %d of at most %d connections (net.netfilter.nf_conntrack_max)", count, most)
	fix := sysctlCommand("net.netfilter.nf_conntrack_max", 2*most)
	switch {
	case count >= most:
		return oneFinding(Fail, text+" and drops packets of new ones", fix)
	case count > most*8/10:
		return oneFinding(Warn, text+"; when the table is full, it drops packets of new ones", fix)
	}
	return oneFinding(OK, text, "")
}

// clock checks the cost of reading the time, which shaperd does for each batch.
func (d *doctor) clock() []Finding {
	const folder = "/sys/devices/system/clocksource/clocksource0/"
	source := d.readText(folder + "current_clocksource")
	switch source {
	case "":
		return oneFinding(Skip, "cannot read the clock source", "")
	case "hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit":
	default:
		return oneFinding(OK, source, "")
	}
	fix := "add tsc=reliable to the kernel command line if the hardware clock is reliable, or ask the operator of the virtual machine"
	for _, better := range []string{"tsc", "kvm-clock"} {
		if slices.Contains(strings.Fields(d.readText(folder+"available_clocksource")), better) {
			fix = fmt.Sprintf("echo %s > %scurrent_clocksource", better, folder)
			break
		}
	}
	return oneFinding(Warn, fmt.Sprintf("the clock source is %s: reading it takes a microsecond or more, which delays departures", source), fix)
}

// localPorts checks whether this host has enough local ports for all flows and connections to
// downstreams.
func (d *doctor) localPorts() (found []Finding) {
	var low, high, flows int
	if n, _ := fmt.Sscan(d.readText("/proc/sys/net/ipv4/ip_local_port_range"), &low, &high); n < 2 {
		return oneFinding(Skip, "cannot read net.ipv4.ip_local_port_range", "")
	}
	ports := high - low + 1
	const lowest, highest = 10240, 65535
	fix := func(needed int, otherwise string) string {
		if most := highest - lowest + 1; needed > most {
			return otherwise
		}
		return sysctlCommand("net.ipv4.ip_local_port_range", fmt.Sprint(lowest, " ", highest)) + "; or " + otherwise
	}
	for _, l := range d.plan.Config.Listen {
		if l.Accepts(shaper.UDP) {
			flows += l.MaxFlows
		}
		if limit := connectionCap(d.plan, l.Name); l.Accepts(shaper.TCP) && limit != nil && limit.MaxConnections > ports*len(l.Downstream) {
			each := (limit.MaxConnections-1)/len(l.Downstream) + 1
			found = append(found, Finding{
				State: Warn, Fix: fix(each, fmt.Sprintf("lower connections of limit %q", limit.Name)),
				Text: fmt.Sprintf("listener %q: up to %d connections, but net.ipv4.ip_local_port_range has %d ports for each of %d downstreams", l.Name, limit.MaxConnections, ports, len(l.Downstream)),
			})
		}
	}
	if flows > ports {
		found = append(found, Finding{
			State: Warn, Fix: fix(flows, "lower max_flows"),
			Text: fmt.Sprintf("up to %d UDP flows (max_flows), but net.ipv4.ip_local_port_range has %d ports for them", flows, ports),
		})
	}
	return orOK(found, fmt.Sprintf("%d (net.ipv4.ip_local_port_range)", ports))
}
