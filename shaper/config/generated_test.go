package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"
)

const (
	referencePath = "../../docs/configuration.md"
	schemaPath    = "../../configs/shaperd.schema.json"
)

// TestGenerated compares the reference and the schema with the descriptions of the keys.
// With -update it writes them.
func TestGenerated(t *testing.T) {
	golden(t, referencePath, writeReference())
	schema := schemaOfTable(fileKeys)
	schema["$schema"] = "http://json-schema.org/draft-04/schema#"
	schema["title"] = "shaperd configuration"
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(schema); err != nil {
		t.Fatal(err)
	}
	golden(t, schemaPath, text.String())
}

const referenceHead = `# Configuration reference

<!-- Written by "go generate ./shaper/config" from the descriptions of the keys there. -->

This page lists every key of the configuration, with its type, default and effect.
[shaperd.toml](../configs/shaperd.toml) is a commented configuration with all keys.

The configuration is a TOML file, and every ` + "`*.toml`" + ` file in the directory ` + "`conf.d`" + ` next to it, read in the order of
their names. The listeners, attachments, groups, classes, limits, penalties, overrides and ASN files of all files add
up.

` + "`shaperd check`" + ` reports all mistakes, with file, line and column. Editors that support JSON Schema report most of them
while you type: the schema is [shaperd.schema.json](../configs/shaperd.schema.json).

| Value | Format |
|---|---|
| rate | ` + "`\"10Mbit/s\"`" + ` is 10,000,000 bits, ` + "`\"5MB/s\"`" + ` 5,000,000 bytes and ` + "`\"5MiB/s\"`" + ` 5,242,880 bytes per second; from 1 byte/s to 1 Tbit/s |
| count | ` + "`\"50/s\"`" + `, ` + "`\"5/min\"`" + `, ` + "`\"2/h\"`" + `, and ` + "`\"2000pps\"`" + ` for packets; integers up to 1,000,000,000 |
| size | ` + "`\"64kB\"`" + ` is 64,000 bytes, ` + "`\"64KiB\"`" + ` is 65,536 bytes |
| time | ` + "`\"200ms\"`" + `, ` + "`\"2s\"`" + `, ` + "`\"1m30s\"`" + `, ` + "`\"1h\"`" + ` |

- A number without a unit is an error. So is ` + "`\"10mbps\"`" + `, which some programs read as bits and some as bytes.
- A space between the number and the unit is optional.
- A key that takes an array also takes a single element without brackets.
- Zero does not mean unlimited. To remove a limit, remove the key.
`

func writeReference() string {
	var b strings.Builder
	b.WriteString(referenceHead)
	for _, k := range fileKeys {
		header := "[" + k.name + "]"
		if k.typ.kind == kindTables {
			header = "[" + header + "]"
		}
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n", header, sentences(k))
		if k.name == "override" {
			writeKeys(&b, k.typ.keys[:2])
			fmt.Fprintf(&b, "\nAn override also takes any of these keys of `[[limit]]`: `%s`.\n", strings.Join(OverrideKeys(), "`, `"))
			continue
		}
		writeKeys(&b, k.typ.keys)
		for _, sub := range k.typ.keys {
			takes := &sub.typ
			if takes.elem != nil {
				takes = takes.elem
			}
			if len(takes.keys) > 0 {
				fmt.Fprintf(&b, "\n### %s of %s\n\n", sub.name, header)
				writeKeys(&b, takes.keys)
			}
		}
	}
	return b.String()
}

func writeKeys(b *strings.Builder, k keys) {
	b.WriteString("| Key | Type | Default | Description |\n|---|---|---|---|\n")
	for _, k := range k {
		preset := k.defText
		switch {
		case k.required:
			preset = "required"
		case k.def != "":
			preset = "`" + k.def + "`"
		}
		fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", k.name, describeType(k.typ), preset, sentences(k))
	}
}

// describeType describes a type for the reference.
func describeType(v valueType) string {
	inCode := func(words string) string {
		return regexp.MustCompile(`\{[^}]*\}|"[^"]*"`).ReplaceAllString(words, "`$0`")
	}
	switch {
	case v.kind == kindString && v.enumNames == nil && !strings.Contains(v.desc, v.example):
		return v.desc + fmt.Sprintf(", such as `%q`", v.example)
	case v.kind == kindArray && v.elem.enumNames != nil:
		names := v.elem.enumNames
		if v.elem.pattern != "" { // others too
			names = append(slices.Clone(names), v.elem.example)
		}
		return alternatives(names) + ", or array of them"
	case v.kind == kindArray:
		return inCode(v.desc) + ", or array of them"
	}
	return v.desc
}

