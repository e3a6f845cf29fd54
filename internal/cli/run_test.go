package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
)

// process is a running "shaperd run".
type process struct {
	t      *testing.T
	log    *testutil.Buffer
	reload chan os.Signal
	force  chan os.Signal
	stop   context.CancelFunc
	done   chan error
}

func startDaemon(t *testing.T, config string, args ...string) *process {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	d := &process{t: t, log: new(testutil.Buffer), reload: make(chan os.Signal, 1), force: make(chan os.Signal, 1), stop: cancel, done: make(chan error, 1)}
	e := env{stdout: io.Discard, stderr: d.log, reload: d.reload, force: d.force}
	go func() { d.done <- run(ctx, e, append([]string{"run", "--config", config}, args...)) }()
	t.Cleanup(func() { cancel(); <-d.done })
	d.waitLog("msg=ready")
	return d
}

func (d *process) waitLog(text string) {
	d.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !strings.Contains(d.log.String(), text); time.Sleep(2 * time.Millisecond) {
		select {
		case err := <-d.done:
			d.done <- err
			d.t.Fatalf("ended: %v\n%s", err, d.log)
		default:
		}
		if time.Now().After(deadline) {
			d.t.Fatalf("%q is not in the log:\n%s", text, d.log)
		}
	}
}

func ping(c net.Conn) error {
	c.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := c.Write([]byte("ping")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 4))
	return err
}

func TestRun_ReloadAndDrain(t *testing.T) {
	listen, metrics, downstream := testutil.FreeAddr(t, "tcp"), testutil.FreeAddr(t, "tcp"), testutil.ServeTCP(t, testutil.Echo)
	path := writeConfig(t, "", configText(listen, metrics, downstream, "1MB/s"))
	d := startDaemon(t, path, "--drain-timeout", "5s")
	c, err := net.Dial("tcp4", listen)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := ping(c); err != nil {
		t.Fatal(err)
	}
	if got := testutil.MustScrape(t, metrics); !strings.Contains(got, `shaperd_limit_connections_in_flight{limit="per-source"} 1`) ||
		!strings.Contains(got, "shaperd_config_reload_success 1") {
		t.Errorf("metrics:\n%s", got)
	}

	writeConfig(t, path, configText(listen, metrics, downstream, "10mbps"))
	d.reload <- syscall.SIGHUP
	d.waitLog("the old configuration stays effective")
	if got := testutil.MustScrape(t, metrics); !strings.Contains(got, "shaperd_config_reload_success 0") {
		t.Errorf("a failed reload shows as success")
	}
	if !strings.Contains(d.log.String(), path+":13:1") {
		t.Errorf("the log does not say where the mistake is:\n%s", d.log)
	}
	if err := ping(c); err != nil {
		t.Errorf("after a bad reload: %v", err)
	}

	writeConfig(t, path, configText(listen, testutil.FreeAddr(t, "tcp"), downstream, "1MB/s"))
	d.reload <- syscall.SIGHUP
	d.waitLog("requires a restart")
	writeConfig(t, path, strings.Replace(configText(listen, metrics, downstream, "1MB/s"), "/nowhere/pins", "/run/bpf", 1))
	d.reload <- syscall.SIGHUP
	d.waitLog(`pin_path: changed from \"/nowhere/pins\" to \"/run/bpf\", which requires a restart`)

	second := testutil.FreeAddr(t, "tcp")
	writeConfig(t, path, configText(listen, metrics, downstream, "2MB/s")+
		fmt.Sprintf("[[listen]]\nname = \"second\"\naddress = [\"tcp://%s\"]\ndownstream = [%q]\n", second, downstream))
	d.reload <- syscall.SIGHUP
	d.waitLog("msg=reloaded")
	if err := ping(c); err != nil {
		t.Errorf("after a reload: %v", err)
	}
	c2, err := net.Dial("tcp4", second)
	if err != nil {
		t.Fatal(err)
	}
	if err := ping(c2); err != nil {
		t.Errorf("on the new listener: %v", err)
	}
	c2.Close()

	d.stop()
	d.waitLog("msg=stopping")
	if err := ping(c); err != nil {
		t.Errorf("while stopping: %v", err)
	}
	c.Close()
	d.waitLog("msg=stopped")
}

func TestRun_SecondSignalEndsDrain(t *testing.T) {
	listen := testutil.FreeAddr(t, "tcp")
	d := startDaemon(t, writeConfig(t, "", configText(listen, "", testutil.ServeTCP(t, testutil.Echo), "1MB/s")), "--log-format", "text")
	c, err := net.Dial("tcp4", listen)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := ping(c); err != nil {
		t.Fatal(err)
	}
	d.stop()
	d.waitLog("msg=stopping")
	d.force <- syscall.SIGTERM
	d.waitLog("connections=1")
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client read %v, want a reset", err)
	}
	// The exit is orderly: after a failure, systemd would restart the daemon.
	if err := <-d.done; err != nil {
		t.Errorf("ended with %v", err)
	}
	d.done <- nil
}

