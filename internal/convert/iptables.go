package convert

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Iptables converts rules as iptables-save prints them: those with hashlimit or connlimit. A rule becomes a limit at an
// attachment, as the host forwards the packets and accepts no connections of its own; for packets to the host itself, that is
// the ingress of the interface. Rules that name no interface are for the one given, unless it is "".
func Iptables(file, text, anyInterface string) (Result, error) {
	t := &iptables{device: anyInterface, attached: map[string]string{}, counting: map[string][]int{}}
	if err := t.read(text); err != nil {
		return Result{}, err
	}
	for _, c := range t.chains {
		for _, r := range c.rules {
			if r.hash != nil {
				t.counting[r.hash.name] = append(t.counting[r.hash.name], r.line)
			}
		}
	}
	for _, c := range t.chains {
		for i := range c.rules {
			t.rule(c, i)
		}
	}
	return t.finish("iptables", file), nil
}

type iptables struct {
	draft
	device   string
	chains   []*ipChain
	attached map[string]string // names of attachments, by direction and interface
	counting map[string][]int  // the lines of rules with hashlimit, by the name of their table
	nat      []*ipRule         // the rules that rewrite addresses
}

// rule converts a rule of a chain, or leaves it out if it limits something. All others matter only to those that follow.
func (t *iptables) rule(c *ipChain, i int) {
	r := c.rules[i]
	if r.hash == nil && r.conn == nil {
		for _, module := range []string{"-m limit", "-m recent", "-m quota", "-m rateest"} {
			if slices.Contains(r.unknown, module) {
				t.leaveOut(r.line, r.text, "only hashlimit and connlimit are converted")
			}
		}
		return
	}
	if why := t.convert(c, i); why != "" {
		t.leaveOut(r.line, r.text, "%s", why)
	}
}

// convert returns why a rule cannot be converted, or "".
func (t *iptables) convert(c *ipChain, i int) (why string) {
	r := c.rules[i]
	if why := r.unsupported(); why != "" {
		return why
	}
	if r.hash != nil {
		if lines := t.counting[r.hash.name]; len(lines) > 10 {
			return fmt.Sprintf("the rules of %d lines, the first of which is %d, count in one table, %q", len(lines), lines[0], r.hash.name)
		} else if len(lines) > 1 {
			return fmt.Sprintf("the rules of lines %v count in one table, %q", lines, r.hash.name)
		}
	}
	device, direction, why := t.place(c, r)
	if why != "" {
		return why
	}
	news, why := c.before(i)
	if why == "" {
		why = t.rewritten(r, direction)
	}
	if why != "" {
		return why
	}
	if r.rejects == "" && r.target == "REJECT" {
		r.rejects = "icmp-port-unreachable"
	}
	if why := c.drops(i); why != "" {
		return why
	}
	match, why := r.match()
	if why != "" {
		return why
	}
	l, why := r.limit(news || r.news)
	if why != "" {
		return why
	}
	if r.hash != nil {
		for _, option := range r.hash.ofTable {
			t.leaveOut(r.line, option, "shaperd has one table for all limits, [daemon] max_buckets, and a bucket is forgotten when it has drained")
		}
	}
	attach := t.attach(r, device, direction)
	name := fmt.Sprintf("line-%d", r.line)
	if r.hash != nil && r.hash.name != "" {
		name = r.hash.name
	}
	table := t.add("limit", name, r.line, r.text)
	table.keys[0].comment = fmt.Sprintf("line %d", r.line)
	table.set("match", "{ attach = "+quote(attach)+match+" }", r.line, "-A "+c.name+" "+r.same)
	table.keys = append(table.keys, l...)
	return ""
}

// unsupported returns why a rule by itself cannot be converted, or "".
func (r *ipRule) unsupported() string {
	switch {
	case len(r.unknown) > 0:
		return fmt.Sprintf("%q is not understood", r.unknown[0])
	case r.hash != nil && r.conn != nil:
		return "it counts packets and connections: make it two rules"
	case r.established:
		return "it matches established connections alone"
	case strings.Contains(r.source+r.destination, ":"):
		return "rules of ip6tables are not converted"
	}
	return ""
}

// harmless are targets that let no packet skip the rules that follow: those that drop it, and those that go on.
var harmless = []string{"", "DROP", "REJECT", "LOG", "NFLOG", "TCPMSS", "MARK", "CONNMARK", "DSCP", "TOS", "CLASSIFY", "AUDIT", "TRACE"}

// before checks the rules of the chain before one. It returns whether only first packets of connections get past them.
func (c *ipChain) before(i int) (news bool, why string) {
	r := c.rules[i]
	for _, b := range c.rules[:i] {
		switch {
		case b.disjoint(r):
		case slices.Contains(harmless, b.target):
		case b.target == "ACCEPT" && b.established && len(b.unknown) == 0 && b.same == b.stateAlone():
			news = true
		default:
			return news, fmt.Sprintf("line %d, -j %s, may keep packets from it, which shaperd would count", b.line, b.target)
		}
	}
	return news, ""
}

// stateAlone returns what a rule matches if it matches only the state of the connection.
func (r *ipRule) stateAlone() string {
	for _, option := range []string{"--ctstate", "--state"} {
		if strings.HasPrefix(r.same, option+" ") && !strings.Contains(r.same[2:], " -") {
			return r.same
		}
	}
	return "\x00"
}

