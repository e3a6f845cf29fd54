package cli

import (
	"encoding/json"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

// controlledDaemon is a daemon with a control socket.
type controlledDaemon struct {
	*process
	socket, config string
}

func startControlled(t *testing.T, config string, args ...string) *controlledDaemon {
	t.Helper()
	s := &controlledDaemon{socket: filepath.Join(t.TempDir(), "control.sock"), config: config}
	s.process = startDaemon(t, config, append(args, "--control", s.socket, "--drain-timeout", "10s")...)
	return s
}

func TestRun_ControlSocketInUse(t *testing.T) {
	s := startControlled(t, writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s")))
	second := writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s"))
	if _, _, err := command(t, "run", "--config", second, "--control", s.socket); err == nil || !strings.Contains(err.Error(), "another daemon is listening") {
		t.Errorf("a second daemon: %v", err)
	}
}

// verb runs a verb against the daemon.
func (s *controlledDaemon) verb(args ...string) (string, error) {
	s.t.Helper()
	out, _, err := command(s.t, append(args, "--control", s.socket)...)
	return out, err
}

// must runs a verb that must succeed and print all texts.
func (s *controlledDaemon) must(line string, texts ...string) {
	s.t.Helper()
	out, err := s.verb(strings.Fields(line)...)
	if err != nil {
		s.t.Fatalf("%s: %v", line, err)
	}
	for _, text := range texts {
		if !strings.Contains(out, text) {
			s.t.Errorf("%s: no %q in\n%s", line, text, out)
		}
	}
}

// mustFail runs a verb that must fail with a text.
func (s *controlledDaemon) mustFail(line, text string) {
	s.t.Helper()
	out, err := s.verb(strings.Fields(line)...)
	if err == nil || !strings.Contains(err.Error(), text) {
		s.t.Errorf("%s: %v, want %q\n%s", line, err, text, out)
	}
}

func (s *controlledDaemon) limit(name string) (l api.Limit) {
	s.t.Helper()
	out, err := s.verb("limits", name, "--json")
	if err == nil {
		err = json.Unmarshal([]byte(out), &l)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return l
}

// waitLimit waits until ok returns true for a limit.
func (s *controlledDaemon) waitLimit(name string, ok func(api.Limit) bool) {
	s.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(s.limit(name)); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			s.t.Fatalf("limit %q is %+v", name, s.limit(name))
		}
	}
}

// startConnected starts a daemon that limits an echo server to 1 MB/s, with a connection to it.
func startConnected(t *testing.T) (s *controlledDaemon, c net.Conn, listen string) {
	t.Helper()
	listen = testutil.FreeAddr(t, "tcp")
	s = startControlled(t, writeConfig(t, "", configText(listen, "", testutil.ServeTCP(t, testutil.Echo), "1MB/s")))
	c, err := net.Dial("tcp4", listen)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := ping(c); err != nil {
		t.Fatal(err)
	}
	return s, c, listen
}

func TestSetLimit_Lifecycle(t *testing.T) {
	s, c, listen := startConnected(t)
	s.must("status", "conformance: ok", "tcp://"+listen)

	// For a time, and then for a shorter one on top.
	s.must("set limit per-source rate=2MB/s --for 10m", "was  8Mbit/s", "now  16Mbit/s", "rate=2MB/s, until ")
	if l := s.limit("per-source"); l.Rate != 2e6 || l.Override["rate"] != "2MB/s" {
		t.Errorf("set: %+v", l)
	}
	s.mustFail("set limit per-source rate=10mbps", "is in bytes to tc")
	s.mustFail("set limit per-source speed=1", "speed")
	s.mustFail("set limit nosuch rate=1MB/s", "unknown limit")
	s.must("set limit per-source rate=3MB/s max_connections=7 --for 100ms", "until ")
	s.waitLimit("per-source", func(l api.Limit) bool { return l.Rate == 2e6 && l.MaxConnections == 5 && len(l.Override) == 1 })
	s.waitLog("override expired")

	// Until unset, across reloads, or until the next reload.
	s.must("set limit per-source max_delay=1s", `until "shaperd unset limit"`)
	s.must("unset limit per-source max_delay", "now  16Mbit/s, queue 200ms")
	s.must("unset limit per-source", "now  8Mbit/s, queue 200ms")
	s.mustFail("unset limit per-source", "no key is overridden in limit")
	s.must("observe per-source", "mode observe")
	s.must("enforce per-source", "mode enforce")
	s.must("unset limit per-source")
	s.must("set limit per-source rate=5MB/s")
	s.must("set limit per-source rate=3MB/s burst=1MB --until-reload", "now  24Mbit/s", "until the next reload")
	if _, errors, err := command(t, "reload", "--control", s.socket); err != nil ||
		!strings.Contains(errors, `dropped: burst of limit "per-source": was set until the next reload`) {
		t.Errorf("reload: %v\n%s", err, errors)
	}
	if l := s.limit("per-source"); l.Rate != 5e6 || l.Override["rate"] != "5MB/s" || len(l.Override) != 1 {
		t.Errorf("after a reload: %+v", l)
	}
	s.waitLog(`msg="reload dropped an override" override="rate of limit`)

	// An invalid file changes nothing.
	if err := os.WriteFile(s.config, []byte(configText(listen, "", "127.0.0.1:1", "1MB/s")+"max_dely = \"1s\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	s.mustFail("reload", "the new configuration has errors")
	s.must("status", `unknown key "max_dely"`)
	if l := s.limit("per-source"); l.Rate != 5e6 {
		t.Errorf("after a reload of a wrong file: %+v", l)
	}
	if err := ping(c); err != nil {
		t.Error("the connection: ", err)
	}
}

func TestBlock(t *testing.T) {
	listen := testutil.FreeAddr(t, "tcp")
	s := startControlled(t, writeConfig(t, "", configText(listen, "", testutil.ServeTCP(t, testutil.Echo), "1MB/s")))
	connect := func() net.Conn {
		t.Helper()
		c, err := net.Dial("tcp4", listen)
		if err != nil {
			return nil
		}
		t.Cleanup(func() { c.Close() })
		if ping(c) != nil {
			return nil
		}
		return c
	}
	c := connect()
	if c == nil {
		t.Fatal("no connection")
	}
	s.must("block 127.0.0.0/8 --for 10m", "127.0.0.0/8")
	s.must("status", "127.0.0.0/8")
	if ping(c) == nil || connect() != nil {
		t.Error("a blocked source gets through")
	}
	s.must("reload") // a block survives it
	if connect() != nil {
		t.Error("a reload ended a block")
	}
	s.must("unblock 127.0.0.0/8")
	s.must("block 127.0.0.0/8 --for 2s", "127.0.0.0/8") // longer than a stall before the answer
	testutil.WaitFor(t, "the block to end", func() bool { return connect() != nil })
	s.must("block 127.0.0.1", "127.0.0.1/32")
	s.must("block 2001:db8::/32")
	if connect() != nil {
		t.Error("a blocked source gets through")
	}
	s.must("bypass on", "BYPASS IS ON")
	if connect() != nil {
		t.Error("a blocked source gets through while limits are bypassed")
	}
	s.must("bypass off", "Bypass is off")
	s.must("bypass off", "Bypass was already off")
	if n := strings.Count(s.log.String(), "BYPASS off"); n != 1 || !strings.Contains(s.log.String(), "bypass was already off") {
		t.Errorf("the log says %d times that the bypass is off now:\n%s", n, s.log)
	}
	s.must("unblock 127.0.0.1")
	s.mustFail("unblock 127.0.0.1", "127.0.0.1/32 is not blocked")
	if connect() == nil {
		t.Error("unblocked, and no connection")
	}
	s.must("blocks", "2001:db8::/32")
	s.mustFail("block 192.0.2", "192.0.2")
}

// TestBypass checks that a bypass lifts limits, is reported, and ends.
func TestBypass(t *testing.T) {
	listen, metrics := testutil.FreeAddr(t, "tcp"), testutil.FreeAddr(t, "tcp")
	s := startControlled(t, writeConfig(t, "", configText(listen, metrics, testutil.ServeTCP(t, testutil.Echo), "10kB/s")))
	// pass returns how long the echo of n bytes takes.
	pass := func(n int) time.Duration {
		t.Helper()
		c, err := net.Dial("tcp4", listen)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(20 * time.Second))
		start, b := time.Now(), make([]byte, n)
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, b); err != nil {
			t.Fatal(err)
		}
		return time.Since(start)
	}
	s.must("bypass on --for 10m", "BYPASS IS ON")
	if took := pass(200_000); took > 10*time.Second {
		t.Errorf("200 kB at 10 kB/s took %v with the limit bypassed", took)
	}
	if got := testutil.MustScrape(t, metrics); !strings.Contains(got, "\nshaperd_bypass 1\n") || !strings.Contains(got, `limit_bytes_total{limit="per-source",mode="observe"`) {
		t.Error("the metrics do not report the bypass")
	}
	s.must("bypass on --for 2s", "BYPASS IS ON") // longer than a stall before the answer
	s.waitLimit("per-source", func(l api.Limit) bool { return l.Mode == "enforce" })
	s.waitLog(`override expired" override=bypass`) // the planes have it a moment before the daemon
	if took := pass(5000); took < 300*time.Millisecond {
		t.Errorf("5 kB at 10 kB/s took %v after the bypass", took)
	}
	if got := testutil.MustScrape(t, metrics); !strings.Contains(got, "\nshaperd_bypass 0\n") {
		t.Error("the metrics still report the bypass")
	}
	for _, text := range []string{"level=WARN msg=\"BYPASS on", "override expired\" override=bypass"} {
		if !strings.Contains(s.log.String(), text) {
			t.Errorf("no %s in the log:\n%s", text, s.log)
		}
	}
}

// TestExpiry_IsIndependent checks that an override expires in time although another one is invalid
// without it, and that this does not delay the end of a bypass.
func TestExpiry_IsIndependent(t *testing.T) {
	listen := testutil.FreeAddr(t, "tcp")
	text := strings.Replace(configText(listen, "", testutil.ServeTCP(t, testutil.Echo), "1MB/s"), "rate = \"1MB/s\"\n", "", 1)
	s := startControlled(t, writeConfig(t, "", text))
	s.must("set limit per-source rate=2MB/s --for 4s") // longer than a stall before the next change, which needs it
	s.must("set limit per-source burst=64KiB max_connections=7")
	s.must("block 192.0.2.1 --for 500ms")
	s.must("bypass on --for 500ms")
	s.waitLimit("per-source", func(l api.Limit) bool {
		return l.Rate == 0 && l.Mode == "enforce" && len(l.Override) == 1 // the planes have it a moment before the daemon
	})
	s.waitLog(`override="block of 192.0.2.1/32"`)
	s.must("blocks", "No prefix is blocked.")
	if l := s.limit("per-source"); l.MaxConnections != 7 || len(l.Override) != 1 {
		t.Errorf("the other override is %+v", l)
	}
	s.waitLog(`err="limit \"per-source\": burst=64KiB: burst: has no effect without rate`)
}

// TestStop stops the daemon with the verb.
func TestStop(t *testing.T) {
	listen := testutil.FreeAddr(t, "tcp")
	s := startControlled(t, writeConfig(t, "", configText(listen, "", testutil.ServeTCP(t, testutil.Echo), "1MB/s")))
	c, err := net.Dial("tcp4", listen)
	if err != nil {
		t.Fatal(err)
	}
	if err := ping(c); err != nil {
		t.Fatal(err)
	}
	s.must("explain --source 127.0.0.1 --to tcp/"+listen[strings.LastIndex(listen, ":")+1:], "per-source", "127.0.0.1")
	done := make(chan error, 1)
	go func() { _, err := s.verb("stop"); done <- err }()
	testutil.WaitFor(t, "status to report the drain", func() bool {
		out, err := s.verb("status")
		return err == nil && strings.Contains(out, "STOPPING: ")
	})
	// Changes work during a drain, and do not reopen ports.
	s.must("bypass on", "BYPASS IS ON")
	s.must("set limit per-source rate=2MB/s", "now  16Mbit/s")
	s.mustFail("reload", "the daemon is stopping")
	if err := ping(c); err != nil {
		t.Error("the connection: ", err)
	}
	if c, err := net.Dial("tcp4", listen); err == nil {
		c.Close()
		t.Error("the daemon accepts connections")
	}
	s.must("block 127.0.0.1")
	if ping(c) == nil {
		t.Error("a blocked source gets through")
	}
	c.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
	select {
	case err := <-s.done:
		s.done <- err
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the daemon is still running")
	}
	if _, err := s.verb("status"); exitCode(err) != exitNoDaemon {
		t.Errorf("without a daemon: %v", err)
	}
}
