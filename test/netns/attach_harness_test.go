package netns

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"shaperd/test/lab"
)

// newPins mounts a bpf file system of the test's own, and returns where on it a
// daemon may pin.
func newPins(t testing.TB) string {
	t.Helper()
	dir, err := lab.NewPins()
	must(t, err)
	t.Cleanup(func() {
		if err := lab.RemoveDir(dir); err != nil {
			t.Error(err)
		}
	})
	return filepath.Join(dir, "pins")
}

// attachConfig is the text of a configuration without listeners.
func attachConfig(pins string, attach string, limits ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "[daemon]\nmetrics = %q\npin_path = %q\nmax_buckets = 4096\n\n[[attach]]\n%s\n", metricsAddr, pins, attach)
	for _, l := range limits {
		fmt.Fprintf(&b, "\n[[limit]]\n%s\n", l)
	}
	return b.String()
}

// attach is the lines of an attachment called wall, for what leaves by an interface.
func attach(at, mode string, lines ...string) string {
	how := fmt.Sprintf("mode = %q", mode)
	if mode == "observe" {
		how = "observe = true"
	}
	return fmt.Sprintf("name = \"wall\"\ninterface = %q\ndirection = \"egress\"\n%s\n%s", at, how, strings.Join(lines, "\n"))
}

const (
	atWall    = `match = { attach = ["wall"] }`
	udpAtWall = `match = { attach = ["wall"], protocol = "udp" }`

	keyAddress = `key = ["source"]`
)

// A result is what a command that ended by itself left.
type result struct {
	stdout, stderr string
	code           int
}

// command runs shaperd inside the host until it ends.
func (h *host) command(t testing.TB, args ...string) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(daemonPath(t), args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.Env = append(os.Environ(), "SHAPERD_CONTROL=")
	if err := h.Start(cmd); err != nil {
		t.Fatalf("start shaperd: %v", err)
	}
	late := time.AfterFunc(20*time.Second, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	if err := cmd.Wait(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		t.Fatalf("shaperd %s: %v", strings.Join(args, " "), err)
	}
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// configFile writes a configuration for a command.
func configFile(t testing.TB, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "shaperd.toml")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

// programs lists what the packet plane may have at the interfaces of the host:
// programs, filters, queues and devices.
func (h *host) programs(t testing.TB) (found []string) {
	t.Helper()
	all, err := h.Links.LinkList()
	if err != nil {
		t.Fatalf("list interfaces of %s: %v", h.Name, err)
	}
	for _, l := range all {
		name := l.Attrs().Name
		if l.Type() == "ifb" {
			found = append(found, "device "+name)
		}
		for _, kind := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress, ebpf.AttachXDP} {
			var q *link.QueryResult
			err := h.Do(func() (err error) {
				q, err = link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: kind})
				return err
			})
			if err == nil && len(q.Programs) > 0 {
				found = append(found, fmt.Sprintf("%v at %s", kind, name))
			}
		}
		if x := l.Attrs().Xdp; x != nil && x.Attached {
			found = append(found, "XDP at "+name)
		}
		for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
			filters, err := h.Links.FilterList(l, parent)
			if err == nil && len(filters) > 0 { // without clsact it is an error
				found = append(found, fmt.Sprintf("%s filter at %s", filters[0].Type(), name))
			}
		}
		queues, err := h.Links.QdiscList(l)
		if err != nil {
			t.Fatalf("list qdiscs of %s: %v", h.Name, err)
		}
		for _, q := range queues {
			if kind := q.Type(); kind == "fq" || kind == "mq" {
				found = append(found, kind+" at "+name)
			}
		}
	}
	return found
}

// mustBeClean fails when the packet plane left anything. The kernel lets go of what
// was pinned a moment after its file is gone.
func (h *host) mustBeClean(t testing.TB, pins string) {
	t.Helper()
	found := h.programs(t)
	for end := time.Now().Add(2 * time.Second); len(found) > 0 && time.Now().Before(end); found = h.programs(t) {
		time.Sleep(10 * time.Millisecond)
	}
	if len(found) > 0 {
		t.Errorf("left at interfaces: %v", found)
	}
	if _, err := os.Stat(pins); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left pinned in %s: %v", pins, cmp.Or(err, errors.New("the folder")))
	}
}

// up is the metric that tells whether the attachment wall is at an interface.
func (m samples) up(at, mode string) (float64, bool) {
	v, ok := m[fmt.Sprintf(`shaperd_attachment_up{attachment="wall",direction="egress",interface=%q,mode=%q}`, at, mode)]
	return v, ok
}