// sentences returns the documentation of a key with its conditions: the keys and tables that it
// requires, and the plane that it is for. A link to another page is the last sentence.
func sentences(k key) string {
	var requires []string
	plane := ""
	for _, n := range k.needs {
		switch where, ok := strings.CutPrefix(n.doc, "at "); {
		case ok:
			plane = " " + strings.ToUpper(where[:1]) + where[1:] + " only."
		case n.doc != "":
			requires = append(requires, n.doc)
		}
	}
	doc, link, linked := strings.Cut(k.doc, " See [")
	if len(requires) > 0 {
		doc += " Requires " + joinOr(requires, ", ", " and ") + "."
	}
	doc += plane
	if linked {
		doc += " See [" + link
	}
	return doc
}

func schemaOfTable(k keys) map[string]any {
	properties, required := map[string]any{}, []string{}
	for _, k := range k {
		s := schemaOf(k.typ)
		s["description"] = sentences(k)
		if k.def != "" {
			var v struct{ V any }
			if err := decode("V = "+k.def, &v); err != nil {
				panic(fmt.Sprintf("%s: preset %s: %v", k.name, k.def, err))
			}
			s["default"] = v.V
		}
		if k.typ.kind == kindArray && k.def == "" {
			s["anyOf"].([]any)[1].(map[string]any)["minItems"] = 1
		}
		properties[k.name] = s
		if k.required {
			required = append(required, k.name)
		}
	}
	s := map[string]any{"type": "object", "properties": properties, "additionalProperties": false}
	if len(required) > 0 { // draft 4 requires at least one
		s["required"] = required
	}
	return s
}

// schemaOf returns the schema of a type, by draft 4.
func schemaOf(v valueType) map[string]any {
	s := map[string]any{}
	switch v.kind {
	case kindString:
		if v.pattern != "" && v.enumNames != nil {
			s["anyOf"] = []any{map[string]any{"enum": v.enumNames}, map[string]any{"type": "string", "pattern": v.pattern}}
			return s
		}
		s["type"] = "string"
		if v.pattern != "" {
			s["pattern"] = v.pattern
		}
		if v.enumNames != nil {
			s["enum"] = v.enumNames
		}
	case kindInteger:
		s["type"], s["minimum"], s["maximum"] = "integer", v.min, v.max
	case kindStringOrInteger:
		s["anyOf"] = []any{
			map[string]any{"type": "string", "pattern": v.pattern},
			map[string]any{"type": "integer", "minimum": v.min, "maximum": v.max},
		}
	case kindBoolean:
		s["type"] = "boolean"
	case kindArray:
		s["anyOf"] = []any{schemaOf(*v.elem), map[string]any{"type": "array", "items": schemaOf(*v.elem)}}
	case kindTable:
		return schemaOfTable(v.keys)
	case kindStringOrTable:
		s["anyOf"] = []any{map[string]any{"type": "string"}, schemaOfTable(v.keys)}
	case kindNamedTables:
		s["type"], s["minProperties"], s["additionalProperties"] = "object", 1, schemaOfTable(v.keys)
	case kindNamedValues:
		s["type"], s["minProperties"], s["additionalProperties"] = "object", 1, schemaOf(*v.elem)
	case kindTables:
		s["type"], s["items"] = "array", schemaOfTable(v.keys)
	}
	return s
}

// TestSchema checks that the schema accepts the example configurations, and refuses those
// of testdata with mistakes of structure.
func TestSchema(t *testing.T) {
	schema, err := jsonschema.NewCompiler().Compile(schemaPath)
	if err != nil {
		t.Fatal(err)
	}
	validate := func(path string) error {
		var values map[string]any
		if _, err := toml.DecodeFile(path, &values); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		text, err := json.Marshal(values)
		if err != nil {
			return err // an infinite number
		}
		instance, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		return schema.Validate(instance)
	}
	good, err := filepath.Glob("../../configs/*.toml")
	if err != nil || len(good) < 5 {
		t.Fatal(good, err)
	}
	for _, path := range append(good, "testdata/arrays.toml", "testdata/single.toml") {
		if err := validate(path); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}

	structural := regexp.MustCompile(`unknown key|must be (a |an |true |tables |"|\[\[)|missing key`)
	bad, err := filepath.Glob("testdata/bad/*.err")
	if err != nil {
		t.Fatal(err)
	}
	refused := 0
	for _, path := range bad {
		msgs, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !structural.Match(msgs) {
			continue
		}
		if refused++; validate(strings.TrimSuffix(path, ".err")+".toml") == nil {
			t.Errorf("%s is valid by the schema", path)
		}
	}
	if refused < 60 {
		t.Errorf("%d files of bad structure, want more", refused)
	}
}