func TestRefusalLog_Summary(t *testing.T) {
	listen := testutil.FreeAddr(t, "tcp")
	text := strings.Replace(configText(listen, "", testutil.ServeTCP(t, testutil.Echo), "1MB/s"), "max_connections = 5", "max_connections = 1\nqueue_timeout = \"0s\"", 1)
	d := startDaemon(t, writeConfig(t, "", text))
	first, err := net.Dial("tcp4", listen)
	if err != nil {
		t.Fatal(err)
	}
	if err := ping(first); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	for range 20 {
		c, err := net.Dial("tcp4", listen)
		if err == nil {
			if err := ping(c); err == nil {
				t.Error("a second connection got through")
			}
			c.Close()
		}
	}
	first.Close()
	d.stop()
	// There is a summary every ten seconds, and one at the end.
	summary := regexp.MustCompile(`msg=refused limit=per-source reason=wait-timeout mode=enforce packets=0 connections=(\d+)`)
	testutil.WaitFor(t, "summaries of 20 connections", func() bool {
		sum := 0
		for _, m := range summary.FindAllStringSubmatch(d.log.String(), -1) {
			n, _ := strconv.Atoi(m[1])
			sum += n
		}
		return sum == 20
	})
	// Five at once, then one per second, and up to two summaries of the omitted ones.
	maxLogged := 7 + 2*int(time.Since(begun)/time.Second)
	if n := strings.Count(d.log.String(), "connection refused"); n < 5 || n > maxLogged {
		t.Errorf("%d refusals were logged one by one, want 5 to %d:\n%s", n, maxLogged, d.log)
	}
}

func TestRun_PortInUse(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, _, err = command(t, "run", "--config", writeConfig(t, "", configText(l.Addr().String(), "", "127.0.0.1:1", "1MB/s")))
	if err == nil || !strings.Contains(err.Error(), "in use") || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("err = %v", err)
	}
}

// TestRun_MetricsPortInUse checks that a daemon starts when the port of the metrics or the dashboard
// is in use, as any user can cause; it reports that until the port is free.
func TestRun_MetricsPortInUse(t *testing.T) {
	metrics, dashboard, listen := testutil.FreeAddr(t, "tcp"), testutil.FreeAddr(t, "tcp"), testutil.FreeAddr(t, "tcp")
	var taken []net.Listener
	for _, addr := range []string{metrics, dashboard} {
		l, err := net.Listen("tcp4", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		taken = append(taken, l)
	}
	text := strings.Replace(configText(listen, metrics, testutil.ServeTCP(t, testutil.Echo), "1MB/s"), `dashboard = ""`, fmt.Sprintf("dashboard = %q", dashboard), 1)
	s := startControlled(t, writeConfig(t, "", text))
	c, err := net.Dial("tcp4", listen)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := ping(c); err != nil {
		t.Error(err)
	}
	s.must("status", "NOT AVAILABLE: [daemon] metrics: listen on "+metrics, "NOT AVAILABLE: [daemon] dashboard: listen on "+dashboard)
	taken[0].Close()
	s.waitLog("key=metrics")
	if text := testutil.MustScrape(t, metrics); !strings.Contains(text, "shaperd_build_info") {
		t.Errorf("metrics are %s", text)
	}
	if out, _ := s.verb("status"); strings.Contains(out, "metrics: listen") || !strings.Contains(out, "dashboard: listen") {
		t.Errorf("with the first port free:\n%s", out)
	}
}

func TestRun_MissingASNFile(t *testing.T) {
	text := configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:1", "1MB/s") + "[asn]\nfiles = [\"missing.csv\"]\n"
	_, _, err := command(t, "run", "--config", writeConfig(t, "", text))
	if err == nil || !strings.Contains(err.Error(), "missing.csv") || !strings.Contains(err.Error(), "shaperd.toml:16:10: ") {
		t.Errorf("err = %v", err)
	}
}

// TestRun_ClosedStderr checks that a daemon survives when the reader of its log goes away.
func TestRun_ClosedStderr(t *testing.T) {
	metrics := testutil.FreeAddr(t, "tcp")
	path := writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), metrics, "127.0.0.1:9", "1MB/s"))
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd := exec.Command(os.Args[0], "run", "--config", path)
	cmd.Env = append(os.Environ(), asShaperd+"=1")
	cmd.Stderr = w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	defer func() { cmd.Process.Kill(); <-ended }()

	buf := make([]byte, 64<<10)
	for got := ""; !strings.Contains(got, "msg=ready"); {
		n, err := r.Read(buf)
		if err != nil {
			t.Fatalf("%v:\n%s", err, got)
		}
		got += string(buf[:n])
	}
	r.Close()
	defer http.DefaultClient.CloseIdleConnections()
	for i := 2; i < 4; i++ { // each is logged
		if err := cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("shaperd_config_reloads_total{result=\"success\"} %d\n", i)
		for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			answer, err := http.Get("http://" + metrics + "/metrics")
			if err != nil {
				t.Fatalf("the daemon has ended: %v", err)
			}
			got, _ := io.ReadAll(answer.Body)
			answer.Body.Close()
			if strings.Contains(string(got), want) {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("no %q in 30 s", want)
			}
		}
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	err = <-ended
	ended <- err
	if err != nil {
		t.Errorf("the daemon ended with: %v", err)
	}
}
