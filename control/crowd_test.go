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

	"shaperd/test/lab"
)

// Whoever keeps thousands of requests half open blinds nobody: metrics are scraped, and the
// page is seen, as soon as from a server under the same flood that has no bound.
func TestHalfOpenRequestsBlindNobody(t *testing.T) {
	for name, begin := range map[string]func(string, *Options) (*Endpoint, error){"/metrics": ServeMetrics, "/v1/status": ServePage} {
		t.Run(name, func(t *testing.T) {
			addr, err := lab.FreeAddr("tcp")
			if err != nil {
				t.Fatal(err)
			}
			e, err := begin(addr, options(t, busy(t, 2)))
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
				start(t, somebody.command(t, "flood", halfOpen{addr, 3 * maxOfPort}))
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

// dialFar connects to where requests are on their way for longer than a flood takes.
func dialFar(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, network, addr)
	time.Sleep(100 * time.Millisecond)
	return c, err
}

// Who asks and does not read makes room as well, once an answer should have been read.
func TestBusyConnectionsMakeRoom(t *testing.T) {
	c := &crowd{log: noLog, groups: map[uint32]*group{}}
	var all []*guest
	for range 4 {
		ours, theirs := net.Pipe()
		defer theirs.Close()
		g, room := c.admit(ours, anybody, 4)
		if !room {
			t.Fatal("there is no room")
		}
		g.changed(http.StateActive)
		all = append(all, g)
	}
	ours, theirs := net.Pipe()
	defer theirs.Close()
	last, room := c.admit(ours, anybody, 4)
	if room {
		t.Error("one that was just asked for something made room")
	}
	last.Close()
	for _, g := range all {
		g.since = g.since.Add(-busyTime)
	}
	last, room = c.admit(ours, anybody, 4)
	if !room || all[0].in != nil || all[1].in == nil {
		t.Error("the oldest did not make room")
	}
	last.Close()
	for _, g := range all {
		g.Close()
	}
	if n := c.size(); n != 0 || len(c.groups) != 0 {
		t.Errorf("%d are left of %d users", n, len(c.groups))
	}
}

// Root is never locked out of the kill switch, whatever root has open.
func TestRootIsNotLockedOut(t *testing.T) {
	daemon := &fakeDaemon{}
	o := options(t, busy(t, 2))
	o.Daemon = daemon
	s := serveOn(t, o, -1, nil)
	c := NewClient(s.socket.path)
	for range maxOfUser + 1 { // streams
		q, err := http.NewRequestWithContext(t.Context(), "GET", "http://shaperd/v1/live", nil)
		if err != nil {
			t.Fatal(err)
		}
		a, err := clientOf(t, s).Do(q)
		if err != nil {
			t.Fatal(err)
		}
		defer a.Body.Close()
		if a.StatusCode != http.StatusOK {
			t.Error(a.Status)
		}
	}
	for range 2 * maxOfAdmin { // and silence
		dial(t, s)
	}
	begun := time.Now()
	if _, err := c.Bypass(t.Context(), SetBypass{On: true}); err != nil {
		t.Errorf("bypass: %v", err)
	}
	if took := time.Since(begun); took > 2*time.Second {
		t.Errorf("bypass took %v", took)
	}
	// Scripts block many at once.
	var all sync.WaitGroup
	for i := range 120 {
		all.Go(func() {
			if err := c.Block(context.Background(), SetBlock{Prefix: fmt.Sprintf("192.0.2.%d", i)}); err != nil {
				t.Errorf("block: %v", err)
			}
		})
	}
	all.Wait()
}

// Who has too many connections that were just used is told so, after having asked again for a
// while; and is served when one of them has been in use for long, whoever forgot it there.
func TestCrowdIsTold(t *testing.T) {
	t.Parallel()
	s := serveOn(t, options(t, busy(t, 2)), -1, nil)
	used := func(since time.Time) {
		s.socket.crowd.mu.Lock()
		defer s.socket.crowd.mu.Unlock()
		for e := s.socket.crowd.groups[0].busy.Front(); e != nil; e = e.Next() {
			e.Value.(*guest).since = since
		}
	}
	for range maxOfAdmin {
		a, err := clientOf(t, s).Get("http://shaperd/v1/live")
		if err != nil {
			t.Fatal(err)
		}
		defer a.Body.Close()
	}
	used(time.Now().Add(time.Hour))
	c := NewClient(s.socket.path)
	begun := time.Now()
	_, err := c.Status(t.Context())
	var said *APIError
	if !errors.As(err, &said) || said.Code != http.StatusServiceUnavailable || !strings.Contains(said.Message, "too many connections of user 0 (256)") {
		t.Errorf("one too many: %v", err)
	}
	if took := time.Since(begun); took < retryTime {
		t.Errorf("it gave up after %v", took)
	}
	time.AfterFunc(retryTime/4, func() { used(time.Now().Add(-busyTime)) })
	if _, err := c.Status(t.Context()); err != nil {
		t.Errorf("with streams that nobody ends: %v", err)
	}
}

// Who reads metrics without a port asks the socket.
func TestMetricsOnTheSocket(t *testing.T) {
	s := serveOn(t, options(t, busy(t, 1)), -1, nil)
	a, err := clientOf(t, s).Get("http://shaperd/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close()
	text, err := io.ReadAll(a.Body)
	if err != nil || a.StatusCode != http.StatusOK || !strings.Contains(string(text), "\nshaperd_build_info{") {
		t.Errorf("%s, %v:\n%.200s", a.Status, err, text)
	}
	for _, code := range somebody.ask(t, []request{{s.socket.path, "GET", "/metrics", ""}}) {
		if code != http.StatusForbidden {
			t.Errorf("somebody without a role: %d", code)
		}
	}
}

// Streams of the page are no streams of the socket.
func TestStreamsOfThePageAreNotThoseOfTheSocket(t *testing.T) {
	o := options(t, busy(t, 1))
	_, addr := servePage(t, o)
	s := serveOn(t, o, -1, nil)
	client := freshClient(t)
	for range maxStreams {
		stream(t, client, addr)
	}
	if a := stream(t, client, addr); a.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("the page: %s", a.Status)
	}
	a, err := clientOf(t, s).Get("http://shaperd/v1/live")
	if err != nil {
		t.Fatal(err)
	}
	a.Body.Close()
	if a.StatusCode != http.StatusOK {
		t.Errorf("the socket: %s", a.Status)
	}
}

// A browser that shows a page of another site gets nothing, nor by a name that was made to
// point here.
func TestOtherSitesGetNothing(t *testing.T) {
	o := options(t, busy(t, 1))
	_, page := servePage(t, o)
	metrics, err := lab.FreeAddr("tcp")
	if err != nil {
		t.Fatal(err)
	}
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
		{page, "/v1/live", "", "cross-site", 403},
		{page, "/v1/status", "", "same-site", 403},
		{page, "/v1/status", "", "same-origin", 200},
		{page, "/", "", "cross-site", 200}, // a link
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
			t.Errorf("%+v: others may embed it", tt)
		}
	}
}
