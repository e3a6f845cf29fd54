package systemd

import (
	"os"
	"strings"
	"testing"
)

const unitFile = "shaperd.service"

// A unit is the settings of a unit file by section and key, in the order in which
// they stand in it.
type unit map[string]map[string][]string

func readUnit(t testing.TB) unit {
	t.Helper()
	text, err := os.ReadFile(unitFile)
	if err != nil {
		t.Fatal(err)
	}
	return parseUnit(t, string(text))
}

// parseUnit reads what shaperd.service is made of: no line goes on in the next
// one, and no empty value takes back earlier ones.
func parseUnit(t testing.TB, text string) unit {
	t.Helper()
	u := unit{}
	var section map[string][]string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if line[0] == '[' {
			section = map[string][]string{}
			u[strings.Trim(line, "[]")] = section
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok || value == "" || strings.HasSuffix(value, `\`) || section == nil {
			t.Fatalf("%s: the tests cannot read the line %q", unitFile, line)
		}
		section[key] = append(section[key], value)
	}
	return u
}

// service returns the value of a setting that stands once in [Service].
func (u unit) service(t testing.TB, key string) string {
	t.Helper()
	values := u["Service"][key]
	if len(values) != 1 {
		t.Fatalf("%s: [Service] has %s %d times, want once", unitFile, key, len(values))
	}
	return values[0]
}
