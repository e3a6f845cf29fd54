//go:build vmguest

package portable

import (
	"bytes"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
)

const (
	program = "/bin/shaperd"
	metrics = "127.0.0.1:9464"

	proxied = `
[daemon]
metrics     = "127.0.0.1:9464"
dashboard   = ""
max_buckets = 4096

[[listen]]
name       = "web"
address    = "tcp://127.0.0.1:80"
downstream = "127.0.0.1:7000"

[[listen]]
name       = "names"
address    = "udp://127.0.0.1:53"
downstream = "127.0.0.1:7000"

[[limit]]
name      = "slow"
match     = { listen = ["web"] }
rate      = "50kB/s"
max_delay = "10s"

[[limit]]
name        = "datagrams"
match       = { listen = ["names"] }
packets     = "20pps"
max_delay   = "200ms"
`
	attached = `
[[attach]]
name      = "loop"
interface = "lo"
direction = "egress"
mode      = "police"

[[limit]]
name      = "few"
match     = { attach = ["loop"], protocol = "udp", port = ["9"] }
rate      = "100kB/s"
max_delay = "10ms"
`
)

func write(t *testing.T, config string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "shaperd.toml")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

// start starts the daemon, waits until it is ready, and ends it with the test.
func start(t *testing.T, config string) {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.Command(program, "run", "--config", write(t, config), "--control", dir+"/control", "--state", dir+"/state")
	var log testutil.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		if err := cmd.Wait(); err != nil || strings.Contains(log.String(), "level=ERROR") {
			t.Errorf("the daemon: %v\n%s", err, log.String())
		}
	})
	for end := time.Now().Add(time.Minute); !strings.Contains(log.String(), "msg=ready"); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the daemon is not ready:\n%s", log.String())
		}
	}
}

func TestCheck(t *testing.T) {
	out, err := exec.Command(program, "check", write(t, proxied)).CombinedOutput()
	if err != nil || !strings.Contains(string(out), ": ok, revision ") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestExplain(t *testing.T) {
	out, err := exec.Command(program, "explain", "--config", write(t, proxied), "--source", "192.0.2.1", "--to", "tcp/80").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "slow") || strings.Contains(string(out), "datagrams") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestTCP sends what the limit lets pass in three seconds, and gets the same back. Without the limit it took
// one second on the slowest emulated processor.
func TestTCP(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:7000")
	if err != nil {
		t.Fatal(err)
	}
	testutil.Serve(t, ln.(*net.TCPListener), testutil.Echo)
	start(t, proxied)
	c, err := net.Dial("tcp", "127.0.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	data := make([]byte, 150_000)
	for i := range data {
		data[i] = byte(i >> 8)
	}
	began := time.Now()
	go func() { _, _ = c.Write(data) }()
	back := make([]byte, len(data))
	if _, err := io.ReadFull(c, back); err != nil {
		t.Fatal(err)
	}
	took := time.Since(began)
	if !bytes.Equal(back, data) {
		t.Error("the reply differs from the request")
	}
	if took < 2900*time.Millisecond {
		t.Errorf("%d bytes passed in %v", len(data), took)
	}
	t.Logf("%.0f kB/s", float64(len(data))/1e3/took.Seconds())
}

// TestUDP sends more datagrams than the limit lets pass: some come back as they were, and some are refused.
func TestUDP(t *testing.T) {
	testutil.EchoUDP(t, testutil.ListenUDP(t, "127.0.0.1:7000"))
	start(t, proxied)
	c, err := net.Dial("udp", "127.0.0.1:53")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const sent = 40
	for i := range sent {
		if _, err := c.Write(bytes.Repeat([]byte{byte(i)}, 100+i)); err != nil {
			t.Fatal(err)
		}
	}
	got := 0
	for buf := make([]byte, 1000); ; got++ {
		_ = c.SetReadDeadline(time.Now().Add(2 * time.Second))
		n, err := c.Read(buf)
		if err != nil {
			break
		}
		if n < 100 || !bytes.Equal(buf[:n], bytes.Repeat([]byte{byte(n - 100)}, n)) {
			t.Errorf("a reply of %d bytes differs from its request", n)
		}
	}
	if got == 0 || got == sent {
		t.Errorf("%d of %d datagrams came back", got, sent)
	}
	t.Logf("%d of %d datagrams", got, sent)
}

// refusals are what the daemon says on processors that the packet plane does not support, and "check" before it.
var refusals = map[string]struct {
	text    string
	checked bool
}{
	"arm":     {"the packet plane needs a 64-bit processor", true},
	"riscv64": {"the packet plane needs a kernel with efficient unaligned access", false},
}

// TestPacketPlane polices packets, or is refused.
func TestPacketPlane(t *testing.T) {
	if want, refused := refusals[runtime.GOARCH]; refused {
		file := write(t, proxied+attached)
		out, err := exec.Command(program, "run", "--config", file).CombinedOutput()
		if err == nil || !strings.Contains(string(out), want.text) {
			t.Errorf("run: %v\n%s", err, out)
		}
		out, err = exec.Command(program, "check", file).CombinedOutput()
		if err != nil || strings.Contains(string(out), want.text) != want.checked {
			t.Errorf("check: %v\n%s", err, out)
		}
		return
	}
	start(t, proxied+attached)
	c, err := net.Dial("udp", "127.0.0.1:9")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 100 {
		_, _ = c.Write(make([]byte, 1000)) // no listener
	}
	text := testutil.MustScrape(t, metrics)
	for _, verdict := range []string{"pass", "refuse"} {
		if !regexp.MustCompile(`(?m)^shaperd_limit_packets_total\{.*limit="few".*verdict="` + verdict + `".*\} [1-9]`).MatchString(text) {
			t.Errorf("no packets with the verdict %s:\n%s", verdict, text)
		}
	}
}
