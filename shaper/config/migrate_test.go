package config

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestRenamed_KeysExist checks that new names are keys, and old names are not.
func TestRenamed_KeysExist(t *testing.T) {
	tables := map[string]keys{
		"[daemon]": daemonKeys, "[[listen]]": listenKeys, "downstream": downstreamKeys,
		"[[attach]]": attachKeys, "[[limit]]": limitKeys, "[[override]]": overrideKeys,
	}
	for table, keys := range renamed {
		for was, is := range keys {
			if table == "[[override]]" && is == "refuse_with" {
				continue // no override may set it
			}
			if known := tables[table].names(); slices.Contains(known, was) || !slices.Contains(known, is) {
				t.Errorf("%s of %s: %v", was, table, known)
			}
			if keys[is] != "" {
				t.Errorf("%s of %s is renamed twice", was, table)
			}
		}
	}
}

func TestFormatOverride_RenamedKeys(t *testing.T) {
	for _, test := range []struct{ key, value, want string }{
		{"max_wait", "5s", `override limit "l": max_wait was renamed to queue_timeout`},
		{"connections", "many", `override limit "l": connections was renamed to max_connections`},
		{"mode", "observe", `override limit "l": mode = "observe" is now observe = true`},
		{"mode", "enforce", `override limit "l": mode = "enforce" is now observe = false`},
		{"mode", "both", `override limit "l": mode was replaced by observe, which is true or false`},
		{"observe", "enforce", `override limit "l": observe: must be true or false, not "enforce"`},
	} {
		if _, err := FormatOverride("l", map[string]string{test.key: test.value, "rate": "1MB/s"}); fmt.Sprint(err) != test.want {
			t.Errorf("%s=%s: %v, want %s", test.key, test.value, err, test.want)
		}
	}
}

func TestParseOverride_RenamedKeys(t *testing.T) {
	const head = "[[override]]\nlimit = \"l\"\n"
	for _, test := range []struct {
		text string
		want map[string]string // nil for an error
	}{
		{head + "connections = 5\nmax_wait = \"2s\"\nmode = \"observe\"\nrate = \"1MB/s\"\n", map[string]string{"max_connections": "5", "queue_timeout": "2s", "observe": "true", "rate": "1MB/s"}},
		{head + "max_waiting = 0\nmode = \"enforce\"\nshare = \"fifo\"\n", map[string]string{"max_queue": "0", "observe": "false", "scheduling": "fifo"}},
		{head + "max_connections = 5\nobserve = true\n", map[string]string{"max_connections": "5", "observe": "true"}},
		{head + "connections = 5\nmax_connections = 5\n", nil},
		{head + "connections = \"5\"\n", nil},
		{head + "mode = \"both\"\n", nil},
		{head + "mode = \"observe\" # for now\n", nil},
	} {
		set, err := ParseOverride("l", test.text)
		if diff := cmp.Diff(test.want, set); diff != "" || (err != nil) != (test.want == nil) {
			t.Errorf("%q: %v\n%s", test.text, err, diff)
		}
	}
}
