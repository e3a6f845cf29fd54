//go:build vmguest

package installed

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
)

const configFile = "/etc/shaperd/shaperd.toml"

// proxyConfig forwards to the servers of serve.
const proxyConfig = `
[daemon]
metrics = "127.0.0.1:9464"

[[listen]]
name       = "web"
address    = ["tcp://127.0.0.1:80", "tcp://[::1]:80"]
downstream = ["127.0.0.1:7000", "[::1]:7000"]

[[listen]]
name       = "names"
address    = ["udp://127.0.0.1:53"]
downstream = ["127.0.0.1:7000"]

[[limit]]
name      = "all"
key       = "source"
rate      = "2MB/s"
max_delay = "1s"
`

// steps runs the subtests in order, until one fails.
func steps(t *testing.T, all ...step) {
	for _, s := range all {
		if !t.Run(s.name, s.run) {
			// What systemd and the daemon said.
			t.Logf("journal:\n%s", try("journalctl", "--no-pager", "-n", "60", "-u", "shaperd"))
			return
		}
	}
}

type step struct {
	name string
	run  func(t *testing.T)
}

// serve starts echo servers behind the listeners. They end with the test.
func serve(t *testing.T) {
	t.Helper()
	for _, addr := range []string{"127.0.0.1:7000", "[::1]:7000"} {
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		testutil.Serve(t, ln.(*net.TCPListener), testutil.Echo)
	}
	testutil.EchoUDP(t, testutil.ListenUDP(t, "127.0.0.1:7000"))
}

// run runs a program that must succeed, and returns what it printed.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// try runs a program that may fail, and returns what it printed.
func try(name string, args ...string) string {
	out, _ := exec.Command(name, args...).CombinedOutput()
	return strings.TrimSpace(string(out))
}

// property returns a property of the unit.
func property(t *testing.T, name string) string {
	t.Helper()
	return run(t, "systemctl", "show", "--value", "-p", name, "shaperd.service")
}

func expect(t *testing.T, name, want string) {
	t.Helper()
	if got := property(t, name); got != want {
		t.Errorf("%s is %q, want %q", name, got, want)
	}
}

// configure writes the configuration as an administrator does.
func configure(t *testing.T, text string) {
	t.Helper()
	if err := os.WriteFile(configFile, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// installDropIn copies an example as its comment says.
func installDropIn(t *testing.T, name string) {
	t.Helper()
	run(t, "install", "-D", "-m", "0644", "/usr/share/doc/shaperd/examples/"+name,
		filepath.Join("/etc/systemd/system/shaperd.service.d", name))
	run(t, "systemctl", "daemon-reload")
}

func install(t *testing.T, deb string) string {
	t.Helper()
	return run(t, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y", "install", "/mnt/guest/"+deb)
}

func dial(t *testing.T, network, addr string) net.Conn {
	t.Helper()
	c, err := net.DialTimeout(network, addr, 30*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// exchange sends data, and checks that the same comes back.
func exchange(t *testing.T, c net.Conn) {
	t.Helper()
	data := bytes.Repeat([]byte("shaperd "), 100)
	if err := c.SetDeadline(time.Now().Add(90 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(data); err != nil {
		t.Fatal(err)
	}
	back := make([]byte, len(data))
	if _, err := io.ReadFull(c, back); err != nil {
		t.Fatalf("%s: %v", c.RemoteAddr(), err)
	}
	if !bytes.Equal(back, data) {
		t.Errorf("%s: the reply differs from the request", c.RemoteAddr())
	}
}

// traffic passes every listener of proxyConfig, in a new connection each.
func traffic(t *testing.T) {
	t.Helper()
	for _, at := range [][2]string{{"tcp", "127.0.0.1:80"}, {"tcp", "[::1]:80"}, {"udp", "127.0.0.1:53"}} {
		c := dial(t, at[0], at[1])
		exchange(t, c)
		c.Close()
	}
}

// awaitRestarts waits until systemd has restarted the daemon n times by itself, and it is ready.
func awaitRestarts(t *testing.T, n int) {
	t.Helper()
	want := fmt.Sprintf("NRestarts=%d\nActiveState=active", n)
	for end := time.Now().Add(90 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if run(t, "systemctl", "show", "-p", "NRestarts", "-p", "ActiveState", "shaperd.service") == want {
			return
		}
	}
	t.Fatalf("want %s:\n%s", want, try("systemctl", "status", "shaperd"))
}
