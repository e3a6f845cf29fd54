package config

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// written is the position of an item of a generated document.
type written struct {
	path   []any // keys, and indexes of elements
	offset int
}

// document writes TOML, and records the positions of its items.
type document struct {
	t     *rapid.T
	text  strings.Builder
	wrote []written
	names int
}

func (d *document) one(texts ...string) {
	d.text.WriteString(rapid.SampledFrom(texts).Draw(d.t, "text"))
}

func (d *document) record(path []any, offset int) {
	d.wrote = append(d.wrote, written{append([]any(nil), path...), offset})
}

// key writes a new name in one of its spellings.
func (d *document) key() string {
	d.names++
	name := fmt.Sprintf("k%d", d.names)
	switch rapid.IntRange(0, 4).Draw(d.t, "spelling") {
	case 0:
		fmt.Fprintf(&d.text, "%q", name)
	case 1:
		fmt.Fprintf(&d.text, "'%s'", name)
	case 2:
		fmt.Fprintf(&d.text, "\"\\u006b%d\"", d.names)
	case 3:
		name = fmt.Sprintf("k%d é].#=\"", d.names)
		fmt.Fprintf(&d.text, "%q", name)
	default:
		d.text.WriteString(name)
	}
	return name
}

// keyValue writes a key, of several parts sometimes, and a value.
func (d *document) keyValue(path []any, depth int) {
	start := d.text.Len()
	for parts := rapid.IntRange(1, 3).Draw(d.t, "parts"); ; parts-- {
		path = append(path, d.key())
		d.record(path, start)
		if parts == 1 {
			break
		}
		d.one(".", " . ", "\t.")
	}
	d.one("=", " = ", "\t=")
	d.value(path, depth)
}

func (d *document) value(path []any, depth int) {
	kinds := 10
	if depth == 0 {
		kinds = 8
	}
	switch rapid.IntRange(0, kinds-1).Draw(d.t, "kind") {
	case 0:
		d.one("1", "-17", "1_000", "0x1F", "0o7", "0b1", "3.5e2", "inf", "-nan", "true", "false")
	case 1:
		d.one("1979-05-27T07:32:00Z", "1979-05-27 07:32:00.5+01:00", "1979-05-27", "07:32:00")
	case 2:
		d.one(`""`, `"a"`, `"]},[{#='"`, `"\"k1 = "`, `"\\"`, `"\\\""`, "''", `'\'`, `'"]},#'`)
	case 3:
		d.one(`""""""`, `"""a"b""c"""`, `""""a"""""`, `"""\""""`, `"""\\"""`, `"""\""""""`, "\"\"\"\nk1 = [\n#\"\"\"", "\"\"\"a\\\n  b\"\"\"")
	case 4:
		d.one(`''''''`, `'''a'b''c'''`, `''''a'''''`, `'''\'''`, "'''\r\n[k1]\n'''")
	case 5, 6, 8:
		d.array(path, depth)
	case 7, 9:
		d.inline(path, depth)
	}
}

func (d *document) array(path []any, depth int) {
	d.text.WriteByte('[')
	d.blank()
	n := rapid.IntRange(0, 3).Draw(d.t, "elements") * min(depth, 1)
	for i := range n {
		elem := append(append([]any(nil), path...), i)
		d.record(elem, d.text.Len())
		d.value(elem, depth-1)
		d.blank()
		if i < n-1 || rapid.Bool().Draw(d.t, "comma") {
			d.text.WriteByte(',')
			d.blank()
		}
	}
	d.text.WriteByte(']')
}

func (d *document) inline(path []any, depth int) {
	d.text.WriteByte('{')
	d.one("", " ")
	n := rapid.IntRange(0, 3).Draw(d.t, "pairs") * min(depth, 1)
	for i := range n {
		d.keyValue(path, depth-1)
		d.one("", " ")
		if i < n-1 {
			d.one(",", ", ", " ,\t")
		}
	}
	d.text.WriteByte('}')
}

func (d *document) blank() { d.one("", " ", "\n", "\r\n\t", " # [k1] = \"'''\n  ") }

func (d *document) end() { d.one("\n", "\r\n", " # \"\"\" [[k1]]\n", "\n\n# k1 = [\r\n") }

