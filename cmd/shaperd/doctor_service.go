package main

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"shaperd/bpf"
	"shaperd/shaper"
	"shaperd/shaper/config"
)

// configuration says whether it loads, and what in it is probably not intended.
func (d *doctor) configuration() (found []finding) {
	if d.loadErr != nil {
		for _, m := range checkErrors(d.file, d.loadErr) {
			text := m.Message
			if m.Line > 0 {
				text = fmt.Sprintf("%s:%d:%d: %s", m.File, m.Line, m.Column, m.Message)
			}
			found = append(found, finding{State: healthFail, Text: text})
		}
		fix := "edit it, and then: shaperd check " + d.file
		switch {
		case errors.Is(d.loadErr, fs.ErrNotExist):
			fix = "write it, or name another one with --config; examples are in /usr/share/doc/shaperd/examples"
		case errors.Is(d.loadErr, fs.ErrPermission):
			fix = "run this as root"
		}
		found[len(found)-1].Fix = fix
		return found
	}
	for _, note := range d.loaded.notes() {
		found = append(found, finding{State: healthWarn, Text: note})
	}
	return orOK(found, d.file)
}

// configFiles looks at who may read and write the files of the configuration.
func (d *doctor) configFiles() (found []finding) {
	folder := path.Join(path.Dir(d.file), "conf.d")
	more, _ := fs.Glob(d.files, at(path.Join(folder, "*.toml")))
	files := []string{d.file}
	for _, p := range more {
		files = append(files, "/"+p)
	}
	read := files
	if _, err := fs.Stat(d.files, at(folder)); err == nil {
		read = append([]string{folder}, files...)
	}
	for _, p := range append(read, path.Dir(d.file)) {
		info, err := fs.Stat(d.files, at(p))
		if err == nil && info.Mode().Perm()&0o002 != 0 && info.Mode()&fs.ModeSticky == 0 {
			found = append(found, finding{State: healthWarn, Text: p + ": every user may write to it, and so change what shaperd does", Fix: "chmod o-w " + p})
		}
	}
	found = append(found, d.unreadable(read...)...)
	return orOK(found, fmt.Sprintf("%d of the configuration, only for those to write whose they are", len(files)))
}

// unreadable returns what keeps the runner from reading files and folders, each once.
func (d *doctor) unreadable(paths ...string) (found []finding) {
	told := map[string]bool{"": true}
	for _, p := range paths {
		at := d.mayRead(p)
		if told[at] {
			continue
		}
		told[at] = true
		text, fix := fmt.Sprintf("%s: %s may not read it", p, d.runner.name), "chmod o+rX "+p
		if at != p {
			text, fix = fmt.Sprintf("%s: %s may not get to it, for the folder %s", p, d.runner.name, at), "chmod o+x "+at
		}
		found = append(found, finding{State: healthFail, Text: text, Fix: fix})
	}
	return found
}

// asnAge is how old files of autonomous systems may be: what announces an address moves.
const asnAge = 60 * 24 * time.Hour

func (d *doctor) asnFiles() (found []finding) {
	files := d.loaded.config.ASN.Files
	if len(files) == 0 {
		return find(healthSkip, "the configuration names none", "")
	}
	for _, p := range files {
		found = append(found, d.unreadable(p)...)
		info, err := fs.Stat(d.files, at(p))
		if err != nil {
			continue
		}
		if age := d.now.Sub(info.ModTime()); age > asnAge {
			found = append(found, finding{
				State: healthWarn, Fix: "fetch a newer one to " + p + ", and then: systemctl reload shaperd",
				Text: fmt.Sprintf("%s is %d days old: addresses have moved to other autonomous systems since", p, int(age.Hours()/24)),
			})
		}
	}
	return orOK(found, fmt.Sprintf("%d, younger than %d days", len(files), int(asnAge.Hours()/24)))
}

// unit is properties of shaperd.service, as systemd has them with all drop-ins; nil where
// there is no systemd.
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