// TestDefaults checks that documented defaults are the actual ones: a default that is
// written out changes nothing.
func TestDefaults(t *testing.T) {
	const listen = "[[listen]]\nname = \"db\"\naddress = [\"tcp://0.0.0.0:1\", \"udp://0.0.0.0:1\"]\n"
	const limited = listen + "downstream = [\"a\"]\n[[attach]]\nname = \"up\"\ninterface = \"eth0\"\n[[limit]]\nname = \"l\"\n"
	const onePort = "[[listen]]\nname = \"api\"\naddress = \"tcp://0.0.0.0:8080\"\ndownstream = \"a:80\"\n"
	contexts := map[string][]string{
		"daemon":      {"[daemon]\n@\n" + listenDB},
		"transparent": {listenDB + "transparent = true\n[transparent]\n@\n"},
		"shared": {
			listenDB + "[[limit]]\nname = \"l\"\nrate = \"1MB/s\"\nshared = true\n[shared]\nhosts = 4\nstore = \"redis://h:1\"\n@\n",
			listenDB + "[[limit]]\nname = \"l\"\nrate = \"1MB/s\"\nshared = true\n[shared]\nhosts = 4\n@\n",
		},
		"asn":        {listenDB + "[asn]\n@\n"},
		"listen":     {listen + "downstream = [\"a\", \"b\"]\n@\n"},
		"downstream": {listen + "downstream = [\"a\", { address = \"b\"@ }]\n"},
		"check":      {listen + "downstream = [\"a\"]\ncheck = { rise = 2@ }\n", listen + "downstream = [\"a\"]\ncheck = { fall = 3@ }\n"},
		"eject":      {listen + "downstream = [\"a\", \"b\"]\neject = { after = 3@ }\n", listen + "downstream = [\"a\", \"b\"]\neject = { for = \"10s\"@ }\n"},
		"shed":       {limited + "shed = { cpu = \"50%\"@ }\n", limited + "max_connections = 1\n[[limit]]\nname = \"m\"\nshed = { limit = \"l\"@ }\n"},
		"breaker":    {onePort + "breaker = { probe = 1@ }\n", onePort + "breaker = { after = 5@ }\n"},
		"attach":     {"[[attach]]\nname = \"up\"\ninterface = \"eth0\"\n@\n[[limit]]\nname = \"l\"\nmatch.attach = [\"up\"]\nmax_connections = 1\n"},
		"class":      {limited + "rate = \"1MB/s\"\n[[class]]\nname = \"c\"\n@\n"},
		"limit": {
			limited + "match.protocol = \"udp\"\nrate = \"1MB/s\"\npackets = \"5/s\"\nmax_connections = 5\n@\n",
			limited + "key = [\"source\"]\nrate = \"1MB/s\"\n@\n",
			limited + "match.attach = [\"up\"]\nrate = \"1MB/s\"\n@\n",
			limited + "match.protocol = \"tcp\"\nmax_connections = 5\nadapt = \"on\"\n@\n",
			limited + "match.protocol = \"tcp\"\nmax_connections = 5\nslot_for = \"turn\"\n@\n",
			limited + "new_connections = \"5/s\"\n@\n",
			limited + "quota = \"5GB/day\"\n@\n",
		},
		"penalty": {limited + "match.protocol = \"tcp\"\nkey = [\"source\"]\nmax_connections = 5\n[[penalty]]\nlimit = \"l\"\nafter = \"100/min\"\n@\n"},
	}
	var check func(table string, k keys)
	check = func(table string, k keys) {
		for _, k := range k {
			for _, sub := range []*valueType{&k.typ, k.typ.elem} {
				if sub != nil && sub.keys != nil && k.name != "override" {
					check(k.name, sub.keys)
				}
			}
			if k.doc == "" || k.typ.desc == "" || !k.required && k.def == "" && k.defText == "" && k.typ.keys == nil {
				t.Errorf("%s %s is not described", table, k.name)
			}
			loaded := false
			for _, context := range contexts[table] {
				set := k.name + " = " + k.def
				if !strings.Contains(context, "@\n") {
					set = ", " + set
				}
				without, err := load([]*file{newFile("f.toml", 0, strings.Replace(context, "@", "", 1))})
				if err != nil {
					t.Fatal(err)
				}
				with, err := load([]*file{newFile("f.toml", 0, strings.Replace(context, "@", set, 1))})
				if err != nil {
					continue // this key needs another
				}
				loaded = true
				if diff := cmp.Diff(without, with, equalConfigs...); diff != "" {
					t.Errorf("%s: with %s\n%s", table, set, diff)
				}
			}
			if k.def != "" && !loaded {
				t.Errorf("%s: %s = %s does not load", table, k.name, k.def)
			}
		}
	}
	check("", fileKeys)
}
