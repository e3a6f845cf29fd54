package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// serveSocket serves h on a new socket.
func serveSocket(t *testing.T, h http.HandlerFunc) (path string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "shaperd") // a socket's path is 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path = filepath.Join(dir, "control.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(h)
	s.Listener.Close()
	s.Listener = l
	s.Start()
	t.Cleanup(s.Close)
	return path
}

func TestClientRequests(t *testing.T) {
	var got string
	answer := "[]"
	c := NewClient(serveSocket(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got = strings.TrimSpace(fmt.Sprintf("%s %s %s", r.Method, r.RequestURI, body))
		io.WriteString(w, answer)
	}))
	source := netip.MustParseAddr("2001:db8::7")
	for _, tt := range []struct {
		want, answer string
		ask          func(context.Context) error
	}{
		{"GET /v1/status?", "{}", func(ctx context.Context) error { _, err := c.Status(ctx); return err }},
		{"GET /v1/limits?", "[]", func(ctx context.Context) error { _, err := c.Limits(ctx); return err }},
		{"GET /v1/limits/a%2Fb%3F?", "{}", func(ctx context.Context) error { _, err := c.Limit(ctx, "a/b?"); return err }},
		{"GET /v1/limits/a/keys?sort=delayed&top=5", "[]", func(ctx context.Context) error { _, err := c.Keys(ctx, "a", "delayed", 5); return err }},
		{"GET /v1/talkers?by=asn&sort=rate&top=1", "[]", func(ctx context.Context) error { _, err := c.Talkers(ctx, "asn", "rate", 1); return err }},
		{"GET /v1/connections?", "{}", func(ctx context.Context) error { _, err := c.Connections(ctx, ConnectionQuery{}); return err }},
		{"GET /v1/connections?limit=l&listener=db&sort=age&source=192.0.2.0%2F24&top=3", "{}", func(ctx context.Context) error {
			_, err := c.Connections(ctx, ConnectionQuery{Listener: "db", Limit: "l", Source: "192.0.2.0/24", Sort: "age", Top: 3})
			return err
		}},
		{"DELETE /v1/connections/7?", "", func(ctx context.Context) error { return c.Kill(ctx, 7) }},
		{"GET /v1/downstreams?", "[]", func(ctx context.Context) error { _, err := c.Downstreams(ctx); return err }},
		{`PATCH /v1/downstreams? {"listener":"db","downstream":"10.0.0.5:1","drained":true}`, "", func(ctx context.Context) error {
			return c.SetDownstream(ctx, SetDownstream{Listener: "db", Downstream: "10.0.0.5:1", Drained: true})
		}},
		{"GET /v1/explain?source=2001%3Adb8%3A%3A7&to=tcp%2F1", "{}", func(ctx context.Context) error {
			_, err := c.Explain(ctx, ExplainQuery{Source: source, To: "tcp/1"})
			return err
		}},
		{"GET /v1/explain?attach=up&destination=2001%3Adb8%3A%3A7&source=2001%3Adb8%3A%3A7&to=icmp", "{}", func(ctx context.Context) error {
			_, err := c.Explain(ctx, ExplainQuery{Source: source, To: "icmp", Attach: "up", Destination: source})
			return err
		}},
		{`PATCH /v1/limits/a? {"set":{"rate":"1MB/s"},"duration_seconds":60}`, "{}", func(ctx context.Context) error {
			_, err := c.SetLimit(ctx, "a", SetLimit{Set: map[string]string{"rate": "1MB/s"}, Duration: 60})
			return err
		}},
		{"DELETE /v1/limits/a/override?", "{}", func(ctx context.Context) error { _, err := c.UnsetLimit(ctx, "a", ""); return err }},
		{"GET /v1/blocks?", "[]", func(ctx context.Context) error { _, err := c.Blocks(ctx); return err }},
		{`POST /v1/blocks? {"prefix":"192.0.2.0/24","duration_seconds":1.5}`, "", func(ctx context.Context) error {
			return c.Block(ctx, SetBlock{Prefix: "192.0.2.0/24", Duration: 1.5})
		}},
		{"DELETE /v1/blocks?prefix=192.0.2.0%2F24", "", func(ctx context.Context) error { return c.Unblock(ctx, "192.0.2.0/24") }},
		{`PUT /v1/bypass? {"on":true}`, "{}", func(ctx context.Context) error { _, err := c.Bypass(ctx, SetBypass{On: true}); return err }},
		{"POST /v1/reload?", `{"ok":true}`, func(ctx context.Context) error { _, err := c.Reload(ctx); return err }},
		{"POST /v1/stop?", "{}", func(ctx context.Context) error { _, err := c.Stop(ctx); return err }},
		{`PATCH /v1/blocks? {"block":["192.0.2.0/24"],"unblock":["::1"]}`, "{}", func(ctx context.Context) error {
			_, err := c.ChangeBlocks(ctx, ChangeBlocks{Block: []string{"192.0.2.0/24"}, Unblock: []string{"::1"}})
			return err
		}},
		{"GET /v1/penalties?", "[]", func(ctx context.Context) error { _, err := c.Penalties(ctx); return err }},
		{"DELETE /v1/penalties?limit=l&source=%3A%3A1", "[]", func(ctx context.Context) error { _, err := c.EndPenalty(ctx, "::1", "l"); return err }},
		{"GET /v1/events?kind=penalty&since=9", "[]", func(ctx context.Context) error { _, err := c.Events(ctx, 9, "penalty"); return err }},
	} {
		t.Run(tt.want, func(t *testing.T) {
			answer = tt.answer
			if err := tt.ask(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got != tt.want {
				t.Errorf("asked %q", got)
			}
		})
	}
}

