package cli

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

// TestStatus_TruncatesBlocks checks that status lists some blocks, and refers to "blocks".
func TestStatus_TruncatesBlocks(t *testing.T) {
	d := newFakeDaemon()
	d.serve(t)
	d.change(func() {
		d.status.Blocks, d.status.BlocksTotal = nil, 20_000
		for i := range 100 {
			d.status.Blocks = append(d.status.Blocks, api.Block{Prefix: fmt.Sprintf("192.0.2.%d/32", i), Since: fakeStart})
		}
	})
	out, _, err := d.run(t, "status")
	if err != nil || strings.Count(out, "192.0.2.") > 20 || !strings.Contains(out, "and 19990 more; see \"shaperd blocks\"") {
		t.Errorf("%v:\n%s", err, out)
	}
}

// TestStatus_LimitsNotEnforced checks that limits which are not enforced are in the first line of
// status, and in its exit code.
func TestStatus_LimitsNotEnforced(t *testing.T) {
	d := newFakeDaemon()
	d.serve(t)
	d.change(func() {
		d.limits = nil
		d.status.Attachments = []api.AttachmentStatus{
			{Name: "plant", Interface: "eth1", Direction: "ingress", Mode: "police", Error: "not enforced: 7 of 9 packets were not seen"},
			{Name: "rest", Interface: "eth0", Direction: "egress", Mode: "police", Up: true},
		}
	})
	out, _, err := d.run(t, "status")
	if err == nil || err.Error() != "limits are not enforced at plant" || exitCode(err) != exitFailure {
		t.Errorf("status fails with %v", err)
	}
	if !strings.HasPrefix(out, "NOT ENFORCED: attachment plant at eth1, ingress: 7 of 9 packets were not seen\n") || !strings.Contains(out, "down: not enforced") ||
		strings.Contains(out, "conformance: ok\n") || strings.Contains(out, "No traffic is throttled.") {
		t.Errorf("status:\n%s", out)
	}
}

// TestOutput_QuotesControlCharacters checks that no answer of a daemon, even a fake one, can send
// escape sequences to the terminal.
func TestOutput_QuotesControlCharacters(t *testing.T) {
	const escape = "\x1b]0;pwned\a\x1b[31m"
	d := newFakeDaemon()
	d.serve(t)
	d.change(func() {
		l := &d.limits[0]
		l.Summary, l.Mode, l.Direction, l.Plane = escape, escape, escape, escape
		l.Override = map[string]string{"rate": escape}
		d.status.Mode, d.status.Version, d.status.Config = escape, escape, escape
		d.explain.Limits = []api.LimitBucket{{Limit: escape, Key: escape, Direction: escape, Summary: escape, Mode: escape}}
		d.explain.Unavailable = escape
		for i := range d.status.Listeners {
			d.status.Listeners[i].Unavailable = escape
			for j := range d.status.Listeners[i].Downstreams {
				d.status.Listeners[i].Downstreams[j].State, d.status.Listeners[i].Downstreams[j].Error = "failing", escape
			}
		}
	})
	for _, args := range []string{"status", "limits", "limits per-source", "set limit per-source rate=1MB/s", "explain --source 192.0.2.7 --to tcp/5432", "downstreams"} {
		out, _, _ := d.run(t, strings.Fields(args)...)
		if strings.ContainsAny(out, "\x1b\a") {
			t.Errorf("%s: %q", args, out)
		}
	}
}

// TestReload_PortHeldByThisDaemon moves a listener to another address of the same port, which the
// daemon itself occupies.
func TestReload_PortHeldByThisDaemon(t *testing.T) {
	port := fmt.Sprint(testutil.FreePort(t, "tcp"))
	path := writeConfig(t, "", configText("0.0.0.0:"+port, "", "127.0.0.1:9", "1MB/s"))
	s := startControlled(t, path)
	writeConfig(t, path, configText("127.0.0.1:"+port, "", "127.0.0.1:9", "1MB/s"))
	_, stderr, err := command(t, "reload", "--control", s.socket)
	want := fmt.Sprintf("listen on tcp://127.0.0.1:%s: this daemon has the port at 0.0.0.0; moving it to another address requires a restart", port)
	if err == nil || !strings.Contains(stderr, want) {
		t.Errorf("%v\n%s\nwant %q", err, stderr, want)
	}
}

