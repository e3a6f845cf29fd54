package control

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/control/internal/fakes"
	"shaperd.dev/shaperd/internal/testutil"
)

// serveDashboard serves the dashboard of o, and returns its address.
func serveDashboard(t *testing.T, o *Options) (*Endpoint, string) {
	t.Helper()
	addr := testutil.FreeAddr(t, "tcp")
	e, err := ServeDashboard(addr, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e, addr
}

// freshClient returns a client with its own connections.
func freshClient(t *testing.T) *http.Client {
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// The port of the dashboard serves the endpoints of readers, and none that change anything.
func TestServeDashboard_IsReadOnly(t *testing.T) {
	daemon := &fakeDaemon{}
	o := options(t, fakes.Shaper(t, 2))
	o.Daemon, o.Proxy = daemon, recordingProxy{fakeDaemon: daemon}
	_, addr := serveDashboard(t, o)
	client := freshClient(t)
	ask := func(method, target, body string) int {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel() // or a stream would not end
		q, err := http.NewRequestWithContext(ctx, method, "http://"+addr+target, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		a, err := client.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		a.Body.Close()
		return a.StatusCode
	}
	for _, r := range (&handlers{}).routes() {
		method, path, _ := strings.Cut(r.pattern, " ")
		for _, a := range endpoints[r.pattern].asks {
			target := a.target(path)
			code := ask(method, target, a.body)
			switch {
			case r.role == Reader && a.err == nil && code != a.code:
				t.Errorf("%s %s: %d, want %d", method, target, code, a.code)
			case r.role == Admin && code != http.StatusNotFound && code != http.StatusMethodNotAllowed:
				t.Errorf("%s %s: %d, want 404 or 405", method, target, code)
			}
			for _, method := range []string{"POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"} {
				if code := ask(method, target, a.body); code != http.StatusNotFound && code != http.StatusMethodNotAllowed {
					t.Errorf("%s %s: %d, want 404 or 405", method, target, code)
				}
			}
		}
	}
	for _, asked := range daemon.calls {
		if asked != "explain" && asked != "revisions" {
			t.Errorf("the daemon was asked to %s", asked)
		}
	}
}

func TestServeDashboard_ChecksHost(t *testing.T) {
	_, addr := serveDashboard(t, options(t, fakes.Shaper(t, 1)))
	_, port, _ := net.SplitHostPort(addr)
	client := freshClient(t)
	for host, want := range map[string]int{
		addr: 200, "localhost:" + port: 200, "[::1]:" + port: 200, "evil.example:" + port: 421, "evil.example": 421, "localhost.evil.example": 421,
	} {
		for _, path := range []string{"/", "/v1/status", "/v1/live", "/v1/openapi.json"} {
			ctx, cancel := context.WithCancel(t.Context())
			q, err := http.NewRequestWithContext(ctx, "GET", "http://"+addr+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			q.Host = host
			a, err := client.Do(q)
			if err != nil {
				t.Fatal(err)
			}
			cancel()
			a.Body.Close()
			if a.StatusCode != want {
				t.Errorf("%s of %s: %d, want %d", path, host, a.StatusCode, want)
			}
		}
	}
}

// Live events contain only new log events, and resume after the last ID of a client.
func TestServeDashboard_Streams(t *testing.T) {
	o := options(t, fakes.Shaper(t, 1))
	_, addr := serveDashboard(t, o)
	client := freshClient(t)
	open := func(last string) *bufio.Reader {
		t.Helper()
		q, err := http.NewRequest("GET", "http://"+addr+"/v1/live", nil)
		if err != nil {
			t.Fatal(err)
		}
		if last != "" {
			q.Header.Set("Last-Event-ID", last)
		}
		a, err := client.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { a.Body.Close() })
		if a.StatusCode != http.StatusOK || a.Header.Get("Content-Type") != "text/event-stream" {
			t.Fatalf("%s, %v", a.Status, a.Header)
		}
		return bufio.NewReader(a.Body)
	}
	// next returns the ID of the next live event, and its log events.
	next := func(r *bufio.Reader) string {
		t.Helper()
		said := ""
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			if line == "\n" {
				return said
			}
			kind, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
			switch kind {
			case "data":
				for _, what := range []string{"one", "two", "three"} {
					if strings.Contains(value, `"message":"`+what+`"`) {
						said += " " + what
					}
				}
			default:
				said += " " + kind + "=" + value
			}
		}
	}
	// fresh is next without live events that have no log events: the monitor samples on its own, too.
	fresh := func(r *bufio.Reader) (said string) {
		for said = next(r); said == " id=2 event=live"; said = next(r) {
		}
		return said
	}
	log := slog.New(o.Events.Handler(slog.DiscardHandler)).Info
	log("one")
	log("two")
	r := open("")
	if got := next(r); got != " id=2 event=live one two" {
		t.Errorf("at first:%s", got)
	}
	log("three")
	o.Monitor.Sample(time.Now())
	if got := fresh(r); got != " id=3 event=live three" {
		t.Errorf("then:%s", got)
	}
	o.Monitor.Sample(time.Now())
	if got := next(r); got != " id=3 event=live" {
		t.Errorf("without news:%s", got)
	}
	if got := next(open("2")); got != " id=3 event=live three" {
		t.Errorf("again:%s", got)
	}
	if got := next(open("1000")); got != " id=3 event=live one two three" {
		t.Errorf("again, after an earlier daemon:%s", got)
	}
	q, err := http.NewRequest("GET", "http://"+addr+"/v1/live", nil)
	if err != nil {
		t.Fatal(err)
	}
	q.Header.Set("Last-Event-ID", "x")
	a, err := client.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	a.Body.Close()
	if a.StatusCode != http.StatusBadRequest {
		t.Errorf("after no event: %s", a.Status)
	}
}

// The number of streams is limited, and a stream that ends admits another.
func TestServeDashboard_LimitsStreams(t *testing.T) {
	_, addr := serveDashboard(t, options(t, fakes.Shaper(t, 1)))
	client := freshClient(t)
	first := stream(t, client, addr)
	for i := range maxStreams {
		want := http.StatusOK
		if i == maxStreams-1 {
			want = http.StatusServiceUnavailable
		}
		if a := stream(t, client, addr); a.StatusCode != want {
			t.Errorf("stream %d: %s, want %d", i+2, a.Status, want)
		}
	}
	first.Body.Close()
	testutil.WaitFor(t, "a stream is admitted", func() bool { return stream(t, client, addr).StatusCode == http.StatusOK })
}

// Streams end with the server, and with the monitor.
func TestServeDashboard_EndsStreams(t *testing.T) {
	for name, end := range map[string]func(*Endpoint, *Options){
		"server":  func(e *Endpoint, _ *Options) { e.Close() },
		"monitor": func(_ *Endpoint, o *Options) { o.Monitor.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			o := options(t, fakes.Shaper(t, 1))
			e, addr := serveDashboard(t, o)
			a := stream(t, freshClient(t), addr)
			firstEvent(t, a.Body)
			begun := time.Now()
			end(e, o)
			_, _ = io.Copy(io.Discard, a.Body)
			if took := time.Since(begun); took > 5*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
}

// stream starts a live stream.
func stream(t *testing.T, client *http.Client, addr string) *http.Response {
	t.Helper()
	a, err := client.Get("http://" + addr + "/v1/live")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Body.Close() })
	return a
}

// A port limits its connections too: at the maximum the oldest idle one is closed.
func TestServeDashboard_LimitsConnections(t *testing.T) {
	t.Parallel()
	_, addr := serveDashboard(t, options(t, fakes.Shaper(t, 1)))
	var held []net.Conn
	defer func() {
		for _, c := range held {
			c.Close()
		}
	}()
	for range maxPortConnections + 1 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, c)
	}
	last := held[maxPortConnections]
	if _, err := fmt.Fprintf(last, "GET /v1/downstreams HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", addr); err != nil {
		t.Fatal(err)
	}
	if err := held[0].SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := held[0].Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the oldest one: %v, want its end", err)
	}
	if err := last.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	a, err := http.ReadResponse(bufio.NewReader(last), nil)
	if err != nil {
		t.Fatal(err)
	}
	a.Body.Close()
}