// disjoint reports whether no packet matches both rules, as far as interfaces, protocols and ports tell.
func (r *ipRule) disjoint(o *ipRule) bool {
	differ := func(a, b string) bool { return a != "" && b != "" && a != b && !strings.ContainsAny(a+b, "+") }
	if slices.Contains(r.unknown, "!") || slices.Contains(o.unknown, "!") {
		return false
	}
	if differ(r.in, o.in) || differ(r.out, o.out) || differ(r.protocol, o.protocol) && r.protocol != "all" && o.protocol != "all" {
		return true
	}
	return len(r.ports) > 0 && len(o.ports) > 0 && !slices.ContainsFunc(r.ports, func(a string) bool {
		return slices.ContainsFunc(o.ports, func(b string) bool { return portsMeet(a, b) })
	})
}

func portsMeet(a, b string) bool {
	first := func(s string) (from, to uint64) {
		low, high, isRange := strings.Cut(s, "-")
		from, _ = strconv.ParseUint(low, 10, 16)
		if to = from; isRange {
			to, _ = strconv.ParseUint(high, 10, 16)
		}
		return from, to
	}
	a1, a2 := first(a)
	b1, b2 := first(b)
	return a1 <= b2 && b1 <= a2
}

// drops checks that a rule refuses what is beyond its count, by itself or with what follows.
func (c *ipChain) drops(i int) (why string) {
	r := c.rules[i]
	count := r.hash
	if r.conn != nil {
		count = r.conn
	}
	refuses := func(r *ipRule) bool { return r.target == "DROP" || r.target == "REJECT" }
	switch {
	case count.above && refuses(r):
		return ""
	case count.above || r.target != "ACCEPT" && r.target != "RETURN":
		return fmt.Sprintf("its target is %q: only those that drop what is beyond a limit are converted", r.target)
	case r.target == "RETURN":
		return "whether what is beyond is dropped depends on the chain it returns to"
	}
	for _, next := range c.rules[i+1:] {
		counts := next.hash != nil || next.conn != nil
		switch {
		case next.disjoint(r):
		case refuses(next) && !counts && next.same == r.same:
			r.rejects, r.target = next.rejects, next.target
			return ""
		case refuses(next):
		default:
			return fmt.Sprintf("line %d may accept what is beyond it", next.line)
		}
	}
	if c.policy == "DROP" {
		r.target = "DROP"
		return ""
	}
	return "nothing drops what is beyond it: add a rule that drops what it matches"
}

// ifName matches names of interfaces, and those with a "+" for what may follow.
var ifName = regexp.MustCompile(`^[A-Za-z0-9_.:@-]+\+?$`)

// place returns the interface and the direction at which a rule sees packets.
func (t *iptables) place(c *ipChain, r *ipRule) (device, direction, why string) {
	switch {
	case !slices.Contains([]string{"INPUT", "FORWARD", "OUTPUT"}, c.name):
		return "", "", fmt.Sprintf("it is in chain %s, and what gets there depends on the rules that jump to it", c.name)
	case r.in != "" && r.out != "":
		return "", "", "it names two interfaces, and a limit applies at one"
	case r.in+r.out+t.device == "":
		return "", "", "it names no interface: use --interface"
	case r.in+r.out == "" && c.name == "INPUT":
		r.in = t.device
	case r.in+r.out == "":
		r.out = t.device
	}
	device, direction = r.in+r.out, "egress"
	if r.in != "" {
		direction = "ingress"
	}
	if !ifName.MatchString(device) {
		return "", "", "not the name of an interface"
	}
	if rest, ok := strings.CutSuffix(device, "+"); ok {
		return rest + "*", direction, ""
	}
	return device, direction, ""
}

// attach returns the name of the attachment at an interface.
func (t *iptables) attach(r *ipRule, device, direction string) string {
	at := direction + " " + device
	if name := t.attached[at]; name != "" {
		return name
	}
	table := t.add("attach", strings.Trim(device, "*")+"-"+direction, r.line, r.text)
	table.keys[0].comment = fmt.Sprintf("line %d: %s", r.line, device)
	table.set("interface", quote(device), r.line, device)
	table.implied("direction", quote(direction), map[string]string{
		"ingress": "packets to this host, and those that it forwards: a chain of iptables sees one of them",
		"egress":  "packets that this host forwards, and its own: a chain of iptables sees one of them",
	}[direction])
	table.implied("mode", `"police"`, "iptables drops, and delays nothing")
	t.attached[at] = table.name
	return table.name
}

// match returns the rest of the key "match", with what a rule matches.
func (r *ipRule) match() (s, why string) {
	switch r.protocol {
	case "tcp", "udp", "icmp":
		s += `, protocol = "` + r.protocol + `"`
	case "", "all":
		if len(r.ports) > 0 {
			return "", "ports without a protocol"
		}
	default:
		return "", "shaperd has no protocol " + r.protocol
	}
	switch {
	case r.source != "":
		s += ", source = " + quote(strings.TrimSuffix(r.source, "/32"))
	case r.destination == "":
		s += `, source = "0.0.0.0/0"` // iptables is for IPv4
	}
	if r.destination != "" {
		s += ", destination = " + quote(strings.TrimSuffix(r.destination, "/32"))
	}
	if len(r.ports) > 0 {
		ports := make([]string, len(r.ports))
		for i, port := range r.ports {
			if ports[i] = port; strings.Contains(port, "-") {
				ports[i] = quote(port)
			}
		}
		list := "[" + strings.Join(ports, ", ") + "]"
		if len(ports) == 1 {
			list = ports[0]
		}
		s += ", port = " + list
	}
	return s, ""
}

// hashPeriods are the periods of hashlimit.
var hashPeriods = map[string]string{
	"sec": "/s", "second": "/s", "s": "/s", "min": "/min", "minute": "/min", "m": "/min", "hour": "/h", "h": "/h", "day": "/24h", "d": "/24h",
}
