//go:build vmguest

package installed

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
)

// instancesConfig is what two instances have in common. Each has half of the limit.
const instancesConfig = `
[shared]
hosts = 2

[[listen]]
name       = "web"
address    = ["tcp://127.0.0.1:80"]
downstream = ["127.0.0.1:7000"]
instances  = 2

[[limit]]
name   = "all"
rate   = "2MB/s"
shared = true
`

// TestInstances runs two instances as units of a template, as docs/cluster.md says: each has its part of the sources, and while one
// is killed, restarted or stopped the other one serves all.
func TestInstances(t *testing.T) {
	install(t, "new.deb")
	serve(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("journal:\n%s", try("journalctl", "--no-pager", "-n", "80", "-u", "shaperd@*"))
		}
	})
	run(t, "cp", unitFile, "/etc/systemd/system/shaperd@.service")
	run(t, "install", "-D", "-m", "0644", examples+"instances.conf", "/etc/systemd/system/shaperd@.service.d/instances.conf")
	write(t, "/etc/shaperd/conf.d/common.toml", instancesConfig)
	for i, name := range []string{"a", "b"} {
		write(t, "/etc/shaperd/"+name+".toml", fmt.Sprintf("[daemon]\nmetrics = \"127.0.0.1:%d\"\ndashboard = \"\"\n", 9471+i))
	}
	run(t, "systemctl", "daemon-reload")
	run(t, "systemctl", "disable", "--now", "shaperd")
	run(t, "systemctl", "enable", "--now", "shaperd@a", "shaperd@b")

	atB := func(source string) bool {
		before := accepted(t, 9472)
		exchangeFrom(t, source)
		return accepted(t, 9472) != before
	}
	sourcesOf := func() (a, b string) {
		for i := range 20 {
			if source := fmt.Sprint("127.0.1.", i+1); atB(source) {
				b = source
			} else {
				a = source
			}
		}
		if a == "" || b == "" {
			t.Fatalf("all sources are at one instance: at a %q, at b %q", a, b)
		}
		return a, b
	}

	pid := func() string { return run(t, "systemctl", "show", "--value", "-p", "MainPID", "shaperd@a") }
	ofA, _ := sourcesOf()
	killed := pid()
	run(t, "kill", "-9", killed)
	testutil.WaitFor(t, "the end of shaperd@a", func() bool { return pid() != killed })
	exchangeFrom(t, ofA)
	testutil.WaitFor(t, "the restart of shaperd@a", func() bool { return pid() != "0" })
	run(t, "systemctl", "start", "shaperd@a") // returns when it is ready
	ofA, ofB := sourcesOf()                   // others than before
	established := dialFrom(t, ofB)
	exchange(t, established)
	run(t, "systemctl", "reload", "shaperd@a")
	run(t, "systemctl", "restart", "shaperd@a")
	exchange(t, established)
	exchangeFrom(t, ofA)
	ofA, _ = sourcesOf()

	run(t, "systemctl", "stop", "shaperd@a")
	if !atB(ofA) {
		t.Error("shaperd@b has not the sources of shaperd@a")
	}
	for file, want := range map[string]string{"/run/shaperd": "b", "/var/lib/shaperd": "a\nb"} {
		if got := run(t, "ls", file); got != want {
			t.Errorf("%s has %q, want %q", file, got, want)
		}
	}
	if out := run(t, "shaperd", "status", "--control", "/run/shaperd/b/control.sock"); !strings.Contains(out, "web") {
		t.Errorf("the status lacks the listener:\n%s", out)
	}
}

// accepted returns the line of the metrics with the connections that an instance has accepted.
func accepted(t *testing.T, port int) string {
	t.Helper()
	for line := range strings.Lines(testutil.MustScrape(t, fmt.Sprint("127.0.0.1:", port))) {
		if strings.HasPrefix(line, "shaperd_listener_connections_accepted_total") {
			return line
		}
	}
	t.Fatal("the metrics lack the connections")
	return ""
}

func exchangeFrom(t *testing.T, source string) {
	t.Helper()
	c := dialFrom(t, source)
	exchange(t, c)
	c.Close()
}

func dialFrom(t *testing.T, source string) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}, Timeout: 30 * time.Second}
	c, err := d.Dial("tcp", "127.0.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}
