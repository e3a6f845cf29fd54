// Package convert translates the limits of other programs to a configuration of shaperd: of HAProxy, of the
// stream module of nginx, and of iptables. A line that has no counterpart is an [Omission] with the reason; nothing is
// guessed.
package convert

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"time"

	"shaperd.dev/shaperd/shaper/config"
)

// A Result is a converted configuration.
type Result struct {
	// TOML is the configuration, which loads. Each line says which one it comes from, and the omissions are comments at the
	// top. It is "" if nothing could be converted.
	TOML    string
	LeftOut []Omission // in the order of lines
}

// An Omission is a line, or a part of it, that the configuration does not contain.
type Omission struct {
	Line int    // from 1
	Text string // the line or the part
	Why  string
}

func (o Omission) String() string { return fmt.Sprintf("line %d: %s: %s", o.Line, o.Text, o.Why) }

// A SyntaxError is a line that cannot be read.
type SyntaxError struct {
	Line int // from 1
	Msg  string
}

func (e *SyntaxError) Error() string { return fmt.Sprintf("line %d: %s", e.Line, e.Msg) }

// A draft is a configuration in the making.
type draft struct {
	tables  []*table
	leftOut []Omission
	// names are taken: of limits, and of listeners and attachments. The value is the first number that may be
	// free behind a name.
	names map[string]int
	count map[string]int // of tables, by their kind
}

// A table is a TOML table.
type table struct {
	kind    string // "listen", "attach" or "limit"
	name    string
	at      Omission
	keys    []key
	listens []string // the listeners that a limit matches, the value of its key "match"
}

// A key is a line of a table.
type key struct {
	name, value string   // TOML
	from        Omission // the line it comes from, if one
	comment     string
	optional    bool // the table still means the same without it, except for this
}

// add appends a table that comes from a line.
func (d *draft) add(kind, name string, line int, text string) *table {
	t := &table{kind: kind, name: d.unique(kind, name), at: Omission{Line: line, Text: text}}
	d.tables = append(d.tables, t)
	if d.count == nil {
		d.count = map[string]int{}
	}
	d.count[kind]++
	t.set("name", quote(t.name), line, text)
	return t
}

func (d *draft) leaveOut(line int, text, format string, args ...any) {
	d.leftOut = append(d.leftOut, Omission{line, cmp.Or(short(text), `""`), clean(fmt.Sprintf(format, args...))})
}

// set sets a key. The text is that of the line it comes from.
func (t *table) set(name, value string, line int, text string) {
	t.keys = append(t.keys, key{name: name, value: value, from: Omission{Line: line, Text: text}, comment: fmt.Sprintf("line %d: %s", line, short(text))})
}

// option is set, for a key that may be left out if shaperd does not support its value.
func (t *table) option(name, value string, line int, text string) {
	t.set(name, value, line, text)
	t.keys[len(t.keys)-1].optional = true
}

// implied sets a key to what the other program does without saying so.
func (t *table) implied(name, value, why string) {
	t.keys = append(t.keys, key{name: name, value: value, comment: clean(why)})
}

// match makes a limit match a listener.
func (t *table) match(listen string, line int, text string) {
	t.set("match", "", line, text)
	t.listens = []string{listen}
}

// addListen makes a limit match another listener too.
func (t *table) addListen(name string) {
	if !slices.Contains(t.listens, name) {
		t.listens = append(t.listens, name)
	}
}

// unique returns a valid name that no other table of its kind has.
func (d *draft) unique(kind, name string) string {
	name = strings.Map(func(r rune) rune {
		if r < 128 && (r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || strings.ContainsRune("-_.", r)) {
			return r
		}
		return '-'
	}, name)
	name = name[:min(len(name), 56)]
	group := strconv.FormatBool(kind == "limit") + " "
	if d.names == nil {
		d.names = map[string]int{}
	}
	free, next := name, max(d.names[group+name], 2)
	for ; free == "" || d.names[group+free] > 0; next++ {
		free = fmt.Sprintf("%s-%d", name, next)
	}
	d.names[group+name], d.names[group+free] = next, 2
	return free
}

// finish removes what shaperd does not accept, with its message as the reason, and returns the result.
func (d *draft) finish(program, file string) Result {
	d.bound()
	for len(d.tables) > 0 {
		text := d.render("")
		files := new(config.Files)
		files.Add("", text)
		_, err := files.Load()
		if err == nil {
			break
		}
		d.removeRefused(err)
	}
	slices.SortStableFunc(d.leftOut, func(a, b Omission) int { return cmp.Compare(a.Line, b.Line) })
	r := Result{LeftOut: slices.Compact(d.leftOut)}
	if len(d.tables) == 0 {
		return r
	}
	var head strings.Builder
	fmt.Fprintf(&head, "# Converted by \"shaperd convert %s\" from %s.\n", program, short(file))
	if len(r.LeftOut) > 0 {
		head.WriteString("#\n# Left out:\n")
		for _, o := range r.LeftOut {
			fmt.Fprintf(&head, "#   %s\n", o)
		}
	}
	r.TOML = d.render(head.String())
	return r
}

// maxTables are the numbers of tables that shaperd supports, by their kind.
var maxTables = map[string]int{"limit": config.MaxLimits, "attach": 64, "listen": 1024}

const tooMany = "shaperd does not support that many"

