package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"shaperd.dev/shaperd/bpf"
	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// configuration checks that the configuration loads, and reports its warnings.
func (d *doctor) configuration() (found []Finding) {
	if d.loadErr != nil {
		for _, e := range plan.Errors(d.file, d.loadErr) {
			text := e.Msg
			if e.Line > 0 {
				text = fmt.Sprintf("%s:%d:%d: %s", e.File, e.Line, e.Column, e.Msg)
			}
			found = append(found, Finding{State: Fail, Text: text})
		}
		fix := "edit it, then run: shaperd check " + d.file
		switch {
		case errors.Is(d.loadErr, fs.ErrNotExist):
			fix = "create it, or name another file with --config; examples are in /usr/share/doc/shaperd/examples"
		case errors.Is(d.loadErr, fs.ErrPermission):
			fix = "run this as root"
		}
		found[len(found)-1].Fix = fix
		return found
	}
	for _, warning := range d.plan.Warnings() {
		found = append(found, Finding{State: Warn, Text: warning})
	}
	return orOK(found, d.file)
}

// configFiles checks the permissions of the configuration files.
func (d *doctor) configFiles() (found []Finding) {
	folder := path.Join(path.Dir(d.file), "conf.d")
	more, _ := fs.Glob(d.files, fsPath(path.Join(folder, "*.toml")))
	files := []string{d.file}
	for _, p := range more {
		files = append(files, "/"+p)
	}
	read := files
	if _, err := fs.Stat(d.files, fsPath(folder)); err == nil {
		read = append([]string{folder}, files...)
	}
	for _, p := range append(read, path.Dir(d.file)) {
		info, err := fs.Stat(d.files, fsPath(p))
		if err == nil && info.Mode().Perm()&0o002 != 0 && info.Mode()&fs.ModeSticky == 0 {
			found = append(found, Finding{State: Warn, Text: p + ": writable by every user", Fix: "chmod o-w " + p})
		}
	}
	found = append(found, d.checkReadable(read...)...)
	return orOK(found, fmt.Sprintf("configuration files are writable by their owner only (%d)", len(files)))
}

// checkReadable returns a finding for each file or folder that keeps the runner from reading paths.
func (d *doctor) checkReadable(paths ...string) (found []Finding) {
	reported := map[string]bool{"": true}
	for _, p := range paths {
		at := d.readObstacle(p)
		if reported[at] {
			continue
		}
		reported[at] = true
		text, fix := fmt.Sprintf("%s: not readable by %s", p, d.runner.name), "chmod o+rX "+p
		if at != p {
			text, fix = fmt.Sprintf("%s: not reachable by %s, because of the directory %s", p, d.runner.name, at), "chmod o+x "+at
		}
		found = append(found, Finding{State: Fail, Text: text, Fix: fix})
	}
	return found
}

// asnAge is the age at which ASN files are reported: prefixes move between autonomous systems.
const asnAge = 60 * 24 * time.Hour

func (d *doctor) asnFiles() (found []Finding) {
	files := d.plan.Config.ASN.Files
	if len(files) == 0 {
		return oneFinding(Skip, "the configuration names none", "")
	}
	for _, p := range files {
		found = append(found, d.checkReadable(p)...)
		info, err := fs.Stat(d.files, fsPath(p))
		if err != nil {
			continue
		}
		if age := d.now.Sub(info.ModTime()); age > asnAge {
			found = append(found, Finding{
				State: Warn, Fix: "download a newer one to " + p + ", then run: systemctl reload shaperd",
				Text: fmt.Sprintf("%s is %d days old: prefixes have moved to other autonomous systems since", p, int(age.Hours()/24)),
			})
		}
	}
	return orOK(found, fmt.Sprintf("%d files, less than %d days old", len(files), int(asnAge.Hours()/24)))
}

// unit is the properties of shaperd.service, drop-ins included; nil without systemd.
type unit map[string]string

func (u unit) loaded() bool { return u["LoadState"] == "loaded" }
func (u unit) active() bool {
	return slices.Contains([]string{"active", "activating", "reloading"}, u["ActiveState"])
}

func (d *doctor) readUnit() unit {
	if _, err := fs.Stat(d.files, "run/systemd/system"); err != nil {
		return nil
	}
	out, err := d.systemctl("show", "shaperd.service", "--property",
		"LoadState,UnitFileState,ActiveState,NeedDaemonReload,User,Group,SupplementaryGroups,AmbientCapabilities,CapabilityBoundingSet,LimitNOFILE")
	if err != nil {
		return nil
	}
	u := unit{}
	for line := range strings.Lines(out) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		u[key] = value
	}
	return u
}