func (d *doctor) unitState() (found []finding) {
	u := d.unit
	switch {
	case u == nil:
		return find(healthSkip, "systemd does not run here, or does not answer", "")
	case u["LoadState"] == "masked":
		return find(healthWarn, "shaperd.service is masked: systemd does not start it", "systemctl unmask shaperd")
	case !u.loaded():
		return find(healthWarn, "systemd has no shaperd.service: it is "+u["LoadState"], "make install && systemd-sysusers && systemctl daemon-reload")
	}
	add := func(s health, text, fix string) { found = append(found, finding{State: s, Text: text, Fix: fix}) }
	if d.runner.uid < 0 {
		add(healthFail, fmt.Sprintf("shaperd.service runs as %s, and there is no such user", u["User"]), "systemd-sysusers")
	}
	if u["NeedDaemonReload"] == "yes" {
		add(healthWarn, "shaperd.service has changed on disk, and systemd has not read it since", "systemctl daemon-reload")
	}
	if u["ActiveState"] == "failed" {
		add(healthFail, "shaperd.service has failed", `journalctl -u shaperd -e says why; then "systemctl restart shaperd"`)
	}
	if s := u["UnitFileState"]; s != "enabled" && s != "enabled-runtime" {
		add(healthWarn, "shaperd.service is not started at boot: it is "+s, "systemctl enable shaperd")
	}
	return orOK(found, "shaperd.service is loaded and enabled, and "+u["ActiveState"])
}

// daemon says whether one answers.
func (d *doctor) daemon() []finding {
	if d.socket == "" {
		return find(healthSkip, "--control names no socket to ask at", "")
	}
	info, err := fs.Stat(d.files, at(d.socket))
	switch {
	case errors.Is(d.asked, fs.ErrPermission):
		return find(healthWarn, fmt.Sprintf("a daemon does not let this user ask at %s", d.socket), "run this as root, or as a member of the group shaperd")
	case err != nil && d.unit.active():
		return find(healthOK, "shaperd.service is "+d.unit["ActiveState"], "")
	case err != nil:
		return find(healthSkip, "none runs: there is no "+d.socket, "")
	case info.Mode()&fs.ModeSocket == 0:
		return find(healthFail, d.socket+" is no socket: something else is in the place of the daemon's", "rm "+d.socket)
	case d.asked == nil:
		return find(healthOK, "one answers at "+d.socket, "")
	}
	return find(healthWarn, d.socket+" is there, and nobody answers: a daemon was killed", "start it again, or rm "+d.socket)
}

// need is capabilities, and what takes them.
type need struct {
	what         string
	capabilities []string
	dropIn       string // of the unit, which gives them
}

// needs returns what l takes. Ports from unprivileged on are for all.
func (l *loaded) needs(unprivileged int) (all []need) {
	var low []int
	for _, listen := range l.listens {
		for _, e := range listen.Endpoints {
			if port := int(e.Addr.Port()); port < unprivileged {
				low = append(low, port)
			}
		}
	}
	for _, own := range l.config.Daemon.OwnPorts() {
		if port := int(own.Addr.Port()); port > 0 && port < unprivileged {
			low = append(low, port)
		}
	}
	if low != nil {
		all = append(all, need{fmt.Sprintf("port %d", slices.Min(low)), []string{"CAP_NET_BIND_SERVICE"}, ""})
	}
	if len(l.attach) > 0 {
		all = append(all, need{"[[attach]]", bpf.Capabilities(), "packet-plane.conf"})
	}
	const admin = "network-admin.conf"
	if !l.diversion().Empty() {
		all = append(all, need{"transparent listeners", []string{"CAP_NET_RAW"}, admin})
		if l.config.Transparent.Rules == config.RulesInstall {
			all = append(all, need{`[transparent] rules = "install"`, []string{"CAP_NET_ADMIN"}, admin})
		}
	}
	for _, limit := range l.config.Limits {
		if limit.Excess == shaper.ExcessReject && !limit.Observe && !l.config.Daemon.Observe {
			all = append(all, need{fmt.Sprintf(`refuse_with = "reject" of limit %q`, limit.Name), []string{"CAP_NET_RAW"}, admin})
		}
	}
	return all
}

func (d *doctor) capabilities() (found []finding) {
	unprivileged, is := d.number("/proc/sys/net/ipv4/ip_unprivileged_port_start")
	if !is {
		unprivileged = 1024
	}
	needs := d.loaded.needs(unprivileged)
	if len(needs) == 0 {
		return find(healthOK, "the configuration needs none", "")
	}
	var has []string
	for _, n := range needs {
		var lacks []string
		for _, c := range n.capabilities {
			if d.runner.has(c) {
				has = append(has, c)
			} else {
				lacks = append(lacks, c)
			}
		}
		if lacks != nil {
			found = append(found, finding{
				State: healthFail, Fix: d.grant(n.dropIn, lacks),
				Text: fmt.Sprintf("%s lacks %s, for %s", d.runner.name, strings.Join(lacks, ", "), n.what),
			})
		}
	}
	slices.Sort(has)
	return orOK(found, fmt.Sprintf("%s has %s", d.runner.name, strings.Join(slices.Compact(has), ", ")))
}