func (d *document) body(path []any) {
	for range rapid.IntRange(0, 3).Draw(d.t, "keys") {
		d.one("", "  ", "\t")
		d.keyValue(path, 2)
		d.end()
	}
}

// header writes a table's header, with a body, and tables inside it.
func (d *document) header(path []any, prefix string, depth int) {
	name := fmt.Sprintf("t%d", d.names)
	d.names++
	array := rapid.Bool().Draw(d.t, "array")
	path = append(path, name)
	for i := range rapid.IntRange(1, 3).Draw(d.t, "tables") {
		if !array && i > 0 {
			break
		}
		d.one("", "  ")
		at, self := d.text.Len(), path
		if array {
			self = append(append([]any(nil), path...), i)
			fmt.Fprintf(&d.text, "[[ %s%s]]", prefix, name)
		} else {
			fmt.Fprintf(&d.text, "[%s%s ]", prefix, name)
		}
		d.record(self, at)
		d.end()
		d.body(self)
		if depth > 0 {
			d.header(self, prefix+name+" . ", depth-1)
		}
	}
}

// TestScan_Positions compares the positions of the scanner with those of a generated
// document.
func TestScan_Positions(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := &document{t: t}
		d.one("", "\ufeff")
		mark := d.text.Len()
		d.body(nil)
		for range rapid.IntRange(0, 3).Draw(t, "headers") {
			d.header(nil, "", 2)
		}
		text := d.text.String()
		f := newFile("generated", 0, text)
		var values map[string]any
		if err := decode(f.text, &values); err != nil {
			t.Fatalf("the document is not valid: %v\n%s", err, text)
		}
		root, refused := scan(f)
		if refused != nil {
			t.Fatalf("refused: %s\n%s", refused.msg, text)
		}
		for _, w := range d.wrote {
			n := root
			for _, step := range w.path {
				if key, ok := step.(string); ok {
					n = n.keys[key]
				} else if i := step.(int); n != nil && i < len(n.elems) {
					n = n.elems[i]
				} else {
					n = nil
				}
				if n == nil {
					t.Fatalf("%v is not found in\n%s", w.path, text)
				}
			}
			if n.offset != w.offset-mark {
				t.Fatalf("%v is at %d, found at %d in\n%s", w.path, w.offset-mark, n.offset, text)
			}
			before := text[mark:w.offset]
			line := 1 + strings.Count(before, "\n")
			column := len(before) - strings.LastIndex(before, "\n")
			if e := n.error("x"); e.Line != line || e.Column != column {
				t.Fatalf("%v is at %d:%d, reported at %v", w.path, line, column, e)
			}
		}
		if err := sameShape(root, values); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
	})
}

// sameShape checks that n has a node for each key and element of v.
func sameShape(n *node, v any) error {
	if table, ok := v.(map[string]any); ok {
		for key, v := range table {
			child := n.keys[key]
			if child == nil {
				return fmt.Errorf("no place for key %q", key)
			}
			if err := sameShape(child, v); err != nil {
				return fmt.Errorf("%s: %w", key, err)
			}
		}
		return nil
	}
	elems, ok := elements(v)
	if ok && len(elems) != len(n.elems) {
		return fmt.Errorf("%d places for %d elements", len(n.elems), len(elems))
	}
	for i, v := range elems {
		if err := sameShape(n.elems[i], v); err != nil {
			return fmt.Errorf("element %d: %w", i, err)
		}
	}
	return nil
}