// TestHelp_HidesUnsupportedFlags checks that help lists no flag that the verb rejects.
func TestHelp_HidesUnsupportedFlags(t *testing.T) {
	var refused []string
	var visit func(cmd *cobra.Command)
	visit = func(cmd *cobra.Command) {
		for _, sub := range cmd.Commands() {
			if sub.Name() != "help" { // cobra checks no flags of it
				visit(sub)
			}
		}
		path := strings.Fields(cmd.CommandPath())[1:]
		help, _, err := command(t, append(path, "--help")...)
		if err != nil || !strings.Contains(help, "--control socket") {
			t.Errorf("%s --help: %v\n%s", cmd.CommandPath(), err, help)
		}
		if !strings.Contains(help, "--json") {
			refused = append(refused, strings.Join(path, " "))
		}
	}
	visit(rootCommand(env{flags: new(rootFlags)}))
	slices.Sort(refused)
	args := map[string]string{"completion": "bash", "convert": "nginx -"}
	if diff := cmp.Diff([]string{"completion", "convert", "detach", "man", "rules", "run", "top", "version"}, refused); diff != "" {
		t.Error(diff)
	}
	for _, verb := range refused {
		if _, _, err := command(t, strings.Fields(verb+" "+args[verb]+" --json")...); err == nil || !strings.Contains(err.Error(), "does not support --json") {
			t.Errorf("%s --json: %v", verb, err)
		}
	}
}

// TestEnforce_AttachmentObserves checks that "enforce" names attachments which only observe.
func TestEnforce_AttachmentObserves(t *testing.T) {
	for _, tt := range []struct {
		attachments []string
		want        string
	}{
		{[]string{"wan"}, ""},
		{[]string{"watch"}, `NO EFFECT NOW: attachment "watch" observes: its observe = true applies to all limits there`},
		{[]string{"wan", "watch"}, `NO EFFECT NOW: at attachment "watch", which observes`},
		{nil, ""},
	} {
		d := newFakeDaemon()
		d.serve(t)
		d.change(func() {
			d.limits[0].Attachments = tt.attachments
			d.status.Attachments = []api.AttachmentStatus{
				{Name: "wan", Mode: "police"}, {Name: "watch", Interface: "veth0", Mode: "observe"}, {Name: "watch", Interface: "veth1", Mode: "observe"},
			}
		})
		out, _, err := d.run(t, "enforce", d.limits[0].Name)
		if err != nil || tt.want == "" && strings.Contains(out, "NO EFFECT") || !strings.Contains(out, tt.want) {
			t.Errorf("at %v: %v, want %q:\n%s", tt.attachments, err, tt.want, out)
		}
	}
}

// TestKeys_FallBackToDropped checks that keys, without --sort, lists refusals when nothing was
// delayed.
func TestKeys_FallBackToDropped(t *testing.T) {
	d := newFakeDaemon()
	d.serve(t)
	d.change(func() {
		d.keys = []api.Key{{Key: "source 192.0.2.7/32", Dropped: api.Estimate{Value: 12300}}}
	})
	for args, want := range map[string]string{
		"keys --limit watch":                "No key of watch was delayed in the last minute; these were refused.\nKEY ",
		"keys --limit watch --sort dropped": "\nsource 192.0.2.7/32 ",
		"keys --limit watch --sort delayed": "No key of watch was delayed in the last minute; try another --sort.",
		"keys --limit watch --sort rate":    "No key of watch was active in the last minute; try another --sort.",
		"keys --limit watch --sort waited":  "use delayed, dropped or rate",
	} {
		out, _, err := d.run(t, strings.Fields(args)...)
		if !strings.Contains(out+fmt.Sprint(err), want) {
			t.Errorf("%s: %v\n%s\nwant %q", args, err, out, want)
		}
		if refused := strings.Contains(out, "192.0.2.7"); refused != (strings.HasSuffix(args, "watch") || strings.HasSuffix(args, "dropped")) {
			t.Errorf("%s:\n%s", args, out)
		}
	}
}
