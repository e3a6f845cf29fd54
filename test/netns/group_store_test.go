package netns

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/test/lab"
)

const (
	redisPort     = 6379
	redisPassword = "correct horse"
	sentinelPort  = 26379
	ledgerPort    = 9466
)

// A redis is a redis-server that ends with its test.
type redis struct {
	*lab.Redis
	t    testing.TB
	host *host
	at   netip.AddrPort // where clients find it
	args []string
}

// redis starts a server with further arguments, at all addresses of the host. at is one of them.
func (h *host) redis(t testing.TB, at netip.AddrPort, args ...string) *redis {
	t.Helper()
	r := &redis{t: t, host: h, at: at, args: append(args, "--requirepass", redisPassword, "--masterauth", redisPassword)}
	r.start()
	t.Cleanup(func() { must(t, r.Close()) })
	return r
}

// start starts the server, with no data.
func (r *redis) start() {
	r.t.Helper()
	var err error
	r.Redis, err = lab.StartRedis(r.t.Context(), r.host.Host, netip.AddrPortFrom(netip.IPv4Unspecified(), r.at.Port()), r.args...)
	must(r.t, err)
}

// kill kills the server.
func (r *redis) kill() { must(r.t, r.Close()) }

// do runs a command at the server and returns what it says.
func (r *redis) do(args ...string) string {
	r.t.Helper()
	out, err := r.host.Output("redis-cli", append([]string{
		"-h", r.at.Addr().String(), "-p", fmt.Sprint(r.at.Port()), "-a", redisPassword, "--no-auth-warning",
	}, args...)...)
	must(r.t, err)
	return strings.TrimSpace(out)
}

// field returns a number of INFO.
func (r *redis) field(name string) (n int) {
	r.t.Helper()
	for line := range strings.Lines(r.do("INFO")) {
		if _, err := fmt.Sscanf(line, name+":%d", &n); err == nil {
			return n
		}
	}
	r.t.Fatalf("redis does not tell %s", name)
	return 0
}

// sentinel starts a Sentinel that watches a primary, and returns where.
func (h *host) sentinel(t testing.TB, addr netip.Addr, primary *redis) netip.AddrPort {
	t.Helper()
	at := netip.AddrPortFrom(addr, sentinelPort)
	config := filepath.Join(t.TempDir(), "sentinel.conf")
	must(t, os.WriteFile(config, fmt.Appendf(nil, `port %d
protected-mode no
sentinel monitor primary %v %d 1
sentinel auth-pass primary %s
sentinel down-after-milliseconds primary 1000
sentinel failover-timeout primary 3000
`, at.Port(), primary.at.Addr(), primary.at.Port(), strconv.Quote(redisPassword)), 0o600))
	p, err := lab.StartProcess(h.Start, exec.Command("redis-server", config, "--sentinel"))
	must(t, err)
	t.Cleanup(p.Kill)
	must(t, p.AwaitListening(t.Context(), h.Host, at, false))
	return at
}

// A delayer forwards connections, and delays what their clients send.
type delayer struct {
	delay atomic.Int64 // nanoseconds
	calls atomic.Int64 // pieces that it has forwarded
}

// delayCalls starts a delayer at an address of the host.
func (h *host) delayCalls(t testing.TB, at, to netip.AddrPort) *delayer {
	t.Helper()
	d := &delayer{}
	h.serveTCP(t, at, func(c *net.TCPConn) {
		up, err := h.dialTCP(at.Addr(), to)
		if err != nil {
			return
		}
		defer up.Close()
		var back sync.WaitGroup
		back.Go(func() {
			_, _ = c.ReadFrom(up)
			abort(c)
		})
		defer back.Wait()
		defer abort(up)
		buf := make([]byte, 64<<10)
		for {
			n, err := c.Read(buf)
			if err != nil {
				return
			}
			time.Sleep(time.Duration(d.delay.Load()))
			d.calls.Add(1)
			if _, err := up.Write(buf[:n]); err != nil {
				return
			}
		}
	})
	return d
}

// addStore adds a host for a store to the network.
func (g *group) addStore(n int) *host {
	g.t.Helper()
	return g.addHost(fmt.Sprint("store", n+1), groupStores[n])
}

// useRedis starts a server and makes the group use it. Not all gateways see the same time since boot.
func (g *group) useRedis() *redis {
	g.t.Helper()
	r := g.addStore(0).redis(g.t, netip.AddrPortFrom(groupStores[0], redisPort))
	g.setStore(fmt.Sprintf("redis://%v", r.at))
	g.gateways[1].wrapper = []string{"unshare", "--time", "--boottime", "1000000", "--monotonic", "500000"}
	return r
}

// setStore makes the group use a Redis.
func (g *group) setStore(url string) {
	for _, gw := range g.gateways {
		gw.shared = fmt.Sprintf("name = %q\nstore = [%q]\npassword_file = %q\n", gw.name, url, gw.password)
	}
}

// useEmbedded makes the first gateways serve the ledger.
func (g *group) useEmbedded(servers int) {
	g.t.Helper()
	a := testutil.NewAuthority(g.t)
	var urls []string
	for _, gw := range g.gateways[:servers] {
		urls = append(urls, fmt.Sprintf("%q", "shaperd://"+gw.ledger().String()))
	}
	for i, gw := range g.gateways {
		cert, key := a.Issue(gw.name, time.Now().Add(24*time.Hour), gw.ledger().String())
		gw.shared = fmt.Sprintf("name = %q\nstore = [%s]\nca_file = %q\ncert_file = %q\nkey_file = %q\n", gw.name, strings.Join(urls, ", "), a.CAFile, cert, key)
		if i < servers {
			gw.shared += fmt.Sprintf("serve = %q\n", gw.ledger())
		}
	}
}

// ledger returns where the gateway serves the ledger.
func (gw *gateway) ledger() netip.AddrPort { return netip.AddrPortFrom(gw.addr, ledgerPort) }
