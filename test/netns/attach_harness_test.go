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

	"shaperd.dev/shaperd/test/lab"
)

// newPinPath mounts a bpf file system for the test, and returns the path on it for the daemon's pins.
func newPinPath(t testing.TB) string {
	t.Helper()
	dir, err := lab.NewBPFFS()
	must(t, err)
	t.Cleanup(func() {
		if err := lab.RemoveDir(dir); err != nil {
			t.Error(err)
		}
	})
	return filepath.Join(dir, "pins")
}

// attachConfig returns a configuration without listeners.
func attachConfig(pins string, attach string, limits ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "[daemon]\nmetrics = %q\npin_path = %q\nmax_buckets = 4096\n\n[[attach]]\n%s\n", lab.MetricsAddr, pins, attach)
	for _, l := range limits {
		fmt.Fprintf(&b, "\n[[limit]]\n%s\n", l)
	}
	return b.String()
}

// attach returns the lines of an egress attachment called wall.
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

// A result is the output and exit code of a command.
type result struct {
	stdout, stderr string
	code           int
}

// command runs shaperd inside the host until it exits.
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

// programs lists everything that the packet plane may have installed at the interfaces of
// the host: programs, filters, qdiscs and devices.
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
			if err == nil && len(filters) > 0 { // it fails without clsact
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

// mustBeClean fails the test if the packet plane left anything. The kernel releases a
// pinned object shortly after its file is removed.
func (h *host) mustBeClean(t testing.TB, pins string) {
	t.Helper()
	found := h.programs(t)
	for end := time.Now().Add(patience); len(found) > 0 && time.Now().Before(end); found = h.programs(t) {
		time.Sleep(10 * time.Millisecond)
	}
	if len(found) > 0 {
		t.Errorf("left at interfaces: %v", found)
	}
	if _, err := os.Stat(pins); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left in %s: %v", pins, cmp.Or(err, errors.New("the directory")))
	}
}

// attachmentUp returns the metric shaperd_attachment_up of the attachment wall at an interface.
func attachmentUp(m lab.Metrics, at, mode string) (float64, bool) {
	v, ok := m[fmt.Sprintf(`shaperd_attachment_up{attachment="wall",direction="egress",interface=%q,mode=%q}`, at, mode)]
	return v, ok
}
