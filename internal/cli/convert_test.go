package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

const haproxyConfig = `defaults
  mode tcp
listen db
  bind :5432
  server s 10.0.0.5:5432 maxconn 7
  option tcplog
`

func TestConvert(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	haproxy := file("haproxy.cfg", haproxyConfig)
	rule := "*filter\n-A FORWARD -p udp -m hashlimit --hashlimit-above 10/sec --hashlimit-name x -j DROP\nCOMMIT\n"
	for _, tt := range []struct {
		name   string
		args   []string
		stdin  string
		code   int
		stdout string // a part of it, or "" for nothing at all
		stderr string // a part of it, or of the error
	}{
		{"haproxy", []string{"haproxy", haproxy}, "", 0, "max_connections = 7", haproxy + ": left out: line 6: option tcplog: it has no counterpart\n"},
		{"standard input", []string{"haproxy", "-"}, haproxyConfig, 0, `from -.`, ""},
		{"nginx", []string{"nginx", "-"}, "stream { server { listen 1; proxy_pass a:2; } }", 0, `"tcp://0.0.0.0:1"`, ""},
		{"iptables", []string{"iptables", "--interface", "eth7", "-"}, rule, 0, `interface = "eth7"`, ""},
		{"nothing", []string{"iptables", "-"}, rule, exitFailure, "", "it names no interface: use --interface"},
		{"nothing, as error", []string{"iptables", "-"}, rule, exitFailure, "", "-: nothing can be converted"},
		{"syntax", []string{"nginx", "-"}, "stream {", exitFailure, "", "-: line 1: a block is not closed"},
		{"too large", []string{"nginx", "-"}, strings.Repeat("#", maxConverted+1), exitFailure, "", "-: larger than 1 MiB"},
		{"no file", []string{"nginx", "/nowhere/nginx.conf"}, "", exitFailure, "", "/nowhere/nginx.conf"},
		{"unknown program", []string{"envoy", "-"}, "", exitUsage, "", `unsupported program "envoy": use haproxy, nginx or iptables`},
		{"interface of another", []string{"nginx", "--interface", "eth0", "-"}, "", exitUsage, "", "--interface is for iptables"},
		{"no arguments", nil, "", exitUsage, "", "convert requires haproxy|nginx|iptables FILE"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out, errOut testutil.Buffer
			err := run(t.Context(), env{stdin: strings.NewReader(tt.stdin), stdout: &out, stderr: &errOut}, append([]string{"convert"}, tt.args...))
			if code := exitCode(err); code != tt.code {
				t.Errorf("exit code %d, want %d: %v", code, tt.code, err)
			}
			said := errOut.String()
			if err != nil {
				said += err.Error()
			}
			if !strings.Contains(out.String(), tt.stdout) || tt.stdout == "" && out.String() != "" || !strings.Contains(said, tt.stderr) {
				t.Errorf("it printed:\n%s\nand said:\n%s", out.String(), said)
			}
		})
	}
}

// What is converted is accepted by "check".
func TestConvert_Checks(t *testing.T) {
	stdout, _, err := command(t, "convert", "haproxy", writeConfig(t, "", haproxyConfig))
	if err != nil {
		t.Fatal(err)
	}
	if _, stderr, err := command(t, "check", writeConfig(t, "", stdout)); err != nil {
		t.Errorf("%v: %s", err, stderr)
	}
}
