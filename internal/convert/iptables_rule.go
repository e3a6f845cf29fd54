package convert

import (
	"fmt"
	"slices"
	"strings"
)

// An ipChain is a chain of the table filter.
type ipChain struct {
	name, policy string
	rules        []*ipRule
}

// An ipRule is a line that appends a rule.
type ipRule struct {
	line int
	text string

	in, out, source, destination, protocol string
	ports                                  []string
	news                                   bool // matches the first packets of connections alone
	established                            bool // matches all others alone
	hash, conn                             *ipCount
	rejects                                string   // --reject-with
	target                                 string   // "" is none
	unknown                                []string // options that are not understood
	same                                   string   // what it matches, apart from the count
}

// An ipCount is what a rule with hashlimit or connlimit counts.
type ipCount struct {
	above  bool // matches what is beyond; otherwise what is within
	amount string
	burst  string
	mode   string // of hashlimit
	name   string
	mask   string // of the key, an IPv4 prefix
	ofDest bool   // --connlimit-daddr

	ofTable []string // options of the table of hashlimit
}

// read reads the table filter.
func (t *iptables) read(text string) error {
	inFilter, line := false, 0
	other := "" // the table whose rules are left out
	for l := range strings.Lines(text) {
		line++
		l = strings.TrimSpace(l)
		switch {
		case l == "" || strings.HasPrefix(l, "#") || l == "COMMIT":
		case strings.HasPrefix(l, "*"):
			inFilter, other = l == "*filter", l
		case !inFilter && other == "":
			return &SyntaxError{line, "not the output of iptables-save: there is no table, such as *filter, before it"}
		case !inFilter:
			t.rewrites(other, line, l)
			if strings.Contains(l, "hashlimit") || strings.Contains(l, "connlimit") {
				t.leaveOut(line, l, "only the table filter is converted, and this is %s", other)
			}
		case strings.HasPrefix(l, ":"):
			if words := strings.Fields(l[1:]); len(words) >= 2 {
				t.chain(words[0]).policy = words[1]
			}
		default:
			words, problem := splitWords(l)
			if problem != "" {
				return &SyntaxError{line, problem}
			}
			if len(words) > 0 && strings.HasPrefix(words[0], "[") { // counters
				words = words[1:]
			}
			if len(words) < 2 || words[0] != "-A" {
				return &SyntaxError{line, "not a rule as iptables-save prints it, -A CHAIN ..."}
			}
			c := t.chain(words[1])
			c.rules = append(c.rules, readRule(line, l, words[2:]))
		}
	}
	return nil
}

// rewrites takes down a rule of the table nat that rewrites addresses.
func (t *iptables) rewrites(table string, line int, text string) {
	words, _ := splitWords(text)
	if table != "*nat" || len(words) < 2 || words[0] != "-A" {
		return
	}
	if r := readRule(line, text, words[2:]); slices.Contains([]string{"SNAT", "MASQUERADE", "NETMAP", "DNAT", "REDIRECT"}, r.target) {
		t.nat = append(t.nat, r)
	}
}

// rewritten returns why packets have other addresses at an attachment than a rule sees, or "".
func (t *iptables) rewritten(r *ipRule, direction string) (why string) {
	for _, n := range t.nat {
		source := n.target == "SNAT" || n.target == "MASQUERADE"
		if (n.target == "NETMAP" || source == (direction == "egress")) && !n.disjoint(r) {
			return fmt.Sprintf("line %d, -j %s, rewrites addresses, and at %s of the interface packets have the others", n.line, n.target, direction)
		}
	}
	return ""
}

func (t *iptables) chain(name string) *ipChain {
	i := slices.IndexFunc(t.chains, func(c *ipChain) bool { return c.name == name })
	if i < 0 {
		i = len(t.chains)
		t.chains = append(t.chains, &ipChain{name: name})
	}
	return t.chains[i]
}

// readRule reads the options of a rule.
func readRule(line int, text string, words []string) *ipRule {
	r := &ipRule{line: line, text: text}
	var same []string
	for i := 0; i < len(words); i++ {
		option, value := words[i], ""
		if option == "!" {
			r.unknown = append(r.unknown, "!")
			continue
		}
		if i+1 < len(words) && !strings.HasPrefix(words[i+1], "-") && words[i+1] != "!" {
			i++
			value = words[i]
		}
		kept := option + " " + value
		switch {
		case option == "-m" || option == "--match":
			kept = ""
			if !slices.Contains([]string{"tcp", "udp", "icmp", "hashlimit", "connlimit", "multiport", "conntrack", "state", "comment"}, value) {
				r.unknown = append(r.unknown, "-m "+value)
			}
		case r.setCount(option, value):
			kept = ""
		case option == "--comment":
			kept = ""
		case option == "-j" || option == "-g":
			r.target, kept = value, ""
		case option == "--reject-with":
			r.rejects, kept = value, ""
		case option == "-i":
			r.in = value
		case option == "-o":
			r.out = value
		case option == "-s":
			r.source = value
		case option == "-d":
			r.destination = value
		case option == "-p":
			r.protocol = value
		case option == "--dport" || option == "--dports":
			for port := range strings.SplitSeq(value, ",") {
				r.ports = append(r.ports, strings.Replace(port, ":", "-", 1))
			}
		case option == "--tcp-flags" && value == "FIN,SYN,RST,ACK" && i+1 < len(words) && words[i+1] == "SYN":
			i++
			r.news = true
		case option == "--syn" && value == "":
			r.news = true
		case option == "--ctstate" && value == "NEW" || option == "--state" && value == "NEW":
			r.news = true
		case (option == "--ctstate" || option == "--state") && (value == "RELATED,ESTABLISHED" || value == "ESTABLISHED,RELATED" || value == "ESTABLISHED"):
			r.established = true
		default:
			r.unknown = append(r.unknown, strings.TrimSpace(kept))
		}
		if kept != "" {
			same = append(same, kept)
		}
	}
	slices.Sort(same)
	r.same = strings.Join(same, " ")
	return r
}

// setCount reads an option of hashlimit or connlimit. It returns false for others.
func (r *ipRule) setCount(option, value string) bool {
	name, isHash := strings.CutPrefix(option, "--hashlimit-")
	if isHash && r.hash == nil {
		r.hash = &ipCount{}
	}
	isConn := false
	if !isHash {
		if name, isConn = strings.CutPrefix(option, "--connlimit-"); !isConn {
			return false
		}
		if r.conn == nil {
			r.conn = &ipCount{mask: "32"}
		}
	}
	c := r.hash
	if isConn {
		c = r.conn
	}
	switch {
	case name == "above" || name == "upto":
		c.above, c.amount = name == "above", value
	case isHash && name == "burst":
		c.burst = value
	case isHash && name == "mode":
		c.mode = value
	case isHash && name == "name":
		c.name = value
	case isHash && (name == "srcmask" || name == "dstmask") || isConn && name == "mask":
		c.mask = value
	case isConn && (name == "saddr" || name == "daddr"):
		c.ofDest = name == "daddr"
	case isHash && strings.HasPrefix(name, "htable-"):
		c.ofTable = append(c.ofTable, option+" "+value)
	default:
		r.unknown = append(r.unknown, strings.TrimSpace(option+" "+value))
	}
	return true
}
