package config

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestReference checks that every key is in the reference file, in use or after
// "# ", and that the file loads with and without the commented keys.
func TestReference(t *testing.T) {
	const path = "../../configs/shaperd.toml"
	c, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	compile(t, c)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f := newFile(path, 0, regexp.MustCompile(`(?m)^# (\w+ *= )`).ReplaceAllString(string(text), "$1"))
	if _, err := load([]*file{f}); err != nil {
		t.Error("with the keys in comments: ", err)
	}
	root, _ := scan(f)
	all := func(key string) (keys []string) {
		for _, n := range root.keys[key].elems {
			keys = append(keys, mapKeys(n.keys)...)
		}
		return keys
	}
	var match []string
	for _, n := range root.keys["limit"].elems {
		if m := n.keys["match"]; m != nil {
			match = append(match, mapKeys(m.keys)...)
		}
	}
	for _, table := range []struct {
		name         string
		known, there []string
	}{
		{"the file", fileKeys.names(), mapKeys(root.keys)},
		{"[daemon]", daemonKeys.names(), mapKeys(root.keys["daemon"].keys)},
		{"[asn]", asnKeys.names(), mapKeys(root.keys["asn"].keys)},
		{"[[listen]]", listenKeys.names(), all("listen")},
		{"[[attach]]", attachKeys.names(), all("attach")},
		{"[[limit]]", limitKeys.names(), all("limit")},
		{"match", slices.DeleteFunc(matchKeys.names(), func(key string) bool { return key == "asn" }), match}, // needs a file
		{"[[override]]", []string{"limit"}, all("override")},
	} {
		for _, key := range table.known {
			if !slices.Contains(table.there, key) {
				t.Errorf("%s in the reference has no %s", table.name, key)
			}
		}
	}
}

func mapKeys(m map[string]*node) (keys []string) {
	for key := range m {
		keys = append(keys, key)
	}
	return keys
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
		"": fileKeys, "[daemon]": daemonKeys, "[transparent]": transparentKeys, "[asn]": asnKeys, "[[listen]]": listenKeys, "[[attach]]": attachKeys, "[[limit]]": limitKeys, "[limit.match]": matchKeys, "[[override]]": overrideKeys,
	} {
		for _, key := range keys.names() {
			text := header + "\n" + key + " = 1979-05-27\n"
			switch {
			case header == "[limit.match]":
				text = "[[limit]]\n" + text
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
