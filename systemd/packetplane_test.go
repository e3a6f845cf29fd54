package systemd

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/test/lab"
)

// attachment is configuration that requires the drop-in.
const attachment = `
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

// TestDropIn_PacketPlane checks that the unit with its drop-in attaches programs, and that
// those of on_stop = "keep" are adopted by the next daemon.
func TestDropIn_PacketPlane(t *testing.T) {
	s := newTestHost(t, readUnit(t, unitFile, dropIn), config+attachment)
	for range 2 {
		d := s.start(t)
		want := `shaperd_attachment_up{attachment="loop",direction="egress",interface="lo",mode="police"} 1`
		if text := testutil.MustScrape(t, lab.MetricsAddr); !strings.Contains(text, want+"\n") {
			t.Errorf("no %s in the metrics:\n%s", want, text)
		}
		flood(t)
		s.reload(t, d)
		s.terminate(t, d)
		s.end(t, d)
		if strings.Contains(d.Log.String(), "level=ERROR") {
			t.Errorf("the daemon's log:\n%s", &d.Log)
		}
		if left, err := filepath.Glob("/sys/fs/bpf/shaperd/v*/links/*"); len(left) == 0 {
			t.Errorf("nothing is attached after the stop: %v", err)
		}
	}

	// By root, outside the sandbox.
	out, err := s.command("+/usr/bin/shaperd detach", 0).CombinedOutput()
	if err != nil || string(out) != "detached everything pinned in /sys/fs/bpf/shaperd\n" {
		t.Errorf("detach: %v\n%s", err, out)
	}
	if _, err := os.Stat("/sys/fs/bpf/shaperd"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder of pins exists after detach: %v", err)
	}

	// The drop-in makes the folder of pins, which the daemon must not remove.
	s.configure(t, config)
	d := s.start(t)
	s.terminate(t, d)
	s.end(t, d)
}

// flood exceeds the limit, and checks that packets both passed and were refused.
func flood(t *testing.T) {
	t.Helper()
	c := dial(t, "udp", "127.0.0.1:9")
	for range 100 {
		_, _ = c.Write(make([]byte, 1000)) // no listener
	}
	text := testutil.MustScrape(t, lab.MetricsAddr)
	for _, verdict := range []string{"pass", "refuse"} {
		re := regexp.MustCompile(`(?m)^shaperd_limit_packets_total\{.*limit="few".*verdict="` + verdict + `".*\} (\d+)$`)
		sum := 0
		for _, m := range re.FindAllStringSubmatch(text, -1) {
			n, err := strconv.Atoi(m[1])
			if err != nil {
				t.Fatal(err)
			}
			sum += n
		}
		if sum == 0 {
			t.Errorf("no packets with the verdict %s:\n%s", verdict, text)
		}
	}
}
