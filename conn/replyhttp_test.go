package conn

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/shaper"
)

func TestReply_HTTP(t *testing.T) {
	for _, tt := range []struct {
		name   string
		reply  string
		change func(*notice)
		status int
		header http.Header
		body   string
	}{
		{
			"rate", "http-429", func(n *notice) { n.rate = shaper.Frequency{N: 10, Per: time.Minute} }, 429,
			http.Header{"Retry-After": {"12"}, "Ratelimit-Limit": {"10"}, "Ratelimit-Remaining": {"0"}, "Ratelimit-Reset": {"12"}, "Content-Type": {"application/json"}},
			`{"limit":"cap","reason":"wait-timeout","retry_after_seconds":12}` + "\n",
		},
		{
			"no rate", "http-429", func(*notice) {}, 429,
			http.Header{"Retry-After": {"12"}, "Content-Type": {"application/json"}},
			`{"limit":"cap","reason":"wait-timeout","retry_after_seconds":12}` + "\n",
		},
		{
			"block", "http-429", func(n *notice) { n.after, n.reason = 0, "blocked" }, 429,
			http.Header{"Content-Type": {"application/json"}},
			`{"limit":"cap","reason":"blocked"}` + "\n",
		},
		{
			"breaker", "http-429", func(n *notice) { n.limit, n.reason = "", "breaker-open" }, 429,
			http.Header{"Retry-After": {"12"}, "Content-Type": {"application/json"}},
			`{"reason":"breaker-open","retry_after_seconds":12}` + "\n",
		},
		{"503", "http-503", func(*notice) {}, 503, http.Header{"Retry-After": {"12"}}, ""},
		{"503 of a block", "http-503", func(n *notice) { n.after = 0 }, 503, http.Header{}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newConversation(tt.reply, false)
			tt.change(&c.notice)
			said, _ := c.hear("GET / HTTP/1.1\r\n")
			resp, err := http.ReadResponse(bufio.NewReader(strings.NewReader(said)), nil)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			if err != nil || string(body) != tt.body || int64(len(body)) != resp.ContentLength || resp.StatusCode != tt.status || !resp.Close {
				t.Errorf("%+v, body %q, %v", resp, body, err)
			}
			if len(body) > 0 && !json.Valid(body) {
				t.Error("the body is no JSON")
			}
			resp.Header.Del("Content-Length")
			if diff := cmp.Diff(tt.header, resp.Header); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// What RateLimit fields tell is true: they are there if the rate is used up, and not if only the slots are.
func TestReply_RateLimitFields(t *testing.T) {
	for _, tt := range []struct {
		name  string
		limit shaper.Limit
		want  string
	}{
		{"rate", shaper.Limit{NewConnections: shaper.Frequency{N: 1, Per: time.Minute}}, "1"},
		{"slots", shaper.Limit{MaxConnections: 1}, ""},
		{"slots, and a rate that is used up", shaper.Limit{MaxConnections: 1, NewConnections: shaper.Frequency{N: 1, Per: time.Minute}}, "1"},
		{"slots, and a rate that is not", shaper.Limit{MaxConnections: 1, NewConnections: shaper.Frequency{N: 5, Per: time.Minute}, BurstConnections: 5}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.limit.Name, tt.limit.RefuseWith, tt.limit.Reply = "l", shaper.RefuseReply, "http-429"
			r := newAdmissionRig(t, tt.limit)
			r.must("10.0.0.1")
			n := r.visit("10.0.0.2", nil).refusal.notice()
			resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(http429(&n))), nil)
			if err != nil {
				t.Fatal(err)
			}
			if got := resp.Header.Get("RateLimit-Limit"); got != tt.want {
				t.Errorf("%v", resp.Header)
			}
		})
	}
}
