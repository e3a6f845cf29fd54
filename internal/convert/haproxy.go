package convert

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// HAProxy converts a configuration of HAProxy: its proxies with "mode tcp".
func HAProxy(file, text string) (Result, error) {
	statements, err := haproxyStatements(text)
	if err != nil {
		return Result{}, err
	}
	h := &haproxy{named: map[string]*haSection{}, defaults: map[string]*haSection{}, limited: map[any]*table{}}
	h.read(statements)
	for _, s := range h.sections {
		if s.kind == "frontend" || s.kind == "listen" {
			h.proxy(s)
		}
	}
	for _, s := range h.sections {
		s.leaveOutRest(&h.draft)
	}
	return h.finish("haproxy", file), nil
}

type haproxy struct {
	draft
	sections []*haSection
	named    map[string]*haSection // backends and listen sections
	defaults map[string]*haSection
	limited  map[any]*table // the limits that listeners share: by backend with one server, filter, or count
	counts   []haCount
}

// A haSection is a section of the file.
type haSection struct {
	kind, name string
	line       int
	base       *haSection // the section "defaults" that applies
	why        string     // unless "", why nothing of it is converted
	statements []*haStatement
	used       bool // a backend that a listener forwards to
}

// A haStatement is a line.
type haStatement struct {
	line  int
	words []string
	used  bool
}

func (s *haStatement) text() string { return strings.Join(s.words, " ") }

// starts reports whether a statement starts with the words.
func (s *haStatement) starts(words ...string) bool {
	return len(s.words) >= len(words) && slices.Equal(s.words[:len(words)], words)
}

// haproxyStatements returns the lines that are not empty.
func haproxyStatements(text string) (all []*haStatement, err error) {
	line := 0
	for l := range strings.Lines(text) {
		line++
		words, problem := splitWords(strings.TrimRight(l, "\r\n"))
		if problem != "" {
			return nil, &SyntaxError{line, problem}
		}
		if len(words) > 0 && strings.HasPrefix(words[0], ".") {
			return nil, &SyntaxError{line, fmt.Sprintf("%s: which lines apply depends on the process that reads them", words[0])}
		}
		if len(words) > 0 {
			all = append(all, &haStatement{line: line, words: words})
		}
	}
	return all, nil
}

// splitWords splits a line at white space. Quotes and backslashes protect it, and # begins a comment.
func splitWords(line string) (words []string, problem string) {
	var word strings.Builder
	in, quoted := false, byte(0)
	for i := 0; i < len(line); i++ {
		c := line[i]
		switch {
		case quoted != 0 && c == quoted:
			quoted = 0
		case c == '\\' && quoted != '\'':
			if i++; i == len(line) {
				return nil, "a backslash at the end"
			}
			word.WriteByte(line[i])
			in = true
		case quoted != 0:
			word.WriteByte(c)
		case c == '"' || c == '\'':
			quoted, in = c, true
		case c == '#':
			i = len(line)
		case c == ' ' || c == '\t':
			if in {
				words = append(words, word.String())
			}
			word.Reset()
			in = false
		default:
			word.WriteByte(c)
			in = true
		}
	}
	if quoted != 0 {
		return nil, "a quote is not closed"
	}
	if in {
		words = append(words, word.String())
	}
	return words, ""
}

// haSectionKinds are the sections of HAProxy, with the reason why those that define no proxy are left out.
var haSectionKinds = map[string]string{
	"global": "settings of the process", "defaults": "", "frontend": "", "backend": "", "listen": "",
	"peers": "use [shared] for limits of several hosts", "resolvers": "shaperd uses the resolver of the system",
	"userlist": "it is for HTTP", "mailers": "it sends mail", "ring": "it is for logs", "log-profile": "it is for logs", "log-forward": "it is for logs",
	"cache": "it is for HTTP", "http-errors": "it is for HTTP", "fcgi-app": "it is for HTTP", "program": "settings of the process",
	"crt-store": "shaperd does not terminate TLS", "crt-list": "shaperd does not terminate TLS", "traces": "it is for debugging", "acme": "shaperd does not terminate TLS",
}

