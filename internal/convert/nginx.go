package convert

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"
)

// Nginx converts a configuration of nginx: its block "stream".
func Nginx(file, text string) (Result, error) {
	p := ngParser{text: text, line: 1}
	top, err := p.block(false, 0)
	if err != nil {
		return Result{}, err
	}
	n := &nginx{upstreams: map[string]*ngDirective{}, zones: map[string]*ngDirective{}, limited: map[string]*table{}, uses: map[string]ngZoneUse{}}
	for _, d := range top {
		if d.name() != "stream" || d.block == nil {
			n.leaveOut(d.line, d.text(), "%s", ngReason(d, "it is not in the block stream"))
			continue
		}
		n.stream(d)
	}
	return n.finish("nginx", file), nil
}

type nginx struct {
	draft
	upstreams map[string]*ngDirective
	zones     map[string]*ngDirective // limit_conn_zone, by the name of the zone
	limited   map[string]*table       // the limits that servers share: by upstream, or zone
	uses      map[string]ngZoneUse    // how servers use a zone, by its name
}

// A ngDirective is a directive.
type ngDirective struct {
	line  int
	words []string
	block []*ngDirective // nil for a simple directive
	used  bool
}

func (d *ngDirective) name() string { return d.words[0] }
func (d *ngDirective) text() string { return strings.Join(d.words, " ") }

// ngReasons has the reasons why known directives are left out.
var ngReasons = map[string]string{
	"http": "shaperd does not read HTTP", "mail": "shaperd does not read mail", "events": "settings of the process", "worker_processes": "a setting of the process", "user": "a setting of the process",
	"pid": "a setting of the process", "error_log": "shaperd has a log of its own", "access_log": "shaperd has a log of its own: access_log", "log_format": "shaperd has a log of its own",
	"include": "the file is not read: convert it too", "load_module": "a setting of the process", "daemon": "a setting of the process", "worker_rlimit_nofile": "a setting of the process",
	"least_conn": "it is for several servers", "hash": "it is for several servers, and by the address of the source", "random": "shaperd has round-robin, least-connections and source-hash",
	"limit_conn_log_level": "shaperd has a log of its own", "preread_timeout": "shaperd does not read what is transferred", "ssl_preread": "shaperd does not read what is transferred",
	"map": "shaperd does not choose downstreams by content", "split_clients": "shaperd does not choose downstreams by content", "geo": "use [[group]] for groups of sources", "allow": "use a limit with block = true", "deny": "use a limit with block = true",
	"proxy_half_close": "shaperd always forwards half-closes", "proxy_next_upstream": "shaperd always tries another downstream", "proxy_buffer_size": "shaperd has no buffers of its own", "tcp_nodelay": "shaperd sends at once",
	"proxy_socket_keepalive": "shaperd uses keepalive", "proxy_bind": "see transparent listeners", "resolver": "shaperd uses the resolver of the system", "proxy_responses": "a UDP flow ends after udp_idle_timeout",
}

func ngReason(d *ngDirective, otherwise string) string {
	if why := ngReasons[d.name()]; why != "" {
		return why
	}
	return otherwise
}

// A ngParser reads directives.
type ngParser struct {
	text string
	at   int
	line int
}

// maxDepth is the maximum depth of blocks.
const maxDepth = 20

// block reads directives up to the end of a block, or of the file.
func (p *ngParser) block(inside bool, depth int) (all []*ngDirective, err error) {
	if depth > maxDepth {
		return nil, &SyntaxError{p.line, "too many blocks in each other"}
	}
	d := &ngDirective{}
	for {
		word, kind, err := p.token()
		switch {
		case err != nil:
			return nil, err
		case kind == 'w':
			if len(d.words) == 0 {
				d.line = p.line
			}
			d.words = append(d.words, word)
			continue
		case len(d.words) == 0 && (kind == ';' || kind == '{'):
			return nil, &SyntaxError{p.line, fmt.Sprintf("unexpected %q", kind)}
		case kind == '{':
			block, err := p.block(true, depth+1)
			if err != nil {
				return nil, err
			}
			d.block = append([]*ngDirective{}, block...)
		case kind != ';' && len(d.words) > 0:
			return nil, &SyntaxError{p.line, fmt.Sprintf("directive %q is not ended by ;", short(d.words[0]))}
		case kind == '}' && inside:
			return all, nil
		case kind == '}':
			return nil, &SyntaxError{p.line, `unexpected '}'`}
		case kind == 0 && inside:
			return nil, &SyntaxError{p.line, "a block is not closed"}
		case kind == 0:
			return all, nil
		}
		all = append(all, d)
		d = &ngDirective{}
	}
}

