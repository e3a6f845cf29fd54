package conn

import (
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// newFullProxy returns a proxy whose only slot is in use.
func newFullProxy(t *testing.T, limit shaper.Limit) *proxyRig {
	hold := make(chan struct{})
	limit.Name, limit.MaxConnections = "cap", 1
	r := start(t, shaper.TCP, testutil.ServeTCP(t, func(*net.TCPConn) { <-hold }), limit)
	t.Cleanup(func() { close(hold) })
	dial(t, r.addr()).Write([]byte("x"))
	testutil.WaitFor(t, "a slot in use", func() bool { return r.shaper.Policy().State(0).InFlight.Load() == 1 })
	return r
}

func TestRefuse_Close(t *testing.T) {
	r := newFullProxy(t, shaper.Limit{RefuseWith: shaper.RefuseClose})
	c := dial(t, r.addr())
	c.Write([]byte("a request"))
	if n, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("read %d bytes, %v, want EOF", n, err)
	}
}

func TestRefuse_Reply(t *testing.T) {
	const text = "HTTP/1.1 429 Too Many Requests\r\nRetry-After: {retry_after}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
	r := newFullProxy(t, shaper.Limit{RefuseWith: shaper.RefuseReply, Reply: text, QueueTimeout: 20 * time.Second})
	seen := map[int]bool{}
	for range 50 {
		resp, err := http.Post("http://"+r.addr(), "text/plain", strings.NewReader(strings.Repeat("x", 20_000)))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		after, err := strconv.Atoi(resp.Header.Get("Retry-After"))
		if err != nil || resp.StatusCode != http.StatusTooManyRequests || after < 20 || after > 41 {
			t.Fatalf("%s, try again after %d s, err %v", resp.Status, after, err)
		}
		seen[after] = true
	}
	if len(seen) < 5 {
		t.Errorf("50 clients got only %d different Retry-After values", len(seen))
	}
}

func TestRefuse_HTTP429(t *testing.T) {
	r := newFullProxy(t, shaper.Limit{RefuseWith: shaper.RefuseReply, Reply: shaper.ReplyHTTP429, QueueTimeout: 20 * time.Second})
	resp, err := http.Post("http://"+r.addr(), "text/plain", strings.NewReader(strings.Repeat("x", 20_000)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"limit":"cap","reason":"waiting-full","retry_after_seconds":` + resp.Header.Get("Retry-After") + "}\n"
	if resp.StatusCode != http.StatusTooManyRequests || string(body) != want || resp.Header.Get("RateLimit-Limit") != "" {
		t.Errorf("%s, %v, %q, want %q, and no rate", resp.Status, resp.Header, body, want)
	}
}

// Retry-After of a connection refused by new_connections covers the queue before it.
func TestRefusal_RetryAfterCoversQueue(t *testing.T) {
	r := newAdmissionRig(t, shaper.Limit{
		Name: "new", NewConnections: shaper.Frequency{N: 1, Per: 10 * time.Second}, QueueTimeout: time.Hour, MaxQueue: 3,
		RefuseWith: shaper.RefuseReply, Reply: "{retry_after}",
	})
	r.must("10.0.0.1").finish()
	for range 3 {
		r.visit("10.0.0.1", func(v *visitor) { v.finish() })
	}
	for i := range 3 {
		n := r.visit("10.0.0.1", nil).refusal.notice()
		if got, want := string(n.fill()), strconv.Itoa(40+10*i); got != want {
			t.Errorf("%s s, want %s, for three waiters before it, and %d that come again", got, want, i)
		}
	}
	r.sleep(time.Minute)
	r.idle()
}
