package conn

import (
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"shaperd/shaper"
)

// full returns a proxy whose one slot is taken.
func full(t *testing.T, limit shaper.Limit) *running {
	hold := make(chan struct{})
	limit.Name, limit.Connections = "cap", 1
	r := start(t, shaper.TCP, serveTCP(t, func(*net.TCPConn) { <-hold }), limit)
	t.Cleanup(func() { close(hold) })
	dial(t, r.addr()).Write([]byte("x"))
	waitFor(t, "a slot in use", func() bool { return r.shaper.Policy().State(0).InFlight.Load() == 1 })
	return r
}

func TestRefusedByClosing(t *testing.T) {
	r := full(t, shaper.Limit{Excess: shaper.ExcessClose})
	c := dial(t, r.addr())
	c.Write([]byte("a request"))
	if n, err := c.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("read %d bytes, %v, want the end", n, err)
	}
}

func TestRefusedByReply(t *testing.T) {
	const text = "HTTP/1.1 429 Too Many Requests\r\nRetry-After: {retry_after}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
	r := full(t, shaper.Limit{Excess: shaper.ExcessReply, Reply: text, MaxWait: 20 * time.Second})
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
		t.Errorf("50 clients are to come back at %d times", len(seen))
	}
}

// The reply to one that is refused for the pace of new connections says when those
// that wait have gone.
func TestReplyKnowsTheQueue(t *testing.T) {
	r := newGateRig(t, shaper.Limit{
		Name: "new", NewConnections: shaper.Frequency{N: 1, Per: 10 * time.Second}, MaxWait: time.Hour, MaxWaiting: 3,
		Excess: shaper.ExcessReply, Reply: "{retry_after}",
	})
	r.must("10.0.0.1").finish()
	for range 3 {
		r.visit("10.0.0.1", func(v *visitor) { v.finish() })
	}
	var got refusal
	v := r.visit("10.0.0.1", nil)
	if got = v.refusal; got.retry != 40*time.Second {
		t.Errorf("%v, want 40 s: three wait before", got.retry)
	}
	for range 20 {
		if s, err := strconv.Atoi(reply(got)); err != nil || s < 40 || s > 81 {
			t.Errorf("reply %d, err %v", s, err)
		}
	}
	r.sleep(time.Minute)
	r.idle()
}
