package config

import (
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"shaperd/shaper"
)

// Attach is one attachment: the interfaces at which packets meet the limits.
type Attach struct {
	Name        string
	Interfaces  []string // names, or patterns as [path.Match] reads them
	Direction   AttachDirection
	Mode        AttachMode
	Observe     bool // count what would be held or dropped, and let everything pass
	Hook        Hook
	OnStop      OnStop
	Queue       int           // packets that an interface's queue holds, 1000 to 10000000; where packets are held
	IdleTimeout time.Duration // of TCP connections that are counted, 1s to 240h
}

// AttachDirection is which way packets pass the interface.
type AttachDirection uint8

// The directions, as the host sees them.
const (
	Egress AttachDirection = iota
	Ingress
)

func (d AttachDirection) String() string { return [...]string{"egress", "ingress"}[d] }

// AttachMode is what happens to packets that come too fast.
type AttachMode uint8

// The modes.
const (
	Shape  AttachMode = iota // held until they may leave
	Police                   // dropped when they would wait longer than max_delay; else they pass at once
)

func (m AttachMode) String() string { return [...]string{"shape", "police"}[m] }

// Hook is where in the kernel packets are met.
type Hook uint8

// The hooks.
const (
	HookAuto   Hook = iota // TCX where the kernel has it, else clsact
	HookTCX                // links of tc, from Linux 6.6
	HookClsact             // filters of tc's qdisc clsact
	HookXDP                // the driver: before the kernel makes a packet of what came in
)

func (h Hook) String() string { return [...]string{"auto", "tcx", "clsact", "xdp"}[h] }

// OnStop is what happens to traffic when no daemon runs.
type OnStop uint8

// What the end of the daemon leaves.
const (
	StopOpen OnStop = iota // traffic passes without limits
	StopKeep               // the limits last in force stay so
)

func (s OnStop) String() string { return [...]string{"open", "keep"}[s] }

// locatedInterface is a name or a pattern of one attachment.
type locatedInterface struct {
	name      string
	direction AttachDirection
	at        *node
}

func (l *loader) attach(t table) {
	attach := Attach{Name: name(t), Queue: 100_000, IdleTimeout: time.Hour}
	interfaces := list(t, "interface", parseInterface)
	attach.Interfaces = values(interfaces)
	t.notEmpty("interface")
	enumValue(t, "direction", &attach.Direction)
	enumValue(t, "mode", &attach.Mode)
	t.boolean("observe", &attach.Observe)
	enumValue(t, "hook", &attach.Hook)
	enumValue(t, "on_stop", &attach.OnStop)
	t.integer("queue", &attach.Queue)
	t.duration("tcp_idle_timeout", &attach.IdleTimeout)

	t.requireForEffect(attach.shapes(), `mode "shape" and observe = false`, "queue")
	switch {
	case attach.Hook == HookXDP && attach.Direction != Ingress:
		t.errorf("hook", `"xdp" is for ingress alone: write direction = "ingress", or remove hook`)
	case attach.Hook == HookXDP && attach.shapes():
		t.errorf("hook", `"xdp" cannot hold packets: write mode = "police" or observe = true, or remove hook`)
	}
	for _, i := range interfaces {
		l.interfaces = append(l.interfaces, locatedInterface{i.value, attach.Direction, i.at})
	}
	l.c.Attach = append(l.c.Attach, attach)
	l.attaches = append(l.attaches, t)
}

// shapes reports whether packets are held.
func (a *Attach) shapes() bool { return a.Mode == Shape && !a.Observe }

// parseInterface reads the name of an interface, or a pattern of names. The kernel
// takes no other names (dev_valid_name in net/core/dev.c).
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

// parsePins reads the path of a folder.
func parsePins(s string) (string, error) {
	if !filepath.IsAbs(s) || strings.ContainsRune(s, 0) {
		return "", fmt.Errorf("%s is not an absolute path such as \"/sys/fs/bpf/shaperd\"", quote(s))
	}
	return filepath.Clean(s), nil
}

