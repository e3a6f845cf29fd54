package control

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/control/internal/fakes"
	"shaperd.dev/shaperd/internal/testutil"

	"shaperd.dev/shaperd/api"
)

// Thousands of half-open requests do not block others: metrics and the dashboard respond as fast
// as a server without a connection limit under the same flood.
func TestEndpoint_ServesDuringHalfOpenFlood(t *testing.T) {
	for name, begin := range map[string]func(string, *Options) (*Endpoint, error){"/metrics": ServeMetrics, "/v1/status": ServeDashboard} {
		t.Run(name, func(t *testing.T) {
			addr := testutil.FreeAddr(t, "tcp")
			e, err := begin(addr, options(t, fakes.Shaper(t, 2)))
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			unbound := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
			defer unbound.Close()
			client := &http.Client{Transport: &http.Transport{DialContext: dialFar, DisableKeepAlives: true}, Timeout: time.Minute}
			scrape := func(url string) time.Duration {
				begun := time.Now()
				a, err := client.Get(url)
				if err != nil {
					t.Errorf("%s is not answered: %v", url, err)
					return 0
				}
				defer a.Body.Close()
				io.Copy(io.Discard, a.Body)
				if a.StatusCode != http.StatusOK {
					t.Errorf("%s: %s", url, a.Status)
				}
				return time.Since(begun)
			}
			for _, addr := range []string{addr, unbound.Listener.Addr().String()} {
				start(t, unprivileged.command(t, "flood", floodArgs{addr, 3 * maxPortConnections}))
			}
			var took, reference time.Duration
			for range 4 {
				var both sync.WaitGroup
				both.Go(func() { took = max(took, scrape("http://"+addr+name)) })
				both.Go(func() { reference = max(reference, scrape(unbound.URL)) })
				both.Wait()
			}
			if took > 3*time.Second+2*reference {
				t.Errorf("answered within %v, and by a server that has no bound within %v", took, reference)
			}
		})
	}
}

// dialFar connects, with a latency of requests that is longer than a flood takes.
func dialFar(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, network, addr)
	time.Sleep(100 * time.Millisecond)
	return c, err
}

// A busy connection is closed too, once its response should have been read.
func TestConnLimiter_ClosesOldestBusy(t *testing.T) {
	c := &connLimiter{log: noLog, users: map[uint32]*userConns{}}
	var all []*limitedConn
	for range 4 {
		ours, theirs := net.Pipe()
		defer theirs.Close()
		g, room := c.admit(ours, anyUser, 4)
		if !room {
			t.Fatal("not admitted")
		}
		g.setState(http.StateActive)
		all = append(all, g)
	}
	ours, theirs := net.Pipe()
	defer theirs.Close()
	last, room := c.admit(ours, anyUser, 4)
	if room {
		t.Error("a connection that just became busy was closed")
	}
	last.Close()
	for _, g := range all {
		g.since = g.since.Add(-minBusyTime)
	}
	last, room = c.admit(ours, anyUser, 4)
	if !room || all[0].list != nil || all[1].list == nil {
		t.Error("the oldest was not closed")
	}
	last.Close()
	for _, g := range all {
		g.Close()
	}
	if n := c.open(); n != 0 || len(c.users) != 0 {
		t.Errorf("%d are left of %d users", n, len(c.users))
	}
}

// Root is never locked out of the kill switch, whatever connections root has open.
func TestConnLimiter_RootIsNotLockedOut(t *testing.T) {
	daemon := &fakeDaemon{}
	o := options(t, fakes.Shaper(t, 2))
	o.Daemon = daemon
	s := serveOn(t, o, -1, nil)
	c := api.NewClient(s.socket.path)
	for range maxUserConnections + 1 { // streams
		q, err := http.NewRequestWithContext(t.Context(), "GET", "http://shaperd/v1/live", nil)
		if err != nil {
			t.Fatal(err)
		}
		a, err := testutil.UnixClient(t, s.socket.path).Do(q)
		if err != nil {
			t.Fatal(err)
		}
		defer a.Body.Close()
		if a.StatusCode != http.StatusOK {
			t.Error(a.Status)
		}
	}
	for range 2 * maxAdminConnections { // and silence
		dial(t, s)
	}
	begun := time.Now()
	if _, err := c.Bypass(t.Context(), api.SetBypass{On: true}); err != nil {
		t.Errorf("bypass: %v", err)
	}
	if took := time.Since(begun); took > 20*time.Second {
		t.Errorf("bypass took %v", took)
	}
	// Scripts block many prefixes at once.
	var all sync.WaitGroup
	for i := range 120 {
		all.Go(func() {
			if err := c.Block(context.Background(), api.SetBlock{Prefix: fmt.Sprintf("192.0.2.%d", i)}); err != nil {
				t.Errorf("block: %v", err)
			}
		})
	}
	all.Wait()
}

