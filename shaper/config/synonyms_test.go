package config

import (
	"slices"
	"strings"
	"testing"
)

// TestSynonyms_NameKnownKeys checks that no synonym is a key itself, and that all of them
// name known keys.
func TestSynonyms_NameKnownKeys(t *testing.T) {
	tables := map[string]keys{
		"": fileKeys, "[daemon]": daemonKeys, "[transparent]": transparentKeys, "[shared]": sharedKeys, "[asn]": asnKeys, "[[listen]]": listenKeys,
		"downstream": downstreamKeys, "check": checkKeys, "eject": ejectKeys, "[[attach]]": attachKeys, "[[group]]": groupKeys, "[[class]]": classKeys, "[[limit]]": limitKeys, "match": matchKeys,
	}
	for table, keys := range tables {
		known := keys.names()
		for word, names := range synonyms[table] {
			for _, name := range names {
				first, rest, dotted := strings.Cut(name, ".")
				if slices.Contains(known, word) || !slices.Contains(known, first) || dotted && !slices.Contains(tables[first].names(), rest) {
					t.Errorf("%q in %s: %q", word, table, name)
				}
			}
		}
	}
	for table := range synonyms {
		if tables[table] == nil && table != "[[override]]" {
			t.Errorf("table %s is unknown", table)
		}
	}
}

func TestOtherWords_NameKnownValues(t *testing.T) {
	for key, words := range valueSynonyms {
		var values []string
		for _, keys := range []keys{transparentKeys, sharedKeys, listenKeys, attachKeys, limitKeys, matchKeys} {
			for _, k := range keys {
				if k.name != key {
					continue
				}
				values = append(values, k.typ.enumNames...)
				if k.typ.elem != nil {
					values = append(values, k.typ.elem.enumNames...)
				}
			}
		}
		for word, names := range words {
			if slices.Contains(values, word) {
				t.Errorf("%q is a value of %s", word, key)
			}
			for _, name := range names {
				if !slices.Contains(values, name) {
					t.Errorf("%q of %s: %q is no value", word, key, name)
				}
			}
		}
	}
}
