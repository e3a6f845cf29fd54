package systemd

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// attachment is what a configuration needs the drop-in for.
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

// TestPacketPlane has the unit with its drop-in attach programs, and the packets that
// a daemon left enforced meet the same limit under the next one.
func TestPacketPlane(t *testing.T) {
	s := newStage(t, readUnit(t, unitFile, dropIn), config+attachment)
	for range 2 {
		d := s.start(t)
		want := `shaperd_attachment_up{attachment="loop",direction="egress",interface="lo",mode="police"} 1`
		if text := metrics(t); !strings.Contains(text, want+"\n") {
			t.Errorf("no %s in the metrics:\n%s", want, text)
		}
		flood(t)
		s.reload(t, d)
		s.terminate(t, d)
		d.end(t)
		if bytes.Contains(d.log.Bytes(), []byte("level=ERROR")) {
			t.Errorf("the daemon's log:\n%s", d.log.Bytes())
		}
		if left, err := filepath.Glob("/sys/fs/bpf/shaperd/v*/links/*"); len(left) == 0 {
			t.Errorf("nothing is attached after the end: %v", err)
		}
	}

	// By root, outside the sandbox.
	out, err := s.command("+/usr/bin/shaperd detach", 0).CombinedOutput()
	if err != nil || string(out) != "detached all of /sys/fs/bpf/shaperd\n" {
		t.Errorf("detach: %v\n%s", err, out)
	}
	if _, err := os.Stat("/sys/fs/bpf/shaperd"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after detach there is a folder of pins: %v", err)
	}

	// The folder of pins is there all the same, and not the daemon's to remove.
	s.configure(t, config)
	d := s.start(t)
	s.terminate(t, d)
	d.end(t)
}

// flood sends more than the limit lets through, and wants to see both decisions.
func flood(t *testing.T) {
	t.Helper()
	c := dial(t, "udp", "127.0.0.1:9")
	for range 100 {
		_, _ = c.Write(make([]byte, 1000)) // nobody listens
	}
	text := metrics(t)
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