func (d *doctor) unitState() (found []Finding) {
	u := d.unit
	switch {
	case u == nil:
		return oneFinding(Skip, "systemd does not run, or does not answer", "")
	case u["LoadState"] == "masked":
		return oneFinding(Warn, "shaperd.service is masked: systemd does not start it", "systemctl unmask shaperd")
	case !u.loaded():
		return oneFinding(Warn, "shaperd.service is "+u["LoadState"], "make install && systemd-sysusers && systemctl daemon-reload")
	}
	add := func(s State, text, fix string) { found = append(found, Finding{State: s, Text: text, Fix: fix}) }
	if d.runner.uid < 0 {
		add(Fail, fmt.Sprintf("shaperd.service runs as the unknown user %s", u["User"]), "systemd-sysusers")
	}
	if u["NeedDaemonReload"] == "yes" {
		add(Warn, "shaperd.service has changed on disk since systemd read it", "systemctl daemon-reload")
	}
	if u["ActiveState"] == "failed" {
		add(Fail, "shaperd.service has failed", `journalctl -u shaperd -e shows why; then "systemctl restart shaperd"`)
	}
	if s := u["UnitFileState"]; s != "enabled" && s != "enabled-runtime" {
		add(Warn, "shaperd.service does not start at boot: it is "+s, "systemctl enable shaperd")
	}
	return orOK(found, "shaperd.service is loaded and enabled, and "+u["ActiveState"])
}

// daemon checks whether a daemon answers.
func (d *doctor) daemon() []Finding {
	if d.socket == "" {
		return oneFinding(Skip, "--control names no socket", "")
	}
	info, err := fs.Stat(d.files, fsPath(d.socket))
	switch {
	case errors.Is(d.dialErr, fs.ErrPermission):
		return oneFinding(Warn, fmt.Sprintf("this user may not connect to %s", d.socket), "run this as root, or as a member of the group shaperd")
	case err != nil && d.unit.active():
		return oneFinding(OK, "shaperd.service is "+d.unit["ActiveState"], "")
	case err != nil:
		return oneFinding(Skip, "not running: "+d.socket+" does not exist", "")
	case info.Mode()&fs.ModeSocket == 0:
		return oneFinding(Fail, d.socket+" is not a socket", "rm "+d.socket)
	case d.dialErr == nil:
		return oneFinding(OK, "a daemon answers at "+d.socket, "")
	}
	return oneFinding(Warn, d.socket+" exists, but no daemon answers: it was killed", "start the daemon, or rm "+d.socket)
}

// requirement is a set of capabilities, and what needs them.
type requirement struct {
	purpose      string
	capabilities []string
	dropIn       string // of the unit, which grants them
}

// requirements returns the capabilities that p needs. Ports from unprivileged on need none.
func requirements(p *plan.Plan, unprivileged int) (all []requirement) {
	var low []int
	for _, listen := range p.Config.Listen {
		for _, e := range listen.Endpoints() {
			if port := int(e.Addr.Port()); port < unprivileged {
				low = append(low, port)
			}
		}
	}
	for _, own := range p.Config.OwnPorts() {
		if port := int(own.Addr.Port()); port > 0 && port < unprivileged {
			low = append(low, port)
		}
	}
	if low != nil {
		all = append(all, requirement{fmt.Sprintf("port %d", slices.Min(low)), []string{"CAP_NET_BIND_SERVICE"}, ""})
	}
	if len(p.Config.Attach) > 0 {
		all = append(all, requirement{"[[attach]]", bpf.Capabilities(), "packet-plane.conf"})
	}
	const admin = "network-admin.conf"
	if !p.TransparentRules().Empty() {
		all = append(all, requirement{"transparent listeners", []string{"CAP_NET_RAW"}, admin})
		if p.Config.Transparent.Rules == config.RulesInstall {
			all = append(all, requirement{`[transparent] rules = "install"`, []string{"CAP_NET_ADMIN"}, admin})
		}
	}
	for _, limit := range p.Config.Limits {
		if limit.RefuseWith == shaper.RefuseReject && !limit.Observe && !p.Config.Daemon.Observe {
			all = append(all, requirement{fmt.Sprintf(`refuse_with = "reject" of limit %q`, limit.Name), []string{"CAP_NET_RAW"}, admin})
		}
	}
	return all
}