// read sorts statements into sections.
func (h *haproxy) read(statements []*haStatement) {
	current := &haSection{kind: "lines", line: 1, why: "they are before the first section"}
	var latest *haSection
	h.sections = append(h.sections, current)
	for _, st := range statements {
		why, begins := haSectionKinds[st.words[0]]
		if !begins {
			current.statements = append(current.statements, st)
			continue
		}
		current = &haSection{kind: st.words[0], line: st.line, why: why}
		if len(st.words) > 1 {
			current.name = st.words[1]
		}
		h.sections = append(h.sections, current)
		switch current.kind {
		case "defaults":
			latest = current
			h.defaults[current.name] = current
		case "frontend", "backend", "listen":
			current.base = latest
			if len(st.words) > 3 && st.words[2] == "from" {
				current.base = h.defaults[st.words[3]]
				if current.base == nil {
					current.why = fmt.Sprintf("there is no section %q before it", "defaults "+st.words[3])
				}
			}
			if current.kind != "frontend" {
				h.named[current.name] = current
			}
		}
	}
}

// all returns the statements of a section that start with the words.
func (s *haSection) all(words ...string) (found []*haStatement) {
	for _, st := range s.statements {
		if st.starts(words...) {
			found = append(found, st)
		}
	}
	return found
}

// setting returns the last statement of a section, or of its defaults, that starts with the words, or nil.
func (s *haSection) setting(words ...string) *haStatement {
	for ; s != nil; s = s.base {
		if found := s.all(words...); len(found) > 0 {
			for _, st := range found {
				st.used = true
			}
			return found[len(found)-1]
		}
	}
	return nil
}

// leaveOutRest lists what was not used.
func (s *haSection) leaveOutRest(d *draft) {
	if s.why != "" {
		if len(s.statements) > 0 {
			d.leaveOut(s.line, strings.TrimSpace(s.kind+" "+s.name), "%s", s.why)
		}
		return
	}
	for _, st := range s.statements {
		if st.used {
			continue
		}
		why := haReasons[st.words[0]]
		switch {
		case s.kind == "backend" && !s.used:
			why = "no frontend that is converted uses it"
		case why == "":
			why = "it has no counterpart"
		}
		d.leaveOut(st.line, st.text(), "%s", why)
	}
}

// haReasons has the reasons why known statements are left out.
var haReasons = map[string]string{
	"log": "shaperd has a log of its own: access_log", "stick": "shaperd keeps no such table", "use_backend": "shaperd does not choose downstreams by content",
	"http-request": "shaperd does not read HTTP", "http-response": "shaperd does not read HTTP", "errorfile": "shaperd does not read HTTP",
	"stats": "use shaperd status", "acl": "only some conditions of tcp-request connection are converted", "balance": "it is for several servers",
	"tcp-request": "only some rules of tcp-request connection are converted", "tcp-response": "shaperd does not read what is transferred",
	"maxconn": "it is not of a frontend", "timeout": "shaperd has no such timeout, or none is needed here",
}

// time returns the value of a timeout and the statement, or nil if there is none or it is invalid.
func (s *haSection) time(d *draft, name string) (time.Duration, *haStatement) {
	st := s.setting("timeout", name)
	if st == nil {
		return 0, nil
	}
	if len(st.words) == 3 {
		if v, ok := haTime(st.words[2]); ok {
			return v, st
		}
	}
	d.leaveOut(st.line, st.text(), "not a time")
	return 0, nil
}

// haTime parses a time of HAProxy: milliseconds, or with a unit.
func haTime(s string) (time.Duration, bool) {
	n, ok := scaled(s, map[string]uint64{"us": 1, "": 1e3, "ms": 1e3, "s": 1e6, "m": 60e6, "h": 3600e6, "d": 86400e6})
	if !ok || n == 0 || n > 1e15 {
		return 0, false
	}
	return time.Duration(n) * time.Microsecond, true
}