// grant returns the command that gives the runner what it lacks.
func (d *doctor) grant(dropIn string, lacks []string) string {
	switch {
	case !d.runner.unit:
		return "run shaperd as root, or by systemd"
	case dropIn == "":
		all := strings.Join(lacks, " ")
		return fmt.Sprintf("systemctl edit shaperd: [Service] AmbientCapabilities=%[1]s CapabilityBoundingSet=%[1]s", all)
	}
	return fmt.Sprintf("install -D -m 0644 /usr/share/doc/shaperd/examples/%[1]s /etc/systemd/system/shaperd.service.d/%[1]s && "+
		"systemctl daemon-reload && systemctl restart shaperd", dropIn)
}

// descriptors looks at whether there are enough for what the configuration lets in. The
// proxy accepts nothing beyond 95 % of them.
func (d *doctor) descriptors() []finding {
	const own = 64 // that are no sockets of listeners, about
	c := d.loaded.config
	flows, fixed, connections, bounded := 0, own, 0, true
	counted := map[string]bool{}
	for i, l := range c.Listeners() {
		fixed += len(d.loaded.listens[i].Endpoints)
		if l.UDP {
			flows += c.Listen[i].MaxFlows
		}
		if !l.TCP {
			continue
		}
		limit := d.loaded.countsAll(l.Name)
		if limit == nil {
			bounded = false
			continue
		}
		if limit.Key == 0 && counted[limit.Name] {
			continue // it is for several listeners together
		}
		counted[limit.Name] = true
		connections += limit.Connections
		fixed += limit.MaxWaiting // one each
	}
	has := d.runner.descriptors
	needs := fixed + flows + 2*connections
	text := fmt.Sprintf("%s has %d descriptors", d.runner.name, has)
	if !bounded { // then the rest is for connections
		const few = 1000
		rest := (has*95/100 - needs) / 2
		if rest >= few {
			return find(healthOK, fmt.Sprintf("%s, which leaves room for %d TCP connections", text, rest), "")
		}
		return find(healthWarn, fmt.Sprintf("%s, which leaves room for %d TCP connections: others will wait in the kernel", text, max(0, rest)),
			d.raise((needs+20*few)*100/95))
	}
	if needs > has*95/100 {
		return find(healthWarn, fmt.Sprintf("%s, and what the configuration lets in may take %d: two a TCP connection, one a UDP flow or a connection that waits", text, needs),
			d.raise(needs*100/95+1))
	}
	return find(healthOK, fmt.Sprintf("%s, and what the configuration lets in takes at most %d", text, needs), "")
}

// raise returns the command that gives the runner n descriptors.
func (d *doctor) raise(n int) string {
	command := fmt.Sprintf("ulimit -n %d", n)
	if d.runner.unit {
		command = fmt.Sprintf("systemctl edit shaperd: [Service] LimitNOFILE=%d", n)
	}
	if most, is := d.number("/proc/sys/fs/nr_open"); is && n > most { // the kernel refuses more
		return sysctlCommand("fs.nr_open", n) + "; then " + command
	}
	return command
}

// countsAll returns the narrowest limit that counts all TCP connections of a listener
// together, or nil.
func (l *loaded) countsAll(listener string) (narrowest *shaper.Limit) {
	for i := range l.config.Limits {
		limit := &l.config.Limits[i]
		m := &limit.Match
		if limit.Connections == 0 || limit.Observe || l.config.Daemon.Observe || limit.OfAttachments() ||
			limit.Key&^shaper.KeyListen != 0 || len(m.Source)+len(m.ASN)+len(m.Port) > 0 || m.Protocol == shaper.UDP ||
			len(m.Listen) > 0 && !slices.Contains(m.Listen, listener) {
			continue
		}
		if narrowest == nil || limit.Connections < narrowest.Connections {
			narrowest = limit
		}
	}
	return narrowest
}