// full reports whether shaperd supports no further table of a kind. Converting more of them takes time that
// grows with the square of their number.
func (d *draft) full(kind string) bool { return d.count[kind] >= maxTables[kind] }

// bound removes the tables beyond the numbers that shaperd supports.
func (d *draft) bound() {
	count := map[string]int{}
	var beyond []*table
	for _, t := range d.tables {
		if count[t.kind]++; count[t.kind] > maxTables[t.kind] {
			beyond = append(beyond, t)
		}
	}
	d.remove(tooMany, beyond...)
}

// remove leaves tables out, and limits that match no other listener.
func (d *draft) remove(why string, tables ...*table) {
	removed, listeners := map[*table]bool{}, map[string]bool{}
	for _, t := range tables {
		d.leaveOut(t.at.Line, t.at.Text, "%s", why)
		removed[t] = true
		listeners[t.name] = listeners[t.name] || t.kind == "listen"
	}
	d.tables = slices.DeleteFunc(d.tables, func(t *table) bool { return removed[t] })
	var idle []*table
	for _, t := range d.tables {
		had := len(t.listens)
		t.listens = slices.DeleteFunc(t.listens, func(name string) bool { return listeners[name] })
		if had > 0 && len(t.listens) == 0 {
			idle = append(idle, t)
		}
	}
	if len(idle) > 0 {
		d.remove("its listener is left out", idle...)
	}
}

// removeRefused removes the optional keys and the tables that err is about. If it is about none of them, all are removed: a
// configuration that does not load is never printed.
func (d *draft) removeRefused(err error) {
	var mistakes config.Errors
	errors.As(err, &mistakes)
	removed := false
	line := 0
	for _, t := range slices.Clone(d.tables) {
		line += 2 // the empty line and the header
		first, last := line, line+len(t.keys)
		line = last
		var refused []string
		keep := slices.Clone(t.keys)
		for _, m := range mistakes {
			if m.Line < first || m.Line > last {
				continue
			}
			if i := m.Line - first - 1; i >= 0 && t.keys[i].optional {
				keep = slices.DeleteFunc(keep, func(k key) bool { return k.name == t.keys[i].name })
				d.leaveOut(t.keys[i].from.Line, t.keys[i].from.Text, "shaperd does not support it: %s", m.Msg)
				removed = true
				continue
			}
			refused = append(refused, m.Msg)
		}
		t.keys = keep
		if len(refused) > 0 {
			d.remove("shaperd does not support it: "+strings.Join(refused, "; "), t)
			removed = true
		}
	}
	if !removed {
		d.remove("shaperd does not support it: "+err.Error(), slices.Clone(d.tables)...)
	}
}

// render returns the TOML of the tables after a head. Without one, each table takes two lines and one for each key.
func (d *draft) render(head string) string {
	var b strings.Builder
	b.WriteString(head)
	for _, t := range d.tables {
		fmt.Fprintf(&b, "\n[[%s]]\n", t.kind)
		names, values := 0, 0
		for i, k := range t.keys {
			if k.name == "match" && len(t.listens) > 0 {
				t.keys[i].value = "{ listen = " + quoteList(t.listens) + " }"
			}
			names = max(names, len(k.name))
			if n := len(t.keys[i].value); n <= 60 {
				values = max(values, n)
			}
		}
		for _, k := range t.keys {
			fmt.Fprintf(&b, "%-*s = %-*s # %s\n", names, k.name, values, k.value, k.comment)
		}
	}
	return b.String()
}

// quote returns a TOML string.
func quote(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(clean(s)) + `"`
}

// quoteList returns a TOML string, or an array of several.
func quoteList(list []string) string {
	if len(list) == 1 {
		return quote(list[0])
	}
	quoted := make([]string, len(list))
	for i, s := range list {
		quoted[i] = quote(s)
	}
	return "[" + strings.Join(quoted, ", ") + "]"
}

// clean replaces characters that have no place in a line.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}

// short returns the beginning of a text.
func short(s string) string {
	s = clean(s)
	if runes := []rune(s); len(runes) > 200 {
		s = string(runes[:197]) + "..."
	}
	return s
}

func duration(d time.Duration) string { return quote(config.FormatDuration(d)) }

// bytesIn returns the rate of so many bytes in a time, in whole bits a second, rounded down. bytes is below 2^61.
func bytesIn(bytes uint64, per time.Duration) string {
	hi, lo := bits.Mul64(bytes*8, uint64(time.Second))
	rate := uint64(math.MaxInt64) // above what shaperd supports
	if hi < uint64(per) {
		rate, _ = bits.Div64(hi, lo, uint64(per))
	}
	return quote(config.FormatRateBytes(rate))
}

// scaled parses a whole number with a suffix that multiplies it. The result is at most 1e15.
func scaled(s string, suffixes map[string]uint64) (uint64, bool) {
	digits := strings.TrimRight(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ/")
	factor, known := suffixes[strings.ToLower(s[len(digits):])]
	n, err := strconv.ParseUint(digits, 10, 63)
	if err != nil || !known || n > 1e15/factor {
		return 0, false
	}
	return n * factor, true
}

// sizes are the suffixes of sizes in HAProxy and nginx.
var sizes = map[string]uint64{"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}

// count parses a number of connections that shaperd supports.
func count(s string) (int, bool) {
	n, err := strconv.Atoi(s)
	return n, err == nil && n >= 1 && n <= 1<<20
}
