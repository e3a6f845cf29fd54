package redis

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
)

// startSentinel starts a fake Sentinel that names what address returns.
func startSentinel(t *testing.T, address func() string) *fake {
	return startFake(t, func(_ int, command []string) string {
		if command[0] != "SENTINEL" {
			return "-ERR unknown command\r\n"
		}
		host, port, _ := net.SplitHostPort(address())
		return string(encode(nil, []any{host, port}))
	})
}

func addresses(fakes ...*fake) (list []string) {
	for _, f := range fakes {
		list = append(list, f.address)
	}
	return list
}

func sentinelURL(addresses ...string) string {
	return "redis+sentinel://" + strings.Join(addresses, ",") + "/mymaster"
}

// TestSentinel_Majority has a Sentinel that knows the old master only, and one that does not answer.
func TestSentinel_Majority(t *testing.T) {
	a, b := startFake(t, likeRedis), startFake(t, likeRedis)
	old := startSentinel(t, func() string { return a.address })
	silent := startFake(t, func(int, []string) string { return "" })
	names := func() *fake { return startSentinel(t, func() string { return b.address }) }
	s := openStore(t, Options{URL: sentinelURL(addresses(old, silent, names(), names(), names())...)})
	start := time.Now()
	if v, err := try(t, s); err != nil || a.conns.Load() > 0 || b.conns.Load() != 1 {
		t.Errorf("%v, %v; %d connections to the old master, %d to the new one", v, err, a.conns.Load(), b.conns.Load())
	}
	if took := time.Since(start); took > soon/2 {
		t.Errorf("took %v: waited for the Sentinel that is silent", took)
	}
}

// TestSentinel_Confirm has Sentinels replace a master that they cannot reach, and that takes writes.
func TestSentinel_Confirm(t *testing.T) {
	a, b := startFake(t, likeRedis), startFake(t, likeRedis)
	var master atomic.Value
	master.Store(a.address)
	named := func() string { return master.Load().(string) }
	one, two := startSentinel(t, named), startSentinel(t, named)
	s := openStore(t, Options{URL: sentinelURL(addresses(one, two)...)})
	for range 5 {
		if _, err := try(t, s); err != nil {
			t.Fatal(err)
		}
		s.confirmed = time.Now().Add(time.Hour) // however long these calls take
	}
	if n := one.conns.Load() + two.conns.Load(); n != 2 || a.conns.Load() != 1 {
		t.Errorf("Sentinels were asked %d times for 5 calls", n)
	}
	master.Store(b.address)
	s.confirmed = time.Now().Add(-confirmAfter)
	if _, err := try(t, s); err != nil || b.conns.Load() != 1 {
		t.Errorf("%v; %d connections to the new master", err, b.conns.Load())
	}
}

// TestSentinel_AwayIsNoAnswer has all Sentinels die: calls go on.
func TestSentinel_AwayIsNoAnswer(t *testing.T) {
	a := startFake(t, likeRedis)
	silent := false
	one := startFake(t, func(int, []string) string {
		if silent {
			return ""
		}
		host, port, _ := net.SplitHostPort(a.address)
		return string(encode(nil, []any{host, port}))
	})
	s := openStore(t, Options{URL: sentinelURL(one.address)})
	for range 3 {
		s.confirmed = time.Time{}
		if _, err := try(t, s); err != nil || a.conns.Load() != 1 {
			t.Errorf("%v; %d connections", err, a.conns.Load())
		}
		silent = true
	}
}

// TestSentinel_AsksAgain has a master that became a replica.
func TestSentinel_AsksAgain(t *testing.T) {
	a := startFake(t, evaluates(func(int) string { return "-READONLY You can't write against a read only replica.\r\n" }))
	b := startFake(t, likeRedis)
	master := a.address
	one := startSentinel(t, func() string { return master })
	s := openStore(t, Options{URL: sentinelURL(one.address)})
	if _, err := try(t, s); err == nil {
		t.Error("a replica took a write")
	}
	master = b.address
	if _, err := try(t, s); err != nil || a.countAsked("EVALSHA") != 1 {
		t.Error(err)
	}
}

