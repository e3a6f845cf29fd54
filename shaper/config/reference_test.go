package config

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestReference checks that every key is in the reference file, in use or after
// "# ", and that the file loads with and without the commented keys. With -update it adds
// missing keys in comments, for an author to polish.
func TestReference(t *testing.T) {
	const path = "../../configs/shaperd.toml"
	c, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	compile(t, c)
	original, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text := string(original)
	for i := range fileKeys {
		table := &fileKeys[i]
		if table.name == "override" { // its keys are those of a limit
			continue
		}
		for j := range table.typ.keys {
			name := table.typ.keys[j].name
			isThere := func() bool {
				return slices.ContainsFunc(referenceTables(text, table.name), func(n *node) bool { return n.keys[name] != nil })
			}
			if *update && !isThere() {
				text = addToReference(text, table, j)
			}
			if !isThere() {
				t.Errorf("%s in the reference has no %s: go generate adds it where it has an effect", table.name, name)
			}
		}
	}
	golden(t, path, text)
	f := newFile(path, 0, withCommentedKeys(text))
	if _, err := load([]*file{f}); err != nil {
		t.Error("with the keys in comments: ", err)
	}
	root, _ := scan(f)
	match := map[string]bool{"asn": true, "country": true} // need a file
	for _, n := range root.keys["limit"].elems {
		if m := n.keys["match"]; m != nil {
			for key := range m.keys {
				match[key] = true
			}
		}
	}
	for _, key := range matchKeys.names() {
		if !match[key] {
			t.Errorf("match in the reference has no %s", key)
		}
	}
	if root.keys["override"] == nil {
		t.Error("the reference has no override")
	}
}

// withCommentedKeys returns the reference file with the keys in comments in use.
func withCommentedKeys(text string) string {
	return regexp.MustCompile(`(?m)^# (\w+ *= )`).ReplaceAllString(text, "$1")
}

// referenceTables returns the tables of a name in the reference file.
func referenceTables(text, name string) []*node {
	root, _ := scan(newFile("", 0, withCommentedKeys(text)))
	if n := root.keys[name]; n != nil && n.elems == nil {
		return []*node{n}
	}
	return root.child(name).elems
}

// addToReference adds key i of a table in a comment, in the first table where it has an
// effect, after a key that is before it in the table of keys.
func addToReference(text string, table *key, i int) string {
	k := &table.typ.keys[i]
	value := k.def
	if k.typ.kind == kindString {
		value = strconv.Quote(k.typ.example)
	}
	added := []string{"", "#"}
	for word := range strings.FieldsSeq(strings.ReplaceAll(sentences(*k), "`", "")) {
		if last := len(added) - 1; len(added[last])+len(word) < 88 {
			added[last] += " " + word
		} else {
			added = append(added, "# "+word)
		}
	}
	added = append(added, fmt.Sprintf("# %s = %s", k.name, value))
	for _, n := range referenceTables(text, table.name) {
		for _, before := range slices.Backward(table.typ.keys[:i]) {
			if at := n.keys[before.name]; at != nil {
				with := strings.Join(slices.Insert(strings.Split(text, "\n"), at.line(), added...), "\n")
				if _, err := load([]*file{newFile("", 0, withCommentedKeys(with))}); err == nil {
					return with
				}
			}
		}
	}
	return text
}

func TestLoad_Examples(t *testing.T) {
	paths, err := filepath.Glob("../../configs/*.toml")
	if err != nil || len(paths) < 5 {
		t.Fatal(paths, err)
	}
	for _, path := range paths {
		c, err := Load(path)
		if err != nil {
			t.Error(err)
			continue
		}
		compile(t, c)
	}
}

// TestEveryKeyIsRead gives each known key a value of a wrong type: a key that
// nothing reads would be accepted.
func TestEveryKeyIsRead(t *testing.T) {
	for header, keys := range map[string]keys{
		"": fileKeys, "[daemon]": daemonKeys, "[transparent]": transparentKeys, "[shared]": sharedKeys, "[asn]": asnKeys, "[[listen]]": listenKeys, "[[attach]]": attachKeys, "[[group]]": groupKeys, "[[class]]": classKeys, "[class.match]": classMatchKeys, "[[limit]]": limitKeys, "[[penalty]]": penaltyKeys, "[limit.match]": matchKeys, "[[override]]": overrideKeys,
	} {
		for _, key := range keys.names() {
			text := header + "\n" + key + " = 1979-05-27\n"
			switch {
			case header == "[limit.match]":
				text = "[[limit]]\n" + text
			case header == "[class.match]":
				text = "[[class]]\n" + text
			case header == "[[override]]" && key != "limit":
				text = "[[limit]]\nname = \"l\"\n" + header + "\nlimit = \"l\"\n" + key + " = 1979-05-27\n"
			}
			_, err := load([]*file{newFile("f.toml", 0, text)})
			line := 1 + strings.Count(text[:strings.LastIndex(text, key)], "\n")
			want := fmt.Sprintf("f.toml:%d:1: %s", line, key)
			if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "a date or time") {
				t.Errorf("%s %s: errors are\n%v\nwant %s", header, key, err, want)
			}
		}
	}
}

func TestCanonical(t *testing.T) {
	c, err := Load("../../configs/shaperd.toml")
	if err != nil {
		t.Fatal(err)
	}
	c.ASN.Files = []string{"/usr/share/shaperd/asn.csv"}
	c.Limits[1].Match.ASN = []uint32{64500, 64501}
	var text strings.Builder
	if err := c.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	golden(t, "testdata/canonical.txt", text.String())
	encoded, err := json.MarshalIndent(c.Canonical(), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "testdata/canonical.json", string(encoded)+"\n")

	c.Daemon.Metrics = ""
	text.Reset()
	if err := c.WriteText(&text); err != nil || !strings.Contains(text.String(), "  metrics              off\n") {
		t.Errorf("without metrics: %v\n%s", err, text.String())
	}
}
