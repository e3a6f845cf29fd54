package testutil

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"
)

// Get returns the response to a request for a path of the server at an address. It connects from
// the calling thread, which may be in a network namespace of its own.
func Get(addr, path string) (code int, body string, err error) {
	c, err := net.DialTimeout("tcp", addr, 5*time.Second)
	if err != nil {
		return 0, "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return 0, "", err
	}
	if _, err := io.WriteString(c, "GET "+path+" HTTP/1.0\r\nHost: "+addr+"\r\n\r\n"); err != nil {
		return 0, "", err
	}
	answer, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0, "", err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return answer.StatusCode, string(text), err
}

// Scrape returns the metrics that are served at an address.
func Scrape(addr string) (string, error) {
	code, text, err := Get(addr, "/metrics")
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("GET /metrics: %d", code)
	}
	return text, err
}

// MustScrape is like [Scrape], and fails the test on an error.
func MustScrape(t testing.TB, addr string) string {
	t.Helper()
	text, err := Scrape(addr)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// UnixClient returns a client of the server at a socket. It ignores the host of URLs.
func UnixClient(t testing.TB, path string) *http.Client {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}