// checkListenerLimit reports what only a limit of attachments may have.
func checkListenerLimit(t table, limit shaper.Limit) {
	const instead = "name attachments in match.attach"
	match := t.at.child("match")
	if len(limit.Match.Destination) > 0 {
		t.add(match.child("destination"), "destination: unsupported at listeners; "+instead)
	}
	if limit.Match.Protocol == shaper.ICMP {
		t.add(match.child("protocol"), "protocol: \"icmp\" is unsupported at listeners; "+instead)
	}
	if limit.Key&shaper.KeyAttach != 0 {
		t.errorf("key", "\"attach\" is unsupported at listeners; %s", instead)
	}
	switch udp := isUDPOnly(limit); {
	case udp && limit.Excess != shaper.ExcessDrop && limit.Excess != shaper.ExcessReject:
		t.errorf("refuse_with", "%q is for TCP: datagrams are refused with \"drop\" or \"reject\"", limit.Excess)
	case !udp && limit.Excess == shaper.ExcessDrop:
		t.errorf("refuse_with", "\"drop\" is unsupported for TCP at listeners, which have accepted the connection already; use \"reset\" or \"close\", match protocol \"udp\", or %s", instead)
	}
	t.requireForEffect(false, "match.attach", "ecn_mark")
}

// isUDPOnly reports whether a limit of listeners is for UDP alone.
func isUDPOnly(limit shaper.Limit) bool {
	return limit.Match.Protocol == shaper.UDP && !limit.OfAttachments()
}

// checkAttachmentLimit reports what a limit of attachments cannot have. counts says
// whether it counts connections.
func checkAttachmentLimit(t table, limit shaper.Limit, counts bool) {
	m, match := limit.Match, t.at.child("match")
	if len(m.Listen) > 0 {
		t.add(match.child("attach"), "attach: unsupported together with listen, as a bucket is in one plane: make it two limits")
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
	if limit.Direction != shaper.ToDownstream {
		t.errorf("direction", "unsupported at attachments, which have one direction: add an [[attach]] with direction = \"ingress\"")
	}
	if limit.Key&shaper.KeyListen != 0 {
		t.errorf("key", "\"listen\" is unsupported at attachments: use \"attach\"")
	}
	if limit.Excess != shaper.ExcessReset && limit.Excess != shaper.ExcessDrop {
		t.errorf("refuse_with", "%q is unsupported at attachments: use \"reset\" or \"drop\"", limit.Excess)
	}
	if t.has("scheduling") {
		t.errorf("scheduling", "is unsupported at attachments, where packets of a bucket leave in their order of arrival")
	}
	if counts {
		const reason = "at attachments no connection waits for a slot"
		t.requireForEffect(t.has("new_connections"), "new_connections: "+reason, "queue_timeout")
		if t.has("max_queue") {
			t.errorf("max_queue", "has no effect: "+reason)
		}
	}
	t.requireForEffect(limit.Rate > 0 || limit.Packets.N > 0, "rate or packets", "ecn_mark")
}

// checkAttach finds mistakes between attachments.
func (l *loader) checkAttach() {
	if len(l.attaches) > shaper.MaxAttachments {
		l.add(l.attaches[shaper.MaxAttachments].at, fmt.Sprintf("too many attachments: %d, of at most %d", len(l.attaches), shaper.MaxAttachments))
		return
	}
	type placed struct {
		name      string
		direction AttachDirection
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

// checkCounting reports attachments whose connections are counted by too many
// limits, or by none though they say how.
func (l *loader) checkCounting() {
	for i, attach := range l.c.Attach {
		limits := connectionLimits(l.c.Limits, attach.Name)
		l.attaches[i].requireForEffect(len(limits) > 0, "a limit with max_connections that matches this attachment", "tcp_idle_timeout")
		for _, limit := range limits[min(len(limits), shaper.MaxConnectionLimits):] {
			l.limits[limit].errorf("max_connections", "more than %d limits with max_connections match attachment %q", shaper.MaxConnectionLimits, attach.Name)
		}
	}
}

// observeAttachments has limits observe that are for attachments which do. One for both
// kinds would have what is only observed use up the buckets of what is not.
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
				"attach: %s observes and %s does not, and their packets would share buckets: make it two limits", quote(observes), quote(enforces)))
		}
	}
}

// connectionLimits returns which limits count connections at an attachment.
func connectionLimits(limits []shaper.Limit, attachment string) (indexes []int) {
	for i, l := range limits {
		if l.Connections > 0 && slices.Contains(l.Match.Attach, attachment) {
			indexes = append(indexes, i)
		}
	}
	return indexes
}

// parseOverhead reads a size of packet headers.
func parseOverhead(s string) (int, error) {
	n, err := ParseSize(s)
	if err == nil && n > shaper.MaxOverhead {
		err = fmt.Errorf("must be at most %s, not %s", FormatSize(shaper.MaxOverhead), quote(s))
	}
	return int(n), err
}

// parsePercent reads a whole percentage, "50%", from 1 to 100.
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
