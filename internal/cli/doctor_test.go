package cli

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"shaperd.dev/shaperd/internal/doctor"
	"shaperd.dev/shaperd/internal/testutil"
)

// TestDoctor_OnThisHost runs doctor on the real host, with and without a valid configuration.
func TestDoctor_OnThisHost(t *testing.T) {
	listen, downstream := testutil.FreeAddr(t, "tcp"), testutil.ServeTCP(t, testutil.Echo)
	config := writeConfig(t, "", strings.Replace(configText(listen, "", downstream, "1MB/s"), "[[limit]]", "tcp_idle_timeout = \"1h\"\n[[limit]]", 1))
	out, _, err := command(t, "doctor", "--config", config, "--probe", "--control", filepath.Join(t.TempDir(), "none.sock"))
	if err != nil {
		t.Errorf("%v:\n%s", err, out)
	}
	for _, want := range []string{"ok    configuration  " + config, "ok    kernel         Linux ", "those of TCP accept connections"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in:\n%s", want, out)
		}
	}
	if strings.Contains(out, "\x1b") {
		t.Error("colors without a terminal")
	}

	out, _, err = command(t, "doctor", "--json", "--config", "/nowhere.toml")
	if err == nil || !strings.Contains(err.Error(), "checks failed") {
		t.Errorf("without a configuration: %v", err)
	}
	var got struct {
		OK     bool
		Checks []doctor.Finding
	}
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		t.Fatal(err)
	}
	if got.OK || !slices.ContainsFunc(got.Checks, func(f doctor.Finding) bool {
		return f.Name == "configuration" && f.State == doctor.Fail && strings.Contains(f.Text, "/nowhere.toml")
	}) {
		t.Errorf("%+v", got)
	}
}

func TestPrintFindings(t *testing.T) {
	all := []doctor.Finding{{Name: "unit", State: doctor.Warn, Text: "two\nlines", Fix: "fix it"}, {Name: "kernel", State: doctor.OK, Text: "Linux"}}
	for colors, want := range map[bool]string{
		false: "warn  unit    two\n              lines\n              -> fix it\nok    kernel  Linux\n",
		true:  "\x1b[33mwarn\x1b[0m  unit    two\n              lines\n              \x1b[1m->\x1b[0m fix it\n\x1b[32mok  \x1b[0m  kernel  Linux\n",
	} {
		var out strings.Builder
		if err := printFindings(&out, all, colors); err != nil || out.String() != want {
			t.Errorf("%v: %q, want %q", err, out.String(), want)
		}
	}
}