// A user with too many recently used connections gets an error after retries, and is served once
// one of them has been busy for long, such as a forgotten stream.
func TestConnLimiter_ErrorWhenFull(t *testing.T) {
	t.Parallel()
	s := serveOn(t, options(t, fakes.Shaper(t, 2)), -1, nil)
	used := func(since time.Time) {
		s.socket.limiter.mu.Lock()
		defer s.socket.limiter.mu.Unlock()
		for e := s.socket.limiter.users[0].busy.Front(); e != nil; e = e.Next() {
			e.Value.(*limitedConn).since = since
		}
	}
	for range maxAdminConnections {
		a, err := testutil.UnixClient(t, s.socket.path).Get("http://shaperd/v1/live")
		if err != nil {
			t.Fatal(err)
		}
		defer a.Body.Close()
	}
	used(time.Now().Add(time.Hour))
	c := api.NewClient(s.socket.path)
	begun := time.Now()
	_, err := c.Status(t.Context())
	var said *api.APIError
	if !errors.As(err, &said) || said.Code != http.StatusServiceUnavailable || !strings.Contains(said.Message, "too many connections of user 0 (limit 256)") {
		t.Errorf("one too many: %v", err)
	}
	if took := time.Since(begun); took < api.RetryTime {
		t.Errorf("it gave up after %v", took)
	}
	time.AfterFunc(api.RetryTime/4, func() { used(time.Now().Add(-minBusyTime)) })
	if _, err := c.Status(t.Context()); err != nil {
		t.Errorf("with streams that do not end: %v", err)
	}
}

// A connection between two requests makes room for another one, however recent its last request is.
func TestConnLimiter_ClosesIdleKeptAlive(t *testing.T) {
	s := serveOn(t, options(t, fakes.Shaper(t, 1)), -1, nil)
	for i := range maxAdminConnections + 10 {
		a, err := testutil.UnixClient(t, s.socket.path).Get("http://shaperd/v1/blocks")
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, a.Body)
		a.Body.Close()
		if a.StatusCode != http.StatusOK {
			t.Fatalf("connection %d: %s", i, a.Status)
		}
	}
}

// The socket serves the metrics too.
func TestServer_MetricsOnSocket(t *testing.T) {
	s := serveOn(t, options(t, fakes.Shaper(t, 1)), -1, nil)
	a, err := testutil.UnixClient(t, s.socket.path).Get("http://shaperd/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close()
	text, err := io.ReadAll(a.Body)
	if err != nil || a.StatusCode != http.StatusOK || !strings.Contains(string(text), "\nshaperd_build_info{") {
		t.Errorf("%s, %v:\n%.200s", a.Status, err, text)
	}
	for _, code := range unprivileged.ask(t, []request{{s.socket.path, "GET", "/metrics", ""}}) {
		if code != http.StatusForbidden {
			t.Errorf("user without a role: %d", code)
		}
	}
}

// Streams of the dashboard do not count on the socket.
func TestLive_DashboardStreamsDoNotCountOnSocket(t *testing.T) {
	o := options(t, fakes.Shaper(t, 1))
	_, addr := serveDashboard(t, o)
	s := serveOn(t, o, -1, nil)
	client := freshClient(t)
	for range maxStreams {
		stream(t, client, addr)
	}
	if a := stream(t, client, addr); a.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("dashboard: %s", a.Status)
	}
	a, err := testutil.UnixClient(t, s.socket.path).Get("http://shaperd/v1/live")
	if err != nil {
		t.Fatal(err)
	}
	a.Body.Close()
	if a.StatusCode != http.StatusOK {
		t.Errorf("socket: %s", a.Status)
	}
}

// Pages of other sites get nothing, also not by DNS rebinding.
func TestServeDashboard_RejectsOtherSites(t *testing.T) {
	o := options(t, fakes.Shaper(t, 1))
	_, dashboard := serveDashboard(t, o)
	metrics := testutil.FreeAddr(t, "tcp")
	e, err := ServeMetrics(metrics, o)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for _, tt := range []struct {
		addr, path, host, site string
		want                   int
	}{
		{metrics, "/metrics", "", "", 200},
		{metrics, "/metrics", "localhost", "", 200},
		{metrics, "/metrics", "", "none", 200},
		{metrics, "/metrics", "evil.example", "", 421},
		{metrics, "/metrics", "", "cross-site", 403},
		{dashboard, "/v1/live", "", "cross-site", 403},
		{dashboard, "/v1/status", "", "same-site", 403},
		{dashboard, "/v1/status", "", "same-origin", 200},
		{dashboard, "/", "", "cross-site", 200}, // a link
	} {
		q, err := http.NewRequest("GET", "http://"+tt.addr+tt.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if tt.host != "" {
			q.Host = tt.host
		}
		if tt.site != "" {
			q.Header.Set("Sec-Fetch-Site", tt.site)
		}
		a, err := freshClient(t).Do(q)
		if err != nil {
			t.Fatal(err)
		}
		a.Body.Close()
		if a.StatusCode != tt.want {
			t.Errorf("%+v: %s", tt, a.Status)
		}
		if tt.want != 421 && a.Header.Get("Cross-Origin-Resource-Policy") != "same-origin" {
			t.Errorf("%+v: other sites may embed it", tt)
		}
	}
}