func TestSentinel_Errors(t *testing.T) {
	for answer, want := range map[string]string{
		"*-1\r\n":              "knows no such server",
		"*2\r\n:1\r\n:2\r\n":   "not an address",
		"*1\r\n+a\r\n":         "not an address",
		"+OK\r\n":              "not an address",
		"-NOAUTH x\r\n":        "wants a password",
		"close":                "closed the connection",
		"HTTP/1.1 400\r\n\r\n": "not a reply",
	} {
		f := startFake(t, func(int, []string) string { return answer })
		_, err := try(t, openStore(t, Options{URL: sentinelURL(f.address, "127.0.0.1:1")}))
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), f.address) || !strings.Contains(err.Error(), "127.0.0.1:1") {
			t.Errorf("%q: %v", answer, err)
		}
	}
}

// TestSentinel_Password has a Sentinel that wants the password, and one that does not and must not get it.
func TestSentinel_Password(t *testing.T) {
	a := startFake(t, likeRedis)
	open := startSentinel(t, func() string { return a.address })
	known := map[int]bool{}
	locked := startFake(t, func(conn int, command []string) string {
		host, port, _ := net.SplitHostPort(a.address)
		switch {
		case slices.Equal(command, []string{"AUTH", "shaperd", "hunter2"}):
			known[conn] = true
			return "+OK\r\n"
		case !known[conn]:
			return "-NOAUTH Authentication required.\r\n"
		}
		return string(encode(nil, []any{host, port}))
	})
	for _, f := range []*fake{open, locked} {
		s := openStore(t, Options{
			URL: sentinelURL(f.address), Username: "shaperd", Password: func() (string, error) { return "hunter2", nil },
		})
		if _, err := try(t, s); err != nil {
			t.Error(err)
		}
	}
	if open.countAsked("hunter2") != 0 || locked.countAsked("hunter2") != 1 {
		t.Errorf("asked\n%s\n%s", open.all(), locked.all())
	}
}

// TestSentinel_Failover kills a real master that real Sentinels watch.
func TestSentinel_Failover(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		master, replica := startServer(t, binary), startServer(t, binary)
		host, port, _ := net.SplitHostPort(master.address)
		replica.admin(t)("REPLICAOF", host, port)
		var sentinels []string
		for range 3 {
			sentinels = append(sentinels, startRealSentinel(t, binary, host, port))
		}
		testutil.WaitFor(t, "the replica to be known", func() bool {
			return strings.Contains(ask(t, master.socket, "INFO", "replication"), "state=online") && sentinelsKnow(t, sentinels)
		})
		c := newCaller(t, openStore(t, Options{URL: sentinelURL(sentinels...)}))
		before := c.answered()
		for _, sig := range []unix.Signal{unix.SIGSTOP, unix.SIGCONT} {
			master.signal(sig)
			if sig == unix.SIGSTOP {
				testutil.WaitFor(t, "another master", func() bool {
					return strings.Contains(ask(t, replica.socket, "INFO", "replication"), "role:master")
				})
			}
			after := c.answered()
			if after.Epoch <= before.Epoch || c.store.Server() != replica.address {
				t.Errorf("after %v: epoch %d after %d, at %s", sig, after.Epoch, before.Epoch, c.store.Server())
			}
		}
	})
}

// startRealSentinel returns the address of a Sentinel that watches a master.
func startRealSentinel(t *testing.T, binary, host, port string) string {
	dir := t.TempDir()
	config := filepath.Join(dir, "sentinel.conf")
	text := fmt.Sprintf("sentinel monitor mymaster %s %s 2\nsentinel down-after-milliseconds mymaster 500\nsentinel failover-timeout mymaster 3000\n", host, port)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &server{t: t, address: testutil.FreeAddr(t, "tcp"), socket: filepath.Join(dir, "s"), binary: binary}
	own, ownPort, _ := net.SplitHostPort(s.address)
	s.args = []string{config, "--sentinel", "--port", ownPort, "--bind", own, "--bind-source-addr", own, "--protected-mode", "no", "--dir", dir, "--unixsocket", s.socket}
	s.start()
	t.Cleanup(s.kill)
	return s.address
}

// sentinelsKnow reports whether all Sentinels know each other and the replica.
func sentinelsKnow(t *testing.T, sentinels []string) bool {
	for _, a := range sentinels {
		if !strings.Contains(ask(t, a, "INFO", "sentinel"), "slaves=1,sentinels=3") {
			return false
		}
	}
	return true
}

// ask sends a command on a connection of its own, as Sentinels close those of others, and returns its reply, or "".
func ask(t *testing.T, address string, command ...string) string {
	c, err := new(target).dial(within(t, soon), address)
	if err != nil {
		return ""
	}
	defer c.close()
	replies, err := c.do(within(t, soon), command)
	if err != nil {
		return ""
	}
	return fmt.Sprint(replies...)
}
