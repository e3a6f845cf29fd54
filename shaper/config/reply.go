package config

import (
	"fmt"
	"regexp"

	"shaperd.dev/shaperd/shaper"
)

// replies has the predefined replies by name.
var replies = map[string]string{
	"http-429": "HTTP/1.1 429 Too Many Requests\r\nRetry-After: " + shaper.RetryAfter +
		"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
	"http-503": "HTTP/1.1 503 Service Unavailable\r\nRetry-After: " + shaper.RetryAfter +
		"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
}

// maxReply is the maximum length of a reply, which has to fit the socket's buffer.
const maxReply = 4096

var placeholder = regexp.MustCompile(`\{[a-z_]+\}`)

// parseReply parses a reply, or the name of a predefined one.
func parseReply(s string) (string, error) {
	if text, ok := replies[s]; ok {
		return text, nil
	}
	if s == "" || len(s) > maxReply {
		return "", fmt.Errorf("must be 1 to %d bytes, or \"http-429\" or \"http-503\", not %d bytes", maxReply, len(s))
	}
	for _, p := range placeholder.FindAllString(s, -1) {
		if p != shaper.RetryAfter {
			return "", fmt.Errorf("unknown placeholder %s: must be %s", quote(p), shaper.RetryAfter)
		}
	}
	return s, nil
}