// TestHostileFiles loads files that would exhaust a naive parser.
func TestHostileFiles(t *testing.T) {
	const size = 1 << 20
	fill := func(head, unit, tail string) string {
		return head + strings.Repeat(unit, (size-len(head)-len(tail))/len(unit)) + tail
	}
	numbered := func(head, format string) string {
		var b strings.Builder
		b.WriteString(head)
		for i := 0; b.Len() < size; i++ {
			fmt.Fprintf(&b, format, i)
		}
		return b.String()
	}
	listener := "[[listen]]\nname = \"db\"\naddress = [\"tcp://0.0.0.0:5432\"]\ndownstream = [\"db.local\"]\n"
	for name, text := range map[string]string{
		"arrays":             fill("x = ", "[", ""),
		"closed arrays":      "x = " + strings.Repeat("[", size/2) + strings.Repeat("]", size/2),
		"inline tables":      fill("x = ", "{a=", ""),
		"mixed":              fill("x = ", "[{a=", ""),
		"dotted key":         fill("", "a.", "a = 1"),
		"header":             fill("[", "a.", "a]"),
		"long key":           fill("", "a", " = 1"),
		"long table":         numbered("["+strings.Repeat("a", 127)+"]\n", "k%d = 1\n"),
		"longer table":       numbered("["+strings.Repeat("a", size/4)+"]\n", "k%d = 1\n"),
		"long inline tables": numbered("", "a%d = {"+strings.Repeat("a", 100)+" = {b = 1}}\n"),
		"unknown keys":       numbered("", "k%d = 1\n"),
		"unknown tables":     numbered("", "[k%d]\n"),
		"escaped keys":       numbered("", "\"\\u0061%d\" = 1\n"),
		"limits":             fill(listener, "[[limit]]\n", ""),
		"listeners":          fill("", "[[listen]]\n", ""),
		"good listeners":     numbered("", "[[listen]]\nname=\"n%[1]d\"\naddress=[\"tcp://0.0.0.0:1\"]\ndownstream=[\"db\"]\n"),
		"integers":           fill("limit = [", "1,", "]"),
		"unknown listeners":  numbered(listener+"[[limit]]\nname = \"l\"\nrate = \"1MB/s\"\nmatch.listen = [", "\"d%d\",\n") + "]",
		"attachments":        fill("", "[[attach]]\n", ""),
		"good attachments":   numbered("", "[[attach]]\nname=\"n%[1]d\"\ninterface=\"eth%[1]d\"\n"),
		"interfaces":         numbered("[[attach]]\nname=\"a\"\ninterface=[", "\"eth%d\",\n") + "]",
		"patterns":           numbered("[[attach]]\nname=\"a\"\ninterface=[", "\"*[a-z]*?*%d\",\n") + "]",
		"sources":            numbered(listener+"[[limit]]\nname = \"l\"\nrate = \"1MB/s\"\nmatch.source = [", "\"2001:db8:0:%x::/64\",\n") + "]",
		"ports":              numbered(listener+"[[limit]]\nname = \"l\"\nrate = \"1MB/s\"\nmatch.port = [", "\"1-%d\",\n") + "]",
		"addresses":          numbered("[[listen]]\nname = \"db\"\ndownstream = [\"db\"]\naddress = [", "\"tcp://10.0.0.0:%d\",\n") + "]",
		"string":             fill("[daemon]\nmode = \"", "x", "\""),
		"open string":        fill("[daemon]\nmode = \"", "x", ""),
		"quotes":             fill("x = ", `"`, ""),
		"escapes":            fill(`x = """`, "\\\n", `"""`),
		"digits":             fill("[daemon]\nbuckets = ", "1", ""),
		"rate":               fill(listener+"[[limit]]\nname = \"l\"\nrate = \"", "1", "MB/s\""),
		"newlines":           fill("", "\n", "x"),
		"comments":           fill("", "#", ""),
		"garbage":            fill("", "\xff", ""),
		"zeros":              fill("a", "\x00", ""),
		"commas":             fill("x = [", ",", "]"),
		"brackets":           fill("", "]", ""),
	} {
		t.Run(name, func(t *testing.T) {
			start := time.Now()
			_, err := load([]*file{newFile("hostile.toml", 0, text)})
			// A second is the requirement; the race detector and busy cores get more.
			if took := time.Since(start); took > 15*time.Second {
				t.Errorf("took %v", took)
			} else {
				t.Logf("took %v", took)
			}
			if mistakes := Errors(nil); errors.As(err, &mistakes) {
				checkPlaces(t, text, mistakes)
				if len(err.Error()) > 1<<16 {
					t.Errorf("the message has %d bytes", len(err.Error()))
				}
			}
		})
	}
}

func TestFileTooLarge(t *testing.T) {
	_, err := load([]*file{newFile("large.toml", 0, strings.Repeat("#", maxFile+1))})
	if want := "large.toml:1:1: the file is larger than 4 MiB"; err == nil || err.Error() != want {
		t.Errorf("error is %v, want %s", err, want)
	}
}