func (d *doctor) capabilities() (found []Finding) {
	unprivileged, is := d.readInt("/proc/sys/net/ipv4/ip_unprivileged_port_start")
	if !is {
		unprivileged = 1024
	}
	needs := requirements(d.plan, unprivileged)
	if len(needs) == 0 {
		return oneFinding(OK, "the configuration needs no privilege", "")
	}
	var has []string
	for _, n := range needs {
		var missing []string
		for _, c := range n.capabilities {
			if d.runner.has(c) {
				has = append(has, c)
			} else {
				missing = append(missing, c)
			}
		}
		if missing != nil {
			found = append(found, Finding{
				State: Fail, Fix: d.grantCommand(n.dropIn, missing),
				Text: fmt.Sprintf("%s lacks %s, for %s", d.runner.name, strings.Join(missing, ", "), n.purpose),
			})
		}
	}
	slices.Sort(has)
	return orOK(found, fmt.Sprintf("%s has %s", d.runner.name, strings.Join(slices.Compact(has), ", ")))
}

// grantCommand returns the command that grants the runner missing capabilities.
func (d *doctor) grantCommand(dropIn string, missing []string) string {
	switch {
	case !d.runner.unit:
		return "run shaperd as root, or with systemd"
	case dropIn == "":
		all := strings.Join(missing, " ")
		return fmt.Sprintf("systemctl edit shaperd: [Service] AmbientCapabilities=%[1]s CapabilityBoundingSet=%[1]s", all)
	}
	return fmt.Sprintf("install -D -m 0644 /usr/share/doc/shaperd/examples/%[1]s /etc/systemd/system/shaperd.service.d/%[1]s && "+
		"systemctl daemon-reload && systemctl restart shaperd", dropIn)
}

// descriptors checks whether there are enough for the traffic that the configuration admits. The
// proxy accepts connections up to 95 % of them.
func (d *doctor) descriptors() []Finding {
	const own = 64 // other than listening sockets, about
	c := d.plan.Config
	flows, fixed, connections, bounded := 0, own, 0, true
	counted := map[string]bool{}
	for _, l := range c.Listen {
		fixed += len(l.Endpoints())
		if l.Accepts(shaper.UDP) {
			flows += l.MaxFlows
		}
		if !l.Accepts(shaper.TCP) {
			continue
		}
		limit := connectionCap(d.plan, l.Name)
		if limit == nil {
			bounded = false
			continue
		}
		if limit.Key == 0 && counted[limit.Name] {
			continue // shared by several listeners
		}
		counted[limit.Name] = true
		connections += limit.MaxConnections
		fixed += limit.MaxQueue // one descriptor each
	}
	has := d.runner.descriptors
	needs := fixed + flows + 2*connections
	text := fmt.Sprintf("%s has %d descriptors", d.runner.name, has)
	if !bounded { // the rest is for connections
		const enough = 1000
		rest := (has*95/100 - needs) / 2
		if rest >= enough {
			return oneFinding(OK, fmt.Sprintf("%s, which leaves room for %d TCP connections", text, rest), "")
		}
		return oneFinding(Warn, fmt.Sprintf("%s, which leaves room for %d TCP connections: more will wait in the kernel", text, max(0, rest)),
			d.raiseCommand((needs+20*enough)*100/95))
	}
	if needs > has*95/100 {
		return oneFinding(Warn, fmt.Sprintf("%s, but the configuration may need %d: two per TCP connection, one per UDP flow or waiting connection", text, needs),
			d.raiseCommand(needs*100/95+1))
	}
	return oneFinding(OK, fmt.Sprintf("%s, and the configuration needs at most %d", text, needs), "")
}

// raiseCommand returns the command that raises the descriptors of the runner to n.
func (d *doctor) raiseCommand(n int) string {
	command := fmt.Sprintf("ulimit -n %d", n)
	if d.runner.unit {
		command = fmt.Sprintf("systemctl edit shaperd: [Service] LimitNOFILE=%d", n)
	}
	if maxOpen, is := d.readInt("/proc/sys/fs/nr_open"); is && n > maxOpen { // the kernel refuses more
		return sysctlCommand("fs.nr_open", n) + "; then " + command
	}
	return command
}

// connectionCap returns the strictest limit that caps all TCP connections of a listener together,
// or nil.
func connectionCap(p *plan.Plan, listener string) (narrowest *shaper.Limit) {
	for i := range p.Config.Limits {
		limit := &p.Config.Limits[i]
		m := &limit.Match
		if !limit.CapsConnections() || limit.Observe || p.Config.Daemon.Observe || limit.InPacketPlane() ||
			limit.Key&^shaper.KeyListen != 0 || len(m.Source)+len(m.ASN)+len(m.Country)+len(m.Group)+len(m.Port) > 0 || m.Protocol == shaper.UDP ||
			len(m.Listen) > 0 && !slices.Contains(m.Listen, listener) {
			continue
		}
		if narrowest == nil || limit.MaxConnections < narrowest.MaxConnections {
			narrowest = limit
		}
	}
	return narrowest
}