func TestClient_DecodesResponses(t *testing.T) {
	var code int
	var body string
	c := NewClient(serveSocket(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(code)
		io.WriteString(w, body)
	}))
	for _, tt := range []struct {
		code       int
		body, want string
	}{
		{404, `{"error":"unknown limit \"x\""}`, `unknown limit "x"`},
		{403, `{"error":"reading only"}`, "reading only"},
		{422, `{"error":"a\u001b[31m\nb"}`, `"a\x1b[31m"` + "\nb"},
		{500, "<html>", "the daemon answered 500 Internal Server Error"},
		{503, "", "the daemon answered 503 Service Unavailable"},
	} {
		code, body = tt.code, tt.body
		_, err := c.Status(t.Context())
		var said *APIError
		if !errors.As(err, &said) || said.Code != tt.code || err.Error() != tt.want {
			t.Errorf("%d %s: %v", tt.code, tt.body, err)
		}
	}

	code, body = 422, `{"ok":false,"errors":["shaperd.toml:3:1: no"]}`
	if r, err := c.Reload(t.Context()); err != nil || r.OK || !cmp.Equal(r.Errors, []string{"shaperd.toml:3:1: no"}) {
		t.Errorf("a wrong file: %+v, %v", r, err)
	}
	body = `{"error":"no"}`
	if _, err := c.Reload(t.Context()); err == nil || err.Error() != "no" {
		t.Errorf("another 422: %v", err)
	}
	code, body = 200, "{"
	if _, err := c.Status(t.Context()); err == nil || !strings.Contains(err.Error(), "decode the response of ") {
		t.Errorf("half an answer: %v", err)
	}
	body = strings.Repeat(" ", maxResponse+1)
	if _, err := c.Status(t.Context()); err == nil || !strings.Contains(err.Error(), "larger than 64 MiB") {
		t.Errorf("too large an answer: %v", err)
	}
}

func TestClient_NoDaemon(t *testing.T) {
	unserved := serveSocket(t, nil)
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(filepath.Dir(unserved), "stale.sock")})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	stale.Close()
	silent := serveSocket(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	aborting := serveSocket(t, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	for _, tt := range []struct {
		name, path string
		timeout    time.Duration
		want       string
	}{
		{"no socket", unserved + "x", time.Minute, "the socket does not exist"},
		{"nowhere", "", time.Minute, "no control socket configured"},
		{"stale socket", stale.Addr().String(), time.Minute, "nothing is listening"},
		{"no answer", silent, 20 * time.Millisecond, "within 20ms"},
		{"closed", aborting, time.Minute, "it closed the connection"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := NewClient(tt.path).call(t.Context(), tt.timeout, "GET", "/status", nil, nil, nil)
			if !errors.Is(err, ErrNoDaemon) || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), tt.path) {
				t.Errorf("err = %v", err)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := NewClient(silent).Status(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
	err = NewClient("/s").connectError(&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.EACCES)}, 0)
	if errors.Is(err, ErrNoDaemon) || !strings.Contains(err.Error(), "root or membership in the group shaperd") {
		t.Errorf("without permission: %v", err)
	}
}