// token returns a word, or a kind that is ';', '{', '}', or 0 at the end.
func (p *ngParser) token() (word string, kind byte, err error) {
	for ; p.at < len(p.text); p.at++ {
		switch c := p.text[p.at]; c {
		case '\n':
			p.line++
		case ' ', '\t', '\r':
		case '#':
			for p.at+1 < len(p.text) && p.text[p.at+1] != '\n' {
				p.at++
			}
		case ';', '{', '}':
			p.at++
			return "", c, nil
		default:
			word, err := p.word()
			return word, 'w', err
		}
	}
	return "", 0, nil
}

func (p *ngParser) word() (string, error) {
	var b strings.Builder
	quoted, begun := byte(0), p.line
	if c := p.text[p.at]; c == '"' || c == '\'' {
		quoted = c
		p.at++
	}
	for ; p.at < len(p.text); p.at++ {
		c := p.text[p.at]
		switch {
		case c == '\\' && p.at+1 < len(p.text):
			p.at++
			c = p.text[p.at]
		case quoted != 0 && c == quoted:
			p.at++
			return b.String(), nil
		case quoted == 0 && c == '$' && strings.HasPrefix(p.text[p.at:], "${"):
			b.WriteByte(c)
			p.at++
			c = '{'
		case quoted == 0 && (strings.IndexByte(" \t\r\n;{", c) >= 0 || c == '}' && !strings.Contains(b.String(), "${")):
			return b.String(), nil
		}
		if c == '\n' {
			p.line++
		}
		b.WriteByte(c)
	}
	if quoted != 0 {
		return "", &SyntaxError{begun, "a quote is not closed"}
	}
	return b.String(), nil
}

// find returns the last directive with a name in the narrowest of several blocks, and marks it as used. It is nil if there is none.
func find(name string, blocks ...[]*ngDirective) (found *ngDirective) {
	for _, block := range blocks {
		for _, d := range block {
			if d.name() == name && len(d.words) > 1 {
				d.used = true
				found = d
			}
		}
		if found != nil {
			return found
		}
	}
	return nil
}

// ngTime parses a time of nginx: seconds, or parts with units such as 1h30m.
func ngTime(s string) (d time.Duration, ok bool) {
	units := map[string]uint64{"": 1000, "ms": 1, "s": 1000, "m": 60e3, "h": 3600e3, "d": 86400e3, "w": 7 * 86400e3}
	for s != "" {
		digits := len(s) - len(strings.TrimLeft(s, "0123456789"))
		unit := len(s[digits:]) - len(strings.TrimLeft(s[digits:], "abcdefghijklmnopqrstuvwxyz"))
		n, ok := scaled(s[:digits+unit], units)
		if !ok || n > 1e12 || d > 1e18 {
			return 0, false
		}
		d += time.Duration(n) * time.Millisecond
		s = s[digits+unit:]
	}
	return d, d > 0
}

// ngListen returns the address of a directive listen as shaperd writes it, or why it cannot be converted.
func (n *nginx) ngListen(d *ngDirective) (address string, udp bool, why string) {
	host, port, err := net.SplitHostPort(d.words[1])
	if err != nil {
		host, port = "", d.words[1]
	}
	if host == "" || host == "*" {
		host = "0.0.0.0"
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil || net.ParseIP(host) == nil {
		return "", false, fmt.Sprintf("%q is not an IP address with one port", d.words[1])
	}
	address = net.JoinHostPort(host, port)
	protocol := "tcp://"
	for _, option := range d.words[2:] {
		switch option {
		case "udp":
			protocol = "udp://"
		case "ssl":
			return "", false, "shaperd does not terminate TLS"
		case "proxy_protocol":
			return "", false, "name the proxies that may send the PROXY protocol in accept_proxy_from"
		case "ipv6only=off":
			return "", false, "shaperd needs an address for IPv4 and one for IPv6"
		default:
			n.leaveOut(d.line, option, "an option of the socket")
		}
	}
	return protocol + address, protocol == "udp://", ""
}
