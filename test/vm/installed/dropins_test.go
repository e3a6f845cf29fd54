//go:build vmguest

package installed

import (
	"net"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

// attachedConfig needs the drop-in of the packet plane.
const attachedConfig = proxyConfig + `
[[attach]]
name      = "loop"
interface = "lo"
direction = "egress"
mode      = "police"
on_stop   = "keep"

[[limit]]
name      = "few"
match     = { attach = ["loop"], protocol = "udp", port = ["9"] }
rate      = "1MB/s"
max_delay = "10ms"
`

// transparentConfig needs both drop-ins.
var transparentConfig = strings.Replace(attachedConfig, `name       = "web"`, "name = \"web\"\ntransparent = true", 1)

// testPacketPlane attaches, polices, and keeps the programs while the service is stopped.
func testPacketPlane(t *testing.T) {
	configure(t, attachedConfig)
	if out := try("systemctl", "reload", "shaperd"); !strings.Contains(out, "failed") {
		t.Errorf("a reload without the drop-in did not fail: %s", out)
	}
	installDropIn(t, "packet-plane.conf")
	run(t, "systemctl", "restart", "shaperd")
	for range 2 {
		testutil.WaitFor(t, "the attachment", attached(t))
		flood(t)
		traffic(t)
		run(t, "systemctl", "stop", "shaperd")
		// Links of tcx, or filters before Linux 6.6.
		links, _ := filepath.Glob("/sys/fs/bpf/shaperd/v*/links/*")
		if filters := run(t, "tc", "filter", "show", "dev", "lo", "egress"); len(links) == 0 && !strings.Contains(filters, "bpf") {
			t.Error("nothing is attached after the stop")
		}
		run(t, "systemctl", "start", "shaperd")
	}
}

func attached(t *testing.T) func() bool {
	return func() bool {
		return strings.Contains(testutil.MustScrape(t, "127.0.0.1:9464"),
			`shaperd_attachment_up{attachment="loop",direction="egress",interface="lo",mode="police"} 1`+"\n")
	}
}

// flood exceeds the limit, and checks that packets both passed and were refused.
func flood(t *testing.T) {
	t.Helper()
	c := dial(t, "udp", "127.0.0.1:9")
	for range 100 {
		_, _ = c.Write(make([]byte, 1000)) // no listener
	}
	text := testutil.MustScrape(t, "127.0.0.1:9464")
	for _, verdict := range []string{"pass", "refuse"} {
		if !regexp.MustCompile(`(?m)^shaperd_limit_packets_total\{.*limit="few".*verdict="` + verdict + `".*\} [1-9]`).MatchString(text) {
			t.Errorf("no packets with the verdict %s:\n%s", verdict, text)
		}
	}
}

// testTransparent checks that the daemon serves transparently, next to its attachment.
func testTransparent(t *testing.T) {
	configure(t, transparentConfig)
	installDropIn(t, "network-admin.conf")
	run(t, "systemctl", "restart", "shaperd")
	if rules := run(t, "nft", "list", "ruleset"); !strings.Contains(rules, "socket transparent") {
		t.Errorf("the daemon has not installed its rules:\n%s", rules)
	}
	for _, addr := range []string{"127.0.0.1", "::1"} {
		exchange(t, dial(t, "tcp", net.JoinHostPort(addr, "80")))
	}
	testutil.WaitFor(t, "the attachment", attached(t))
}
