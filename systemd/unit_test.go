package systemd

import (
	"os"
	"strings"
	"testing"
)

const (
	unitFile = "shaperd.service"
	dropIn   = "packet-plane.conf"

	drainDropIn = "../configs/keepalived/shaperd-drain.conf"
)

// unit has the settings of a unit file by section and key, in file order.
type unit map[string]map[string][]string

// readUnit reads the unit and its drop-ins.
func readUnit(t testing.TB, files ...string) unit {
	t.Helper()
	text := ""
	for _, file := range files {
		text += readFile(t, file)
	}
	return parseUnit(t, text)
}

func readFile(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// parseUnit parses the subset of the syntax that shaperd.service and its drop-ins use: no
// continuation lines, and no empty values that reset earlier ones.
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
			name := strings.Trim(line, "[]")
			if u[name] == nil {
				u[name] = map[string][]string{}
			}
			section = u[name]
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok || value == "" || strings.HasSuffix(value, `\`) || section == nil {
			t.Fatalf("%s: unsupported syntax %q", unitFile, line)
		}
		section[key] = append(section[key], value)
	}
	return u
}

// service returns the value of a setting that occurs once in [Service].
func (u unit) service(t testing.TB, key string) string {
	t.Helper()
	values := u["Service"][key]
	if len(values) != 1 {
		t.Fatalf("%s: [Service] has %s %d times, want once", unitFile, key, len(values))
	}
	return values[0]
}
