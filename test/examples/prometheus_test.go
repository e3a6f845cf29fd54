package examples

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/grafana/grafana-foundation-sdk/go/prometheus"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/test/lab"
)

// shown has something for most panels of the dashboard.
const shown = `
[daemon]
metrics  = "127.0.0.1:9464"
pin_path = "PINS"

[[listen]]
name       = "web"
address    = "tcp://127.0.0.1:80"
downstream = ["127.0.0.1:7000", "127.0.0.1:7001"]

[[listen]]
name       = "names"
address    = "udp://127.0.0.1:53"
downstream = "127.0.0.1:7000"

[[attach]]
name      = "loop"
interface = "lo"
direction = "egress"
mode      = "police"

[[limit]]
name            = "per-source"
match           = { listen = ["web", "names"] }
key             = "source"
rate            = "200kB/s"
max_delay       = "1s"
max_connections = 10

[[limit]]
name      = "few"
match     = { attach = ["loop"], protocol = "udp", port = ["9"] }
rate      = "100kB/s"
max_delay = "10ms"
`

// silent are the queries of the dashboard that have no result here: those of things that happen seldom, of
// adaptive limits, of attachments that shape, and of limits that hosts share.
var silent = regexp.MustCompile(`> 0$|_adapted\{|shaperd_attachment_queue_|shaperd_shared_`)

// query returns the number of series that a query of Prometheus, in a namespace, has as its result.
func query(t *testing.T, host *lab.Host, expr string) int {
	t.Helper()
	var answer struct {
		Status, Error string
		Data          struct{ Result []struct{ Value [2]any } }
	}
	var code int
	err := host.Do(func() (err error) {
		var body string
		if code, body, err = testutil.Get("127.0.0.1:9090", "/api/v1/query?query="+url.QueryEscape(expr)); err != nil {
			return err
		}
		return json.Unmarshal([]byte(body), &answer)
	})
	if err != nil {
		return 0 // it does not listen yet
	}
	if answer.Status != "success" {
		t.Errorf("%s: %d %s", expr, code, answer.Error)
	}
	return len(answer.Data.Result)
}

// TestPrometheus has Prometheus, with the examples for it, scrape a daemon, and evaluates each query of the dashboard.
func TestPrometheus(t *testing.T) {
	host, err := lab.NewHost("monitored")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(host.Remove)
	for _, addr := range []string{"127.0.0.1:7000", "127.0.0.1:7001"} {
		ln, err := host.Listen(netip.MustParseAddrPort(addr))
		if err != nil {
			t.Fatal(err)
		}
		testutil.Serve(t, ln, testutil.Echo)
	}
	echo, err := host.ListenUDP(netip.MustParseAddrPort("127.0.0.1:7000"))
	if err != nil {
		t.Fatal(err)
	}
	testutil.EchoUDP(t, echo)
	pins, err := lab.NewBPFFS()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lab.RemoveDir(pins); err != nil {
			t.Error(err)
		}
	})
	config := strings.Replace(shown, "PINS", filepath.Join(pins, "pins"), 1)
	d, err := lab.StartDaemon(t.Context(), lab.DaemonOptions{Host: host, Config: config})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})

	dir := t.TempDir()
	for name, text := range map[string]string{
		"prometheus.yml": "global:\n  scrape_interval: 500ms\n" + readFile(t, "../../configs/prometheus.yml"),
		"alerts.yml":     readFile(t, "../../configs/alerts.yml"),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	p, err := lab.StartProcess(host.Start, exec.Command("prometheus", "--config.file", filepath.Join(dir, "prometheus.yml"),
		"--storage.tsdb.path", filepath.Join(dir, "data"), "--web.listen-address", "127.0.0.1:9090"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)

	// Traffic goes on while queries are evaluated.
	stop := make(chan struct{})
	ended := make(chan error, 1)
	go func() { ended <- traffic(host, stop) }()
	t.Cleanup(func() {
		close(stop)
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	testutil.WaitFor(t, "the first rates", func() bool {
		return query(t, host, `rate(shaperd_listener_bytes_total{job="shaperd"}[5s]) > 0`) > 0 &&
			query(t, host, `rate(shaperd_limit_packets_total{limit="few"}[5s]) > 0`) > 0
	})

	instead := strings.NewReplacer("$__rate_interval", "5s", "$__range", "1m", "$job", "shaperd", "$instance", ".+", "$limit", ".+")
	queries := 0
	for _, panel := range readDashboard(t).Panels {
		if panel.Panel == nil {
			continue // a row
		}
		for _, target := range panel.Panel.Targets {
			expr := target.(*prometheus.Dataquery).Expr
			queries++
			if silent.MatchString(expr) {
				query(t, host, instead.Replace(expr))
				continue
			}
			// A rate needs two samples of the last seconds, which a busy machine may not have taken.
			testutil.WaitFor(t, fmt.Sprintf("a result of %s: %s", *panel.Panel.Title, expr), func() bool { return query(t, host, instead.Replace(expr)) > 0 })
		}
	}
	if queries < 60 {
		t.Errorf("only %d queries", queries)
	}
	if n := query(t, host, `ALERTS{alertstate="firing"}`); n > 0 {
		t.Errorf("%d alerts fire", n)
	}
	if strings.Contains(p.Log.String(), "level=error") {
		t.Errorf("Prometheus:\n%s", &p.Log)
	}
}

// traffic passes the listeners and the attachment in turn.
func traffic(host *lab.Host, stop chan struct{}) error {
	for {
		err := host.Do(func() error {
			for _, at := range [][2]string{{"tcp", "127.0.0.1:80"}, {"udp", "127.0.0.1:53"}} {
				c, err := net.DialTimeout(at[0], at[1], 30*time.Second)
				if err != nil {
					return err
				}
				_ = c.SetDeadline(time.Now().Add(30 * time.Second))
				_, err = c.Write(make([]byte, 1000))
				if err == nil {
					_, err = c.Read(make([]byte, 1000))
				}
				c.Close()
				if err != nil {
					return err
				}
			}
			c, err := net.Dial("udp", "127.0.0.1:9")
			if err != nil {
				return err
			}
			defer c.Close()
			for range 10 {
				_, _ = c.Write(make([]byte, 1000)) // no listener
			}
			return nil
		})
		if err != nil {
			return err
		}
		select {
		case <-stop:
			return nil
		case <-time.After(50 * time.Millisecond):
		}
	}
}
