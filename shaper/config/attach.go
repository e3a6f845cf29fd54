package config

import (
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"shaperd.dev/shaperd/shaper"
)

// locatedInterface is the name of an interface, or a pattern, of one attachment, with its position.
type locatedInterface struct {
	name      string
	direction shaper.AttachDirection
	at        *node
}

func (l *loader) attach(t table) {
	attach := l.newAttach
	elems := t.decode(&attach)
	t.checkNeeds(&attach)
	switch {
	case attach.Hook == shaper.HookXDP && attach.Direction != shaper.Ingress:
		t.errorf("hook", `"xdp" is for ingress alone: write direction = "ingress", or remove hook`)
	case attach.Hook == shaper.HookXDP && attach.Shapes():
		t.errorf("hook", `"xdp" cannot hold packets: write mode = "police" or observe = true, or remove hook`)
	}
	for _, i := range located(attach.Interfaces, elems["interface"]) {
		l.interfaces = append(l.interfaces, locatedInterface{i.value, attach.Direction, i.at})
	}
	l.c.Attach = append(l.c.Attach, attach)
	l.attaches = append(l.attaches, t)
}

// parseInterface parses the name of an interface, or a pattern of names. The kernel
// accepts no other names (dev_valid_name in net/core/dev.c).
func parseInterface(s string) (string, error) {
	_, err := path.Match(s, "")
	switch {
	case err != nil:
		return "", fmt.Errorf("%s is an invalid pattern: it may have \"*\", \"?\" and sets such as \"[0-9]\"", quote(s))
	case s == "" || s == "." || s == ".." || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || strings.ContainsRune("/:\x7f", r) }):
		return "", fmt.Errorf("%s is not a valid interface name such as \"eth0\", or pattern such as \"eth*\"", quote(s))
	case len(s) > 15 && !strings.ContainsAny(s, `*?[\`):
		return "", fmt.Errorf("%s is longer than 15 bytes, which is the limit of interface names", quote(s))
	}
	return s, nil
}

// parsePins parses the path of a directory.
func parsePins(s string, _ any) (any, error) {
	if !filepath.IsAbs(s) || strings.ContainsRune(s, 0) {
		return nil, fmt.Errorf("%s is not an absolute path such as \"/sys/fs/bpf/shaperd\"", quote(s))
	}
	return filepath.Clean(s), nil
}

// checkListenerLimit reports keys and values that only limits at attachments support.
func checkListenerLimit(t table, limit *shaper.Limit) {
	const instead = "name attachments in match.attach"
	match := t.at.child("match")
	if len(limit.Match.Destination) > 0 {
		t.add(match.child("destination"), "destination: unsupported at listeners; "+instead)
	}
	for _, key := range byPacket(limit) {
		t.add(match.child(key), key+": unsupported at listeners; "+instead)
	}
	if limit.Match.Protocol == shaper.ICMP {
		t.add(match.child("protocol"), "protocol: \"icmp\" is unsupported at listeners; "+instead)
	}
	if limit.Key&shaper.KeyAttach != 0 {
		t.errorf("key", "\"attach\" is unsupported at listeners; %s", instead)
	}
	if limit.Key&shaper.KeyDownstream != 0 && limit.CountsConnections() {
		t.errorf("key", "\"downstream\" is unsupported with max_connections, new_connections and a quota of connections, which are decided before a downstream is chosen: "+
			"a downstream has its own max_connections, as in downstream = { address = \"10.0.0.5\", max_connections = 20 }")
	}
	switch udp := isUDPOnly(limit); {
	case udp && limit.RefuseWith != shaper.RefuseDrop && limit.RefuseWith != shaper.RefuseReject:
		t.errorf("refuse_with", "%q is for TCP: datagrams are refused with \"drop\" or \"reject\"", limit.RefuseWith)
	case !udp && limit.RefuseWith == shaper.RefuseDrop:
		t.errorf("refuse_with", "\"drop\" is unsupported for TCP at listeners, which have accepted the connection already; use \"reset\" or \"close\", match protocol \"udp\", or %s", instead)
	}
}

// byPacket returns the keys of match in which packets of a connection may differ.
func byPacket(limit *shaper.Limit) (keys []string) {
	if len(limit.Match.DSCP) > 0 {
		keys = append(keys, "dscp")
	}
	if len(limit.Match.Mark) > 0 {
		keys = append(keys, "mark")
	}
	if len(limit.Match.Cgroup) > 0 {
		keys = append(keys, "cgroup")
	}
	return keys
}

// isUDPOnly reports whether a limit at listeners matches UDP alone.
func isUDPOnly(limit *shaper.Limit) bool {
	return limit.Match.Protocol == shaper.UDP && !limit.InPacketPlane()
}

// checkAttachmentLimit reports keys and values that limits at attachments do not support.
func checkAttachmentLimit(t table, limit *shaper.Limit) {
	m, match := limit.Match, t.at.child("match")
	if len(m.Listen) > 0 {
		t.add(match.child("attach"), "attach: unsupported together with listen, as a bucket is in one plane: use two limits")
	}
	if m.Protocol == shaper.ICMP && len(m.Port) > 0 {
		t.add(match.child("port"), "port: \"icmp\" has no ports")
	}
	if m.Protocol == shaper.UDP || m.Protocol == shaper.ICMP {
		for _, key := range []string{"max_connections", "new_connections"} {
			if t.has(key) {
				t.errorf(key, "counts TCP connections, and match.protocol is %q", m.Protocol)
			}
		}
	}
	if limit.CountsConnections() {
		for _, key := range byPacket(limit) {
			t.add(match.child(key), key+": unsupported with max_connections and new_connections: not every packet of a connection has it")
		}
	}
	if limit.Key&shaper.KeyListen != 0 {
		t.errorf("key", "\"listen\" is unsupported at attachments: use \"attach\"")
	}
	if limit.Key&shaper.KeyDownstream != 0 {
		t.errorf("key", "\"downstream\" is unsupported at attachments: use \"destination\"")
	}
	if limit.Key&shaper.KeyTLV != 0 {
		t.errorf("key", "%q is unsupported at attachments: a PROXY header is for listeners", shaper.TLVName(limit.TLV))
	}
	if limit.RefuseWith != shaper.RefuseReset && limit.RefuseWith != shaper.RefuseDrop {
		t.errorf("refuse_with", "%q is unsupported at attachments: use \"reset\" or \"drop\"", limit.RefuseWith)
	}
}

// checkAttach reports mistakes between attachments.
func (l *loader) checkAttach() {
	if len(l.attaches) > shaper.MaxAttachments {
		l.add(l.attaches[shaper.MaxAttachments].at, fmt.Sprintf("too many attachments: %d, of at most %d", len(l.attaches), shaper.MaxAttachments))
		return
	}
	type placed struct {
		name      string
		direction shaper.AttachDirection
	}
	first := map[placed]*node{}
	for _, i := range l.interfaces {
		p := placed{i.name, i.direction}
		if f := first[p]; f != nil {
			l.add(i.at, fmt.Sprintf("interface: duplicate %s, direction %s: already attached at %s:%d", quote(i.name), i.direction, f.file.name, f.line()))
			continue
		}
		first[p] = i.at
	}
}

// checkCounting reports attachments whose connections too many limits count, or none
// although tcp_idle_timeout is set.
func (l *loader) checkCounting() {
	for i, attach := range l.c.Attach {
		limits := connectionLimits(l.c.Limits, attach.Name)
		l.attaches[i].requireForEffect(len(limits) > 0, "a limit with max_connections that matches this attachment", "tcp_idle_timeout")
		for _, limit := range limits[min(len(limits), shaper.MaxConnectionLimits):] {
			l.limits[limit].errorf("max_connections", "more than %d limits with max_connections match attachment %q", shaper.MaxConnectionLimits, attach.Name)
		}
	}
}

// checkMarks reports marks and control groups where packets have none, and too many different ones.
func (l *loader) checkMarks() {
	var masks []uint32
	var groups []string
	for i, limit := range l.c.Limits {
		at := l.limits[i].at.child("match").child("mark")
		for _, attach := range l.c.Attach {
			if attach.Hook == shaper.HookXDP && len(limit.Match.Mark) > 0 && slices.Contains(limit.Match.Attach, attach.Name) {
				l.add(at, fmt.Sprintf("mark: unsupported at attachment %s: packets have no mark yet at hook = \"xdp\"", quote(attach.Name)))
			}
		}
		for _, attach := range l.c.Attach {
			if attach.Direction == shaper.Ingress && len(limit.Match.Cgroup) > 0 && slices.Contains(limit.Match.Attach, attach.Name) {
				l.add(l.limits[i].at.child("match").child("cgroup"), fmt.Sprintf("cgroup: unsupported at attachment %s: only packets at egress have the socket of a local process", quote(attach.Name)))
			}
		}
		for n, group := range limit.Match.Cgroup {
			if slices.Contains(groups, group) {
				continue
			}
			if groups = append(groups, group); len(groups) > shaper.MaxCgroups {
				l.add(l.limits[i].at.child("match").child("cgroup").elem(n), fmt.Sprintf("cgroup: more than %d different ones, in all limits together", shaper.MaxCgroups))
				return
			}
		}
		for n, m := range limit.Match.Mark {
			switch {
			case slices.Contains(masks, m.Mask):
			case len(masks) == shaper.MaxMarkMasks:
				l.add(at.elem(n), fmt.Sprintf("mark: %v: more than %d different masks, in all limits together", m, shaper.MaxMarkMasks))
				return
			default:
				masks = append(masks, m.Mask)
			}
		}
	}
}

// observeAttachments sets Observe of the limits at attachments that observe. A limit for
// attachments of both kinds is a mistake: observed packets would charge the buckets of
// enforced ones.
func (l *loader) observeAttachments() {
	for i := range l.c.Limits {
		var observes, enforces string
		for _, attach := range l.c.Attach {
			switch {
			case !slices.Contains(l.c.Limits[i].Match.Attach, attach.Name):
			case attach.Observe:
				observes = attach.Name
			default:
				enforces = attach.Name
			}
		}
		switch {
		case observes == "":
		case enforces == "" || l.c.Limits[i].Observe:
			l.c.Limits[i].Observe = true
		default:
			l.add(l.limits[i].at.child("match").child("attach"), fmt.Sprintf(
				"attach: %s observes and %s does not, and their packets would share buckets: use two limits", quote(observes), quote(enforces)))
		}
	}
}

// connectionLimits returns the indexes of the limits that count connections at an attachment.
func connectionLimits(limits []shaper.Limit, attachment string) (indexes []int) {
	for i, l := range limits {
		if l.MaxConnections > 0 && slices.Contains(l.Match.Attach, attachment) {
			indexes = append(indexes, i)
		}
	}
	return indexes
}

// parsePercent parses a whole percentage, "50%", from 1 to 100.
func parsePercent(s string) (int, error) {
	number, unit := strings.CutSuffix(s, "%")
	number = strings.TrimSuffix(number, " ")
	n, err := strconv.ParseUint(number, 10, 32)
	switch {
	case err != nil:
		return 0, fmt.Errorf("%s is not a whole percentage such as \"50%%\"", quote(s))
	case !unit:
		return 0, fmt.Errorf("%s has no unit: write %q", quote(s), s+"%")
	case n < 1 || n > 100:
		return 0, fmt.Errorf("must be from 1%% to 100%%, not %s", quote(s))
	}
	return int(n), nil
}
