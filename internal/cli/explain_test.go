package cli

import (
	"fmt"
	"strings"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestExplain_AmbiguousListeners checks that explain does not guess when several listeners accept
// a port.
func TestExplain_AmbiguousListeners(t *testing.T) {
	const text = `[daemon]
metrics = ""
dashboard = ""
pin_path = "/nowhere/pins"
[[listen]]
name = "a"
address = ["tcp://127.0.0.1:%[1]s", "tcp://127.0.0.3:%[1]s"]
downstream = ["127.0.0.1:9"]
[[listen]]
name = "b"
address = ["tcp://127.0.0.2:%[1]s"]
downstream = ["127.0.0.1:9"]
[[listen]]
name = "all"
address = ["tcp://0.0.0.0:%[2]s"]
downstream = ["127.0.0.1:9"]
[[limit]]
name = "of-a"
match = { listen = ["a"] }
rate = "1MB/s"
[[limit]]
name = "of-b"
match = { listen = ["b"] }
rate = "2MB/s"
`
	_, port, _ := strings.Cut(testutil.FreeAddr(t, "tcp"), ":")
	_, other, _ := strings.Cut(testutil.FreeAddr(t, "tcp"), ":")
	config := writeConfig(t, "", fmt.Sprintf(text, port, other))
	s := startControlled(t, config)
	for _, tt := range []struct{ args, want, fails string }{
		{"--to tcp/PORT", "", `2 listeners accept tcp/PORT: "a" (tcp://127.0.0.1:PORT), "b" (tcp://127.0.0.2:PORT): use --listener to name one`},
		{"--to tcp/PORT --listener b", `listener "b"`, ""},
		{"--to tcp/PORT --listener a", "of-a", ""},
		{"--to tcp/127.0.0.2:PORT", "of-b", ""},
		{"--to tcp/127.0.0.3:PORT", "of-a", ""},
		{"--to tcp/127.0.0.4:PORT", "", "no listener accepts tcp/127.0.0.4:PORT"},
		{"--to tcp/127.0.0.2:PORT --listener a", "", `listener "a" does not accept tcp/127.0.0.2:PORT`},
		{"--to tcp/PORT --listener c", "", `unknown listener "c"`},
		{"--to tcp/OTHER", `listener "all"`, ""},
		{"--to tcp/192.0.2.9:OTHER", `listener "all"`, ""},
		{"--to tcp/[::1]:PORT", "", "must be of the same address family"},
		{"--to tcp/127.0.0.2:0", "", "must be a protocol and a port"},
		{"--to tcp/PORT --listener a --attach x", "", "cannot be combined"},
	} {
		fill := strings.NewReplacer("PORT", port, "OTHER", other).Replace
		for _, of := range []string{"--control " + s.socket, "--config " + config} {
			out, _, err := command(t, strings.Fields("explain --source 192.0.2.7 "+fill(tt.args)+" "+of)...)
			switch {
			case tt.fails == "" && (err != nil || !strings.Contains(out, fill(tt.want))):
				t.Errorf("%s %s: %v, want %q\n%s", tt.args, of, err, tt.want, out)
			case tt.fails != "" && (err == nil || !strings.Contains(err.Error(), fill(tt.fails))):
				t.Errorf("%s %s: %v, want %q", tt.args, of, err, tt.fails)
			}
		}
	}
}
