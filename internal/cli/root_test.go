package cli

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"shaperd.dev/shaperd/internal/testutil"
)

func TestMain(m *testing.M) {
	if os.Getenv(asShaperd) != "" {
		os.Exit(Run(os.Args[1:], "devel"))
	}
	os.Setenv("SHAPERD_CONTROL", "") // the default may belong to a daemon of this host
	// Tests change the user of threads; /proc/self shows the first thread, which must stay.
	runtime.LockOSThread()
	if signal.Ignored(os.Interrupt) { // by a shell that runs this in the background: verbs would inherit it
		signal.Notify(make(chan os.Signal, 1), os.Interrupt)
	}
	flag.Parse()
	flag.Set("test.parallel", "4") // tests mostly wait
	goleak.VerifyTestMain(m)
}

func command(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errOut testutil.Buffer
	err = run(t.Context(), env{stdout: &out, stderr: &errOut, version: "devel"}, args)
	return out.String(), errOut.String(), err
}

func writeConfig(t *testing.T, path, text string) string {
	t.Helper()
	if path == "" {
		path = filepath.Join(t.TempDir(), "shaperd.toml")
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

const limitPerSource = `
[[limit]]
name = "per-source"
key  = ["source"]
rate = "%s"
max_connections = 5
`

// configText returns a configuration whose pins do not collide with those of other daemons.
func configText(listen, metrics, downstream, rate string) string {
	return fmt.Sprintf(`[daemon]
metrics = %q
dashboard = ""
pin_path = "/nowhere/pins"
[[listen]]
name = "db"
address = ["tcp://%s"]
downstream = [%q]
`+limitPerSource, metrics, listen, downstream, rate)
}

func TestArguments(t *testing.T) {
	good := writeConfig(t, "", configText("127.0.0.1:5432", "", "127.0.0.1:5433", "1MB/s"))
	bad := writeConfig(t, "", configText("127.0.0.1:5432", "", "127.0.0.1:5433", "10mbps"))
	// The invalid pins keep "run" from attaching to interfaces of this host.
	attached := writeConfig(t, "", `
[daemon]
metrics = ""
dashboard = ""
pin_path = "/dev/null/pins"
[[attach]]
name      = "uplink"
interface = ["eth0", "wg*"]
mode      = "police"
[[attach]]
name      = "watch"
interface = "eth1"
direction = "ingress"
observe   = true
[[limit]]
name     = "machines"
match    = { attach = ["uplink"], destination = ["10.0.0.0/8", "fd00::/8"] }
key      = ["source", "attach"]
rate     = "1MB/s"
overhead = "38B"
[[limit]]
name            = "sessions"
match           = { attach = ["uplink"], protocol = "tcp" }
max_connections = 5
[[limit]]
name    = "seen"
match   = { attach = ["watch"], protocol = "tcp" }
packets = "10pps"
[[limit]]
name    = "ping"
match   = { attach = ["uplink"], protocol = "icmp" }
packets = "10pps"
`)
	idle := writeConfig(t, "", configText("127.0.0.1:5432", "", "127.0.0.1:5433", "1MB/s")+`
[[attach]]
name      = "idle"
interface = "nowhere0"
mode      = "police"
`)
	packets := func(attach string, more ...string) []string {
		return append([]string{"explain", "--config", attached, "--attach", attach, "--source", "192.0.2.1"}, more...)
	}
	for _, tt := range []struct {
		name   string
		args   []string
		usage  bool   // expects a usageError
		fails  bool   // expects an error
		output string // on stdout, stderr or in the error
	}{
		{"version", []string{"version"}, false, false, "shaperd "},
		{"unknown verb", []string{"fly"}, true, true, `unknown command "fly"`},
		{"unknown flag", []string{"run", "--confg", "x"}, true, true, "unknown flag: --confg"},
		{"wrong log format", []string{"run", "--log-format", "xml"}, true, true, `--log-format "xml": must be text or json`},
		{"wrong log level", []string{"run", "--log-level", "loud"}, true, true, `--log-level "loud": must be debug`},
		{"version flag", []string{"--version"}, false, false, "devel"},
		{"file as argument", []string{"run", "x.toml"}, true, true, "use --config to name the configuration"},
		{"negative drain", []string{"run", "--drain-timeout", "-5s"}, true, true, "must not be negative"},
		{"wrong duration", []string{"run", "--drain-timeout", "soon"}, true, true, "--drain-timeout"},
		{"state that cannot be written", []string{"run", "--config", good, "--state", "/nowhere/state"}, false, true, "--state /nowhere/state: directory is not writable: no such file"},
		{"no such file", []string{"run", "--config", "/nowhere.toml"}, false, true, "/nowhere.toml"},
		{"check nothing", []string{"check"}, true, true, "check requires a FILE"},
		{"check good", []string{"check", good}, false, false, ": ok"},
		{"check bad", []string{"check", bad}, false, true, bad + ":13:1: "},
		{"check as JSON", []string{"check", "--json", good, bad}, false, true, `"line": 13`},
		{"explain", []string{"explain", "--config", good, "--source", "192.0.2.1", "--to", "tcp/5432"}, false, false, `bottleneck is "per-source"`},
		{"explain mapped address", []string{"explain", "--config", good, "--source", "::ffff:192.0.2.1", "--to", "tcp/5432"}, false, false, "source 192.0.2.1/32"},
		{"explain other port", []string{"explain", "--config", good, "--source", "192.0.2.1", "--to", "tcp/1"}, false, true, "no listener accepts tcp/1"},
		{"explain bad source", []string{"explain", "--config", good, "--source", "here", "--to", "tcp/1"}, true, true, `--source "here"`},
		{"explain bad target", []string{"explain", "--config", good, "--source", "::1", "--to", "sctp/1"}, true, true, `--to "sctp/1"`},
		{"explain icmp at listeners", []string{"explain", "--config", good, "--source", "::1", "--to", "icmp"}, true, true, `--to "icmp"`},
		{"explain destination at listeners", []string{"explain", "--config", good, "--source", "::1", "--to", "tcp/1", "--destination", "::1"}, true, true, "--destination requires --attach"},
		{"explain packets", packets("uplink", "--to", "tcp/22", "--destination", "10.0.0.1"), false, false, `192.0.2.1 to 10.0.0.1, tcp/22: attachment "uplink", egress of eth0, wg*, mode police`},
		{"explain key", packets("uplink", "--to", "tcp/22", "--destination", "10.0.0.1"), false, false, "source 192.0.2.1/32, attach uplink"},
		{"explain overhead", packets("uplink", "--to", "tcp/22", "--destination", "10.0.0.1"), false, false, "8Mbit/s with 38B a packet, queue 200ms"},
		{"explain bytes", packets("uplink", "--to", "tcp/22", "--destination", "10.0.0.1"), false, false, `Bytes: bottleneck is "machines"`},
		{"explain icmp", packets("uplink", "--to", "icmp", "--destination", "::ffff:192.0.2.9"), false, false, `Packets: bottleneck is "ping"`},
		{"explain observing", packets("watch", "--to", "tcp/22"), false, false, "The attachment observes: nothing is delayed or dropped."},
		{"explain without limits", packets("watch", "--to", "udp/22"), false, false, "192.0.2.1 to udp/22: attachment \"watch\", ingress of eth1, mode observe\nNo limit matches"},
		{"explain without destination", packets("uplink", "--to", "tcp/22"), true, true, `limit "machines" matches destinations: use --destination to name one`},
		{"explain bad destination", packets("uplink", "--to", "tcp/22", "--destination", "there"), true, true, `--destination "there"`},
		{"explain two families", packets("uplink", "--to", "tcp/22", "--destination", "fd00::1"), true, true, "must be of the same address family"},
		{"explain other attachment", packets("downlink", "--to", "tcp/22"), false, true, `unknown attachment "downlink"`},
		{"explain other protocol", packets("uplink", "--to", "gre"), true, true, "udp/53, or icmp"},
		{"check attachments", []string{"check", attached}, false, false, "\nattach watch\n"},
		{"check an attachment without limits", []string{"check", idle}, false, false, `attachment "idle": no limit names it`},
		{"check a missing interface", []string{"check", idle}, false, false, `attachment "idle": interface nowhere0 does not exist yet`},
		{"check warnings as JSON", []string{"check", "--json", idle}, false, false, `"warnings": [`},
		{"explain without --attach", []string{"explain", "--config", attached, "--source", "192.0.2.1", "--to", "tcp/22"}, false, true, "use --attach"},
		{"run attachments", []string{"run", "--config", attached}, false, true, "is not on a bpf file system"},
		{"explain without target", []string{"explain", "--source", "::1"}, true, true, `--to ""`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			stdout, stderr, err := command(t, tt.args...)
			var usage usageError
			if (err != nil) != tt.fails || errors.As(err, &usage) != tt.usage {
				t.Errorf("err = %v, want failure %v, usage error %v", err, tt.fails, tt.usage)
			}
			if all := stdout + stderr + fmt.Sprint(err); !strings.Contains(all, tt.output) {
				t.Errorf("%q is not in:\n%s", tt.output, all)
			}
		})
	}
}
