package conn

import (
	"encoding/json"
	"fmt"
)

// http429 answers a request of HTTP/1.1. RateLimit fields are those of draft-ietf-httpapi-ratelimit-headers-06: in later
// drafts they are one structured field, which few clients read. They are left out if no rate of new connections is used up.
func http429(n *notice) []byte {
	body, err := json.Marshal(struct {
		Limit  string `json:"limit,omitempty"`
		Reason string `json:"reason"`
		After  int64  `json:"retry_after_seconds,omitempty"`
	}{n.limit, n.reason, n.seconds()})
	if err != nil {
		panic(err) // strings and a number
	}
	body = append(body, '\n')
	b := n.appendRetryAfter([]byte("HTTP/1.1 429 Too Many Requests\r\n"))
	if n.rate.N > 0 && n.after > 0 {
		b = fmt.Appendf(b, "RateLimit-Limit: %d\r\nRateLimit-Remaining: 0\r\nRateLimit-Reset: %d\r\n", n.rate.N, n.seconds())
	}
	b = fmt.Appendf(b, "Content-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n", len(body))
	return append(b, body...)
}

// http503 answers a request of HTTP/1.1.
func http503(n *notice) []byte {
	b := n.appendRetryAfter([]byte("HTTP/1.1 503 Service Unavailable\r\n"))
	return append(b, "Content-Length: 0\r\nConnection: close\r\n\r\n"...)
}

func (n *notice) appendRetryAfter(b []byte) []byte {
	if n.after == 0 {
		return b
	}
	return fmt.Appendf(b, "Retry-After: %d\r\n", n.seconds())
}
