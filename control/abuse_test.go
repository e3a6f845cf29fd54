package control

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control/internal/fakes"
	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// testTimeout is a short timeout of a server, and patience one that no client meets, however long the machine stalls.
const (
	testTimeout = 500 * time.Millisecond
	patience    = time.Minute
)

// patient returns a server that waits for its clients.
func patient(h *http.Server) {
	h.ReadTimeout, h.ReadHeaderTimeout, h.WriteTimeout, h.IdleTimeout = patience, patience, patience, patience
}

// impatientFor returns a server that waits for a header, for the rest of a request, and for another one.
func impatientFor(header, body, next time.Duration) func(*http.Server) {
	return func(h *http.Server) {
		h.ReadHeaderTimeout, h.ReadTimeout, h.WriteTimeout, h.IdleTimeout = header, body, patience, next
	}
}

func dial(t *testing.T, s *Server) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", s.socket.path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return c
}

// codes returns the status codes of all responses until the other side closes.
func codes(t *testing.T, c net.Conn, method string) (all []int) {
	t.Helper()
	for r := bufio.NewReader(c); ; {
		a, err := http.ReadResponse(r, &http.Request{Method: method})
		if err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("the connection is not closed")
			}
			return all
		}
		_, _ = io.Copy(io.Discard, a.Body)
		all = append(all, a.StatusCode)
	}
}

func TestServer_MisbehavingClients(t *testing.T) {
	daemon := &fakeDaemon{}
	o := options(t, fakes.Shaper(t, 1))
	o.Daemon, o.Proxy = daemon, recordingProxy{fakeDaemon: daemon}
	// Each has one short timeout: another one would end the request of a client that stalls before it sends.
	none := serveOn(t, o, -1, patient)
	header := serveOn(t, o, -1, impatientFor(testTimeout, patience, patience))
	body := serveOn(t, o, -1, impatientFor(patience, testTimeout, patience))
	next := serveOn(t, o, -1, impatientFor(patience, patience, testTimeout))
	const host = " HTTP/1.1\r\nHost: x\r\n"
	large := strings.Repeat("x", 10<<20)
	// byBytes sends the body byte by byte; without a body, everything.
	byBytes := func(c net.Conn, text string) {
		if head, body, _ := strings.Cut(text, "\r\n\r\n"); body != "" {
			if _, err := io.WriteString(c, head+"\r\n\r\n"); err != nil {
				return
			}
			text = body
		}
		for i := range text {
			if _, err := io.WriteString(c, text[i:i+1]); err != nil {
				return
			}
			time.Sleep(testTimeout / 5)
		}
	}
	for _, tt := range []struct {
		name, text string
		want       []int   // status codes until the connection is closed
		to         *Server // whose timeout, if it has one, closes the connection
		slowly     bool
		cut        bool // the incomplete request may get a 400
	}{
		{name: "silence", to: header},
		{name: "half a line", text: "GET /v1/sta", cut: true, to: header},
		{name: "half a header", text: "GET /v1/status" + host + "X: ", cut: true, to: header},
		{name: "half a body", text: "PUT /v1/bypass" + host + "Content-Length: 11\r\n\r\n{\"on", want: []int{400}, to: body},
		{name: "half an unread body", text: "GET /v1/status" + host + "Content-Length: 11\r\n\r\n{\"on", want: []int{200}, to: body},
		{name: "half a chunk", text: "PUT /v1/bypass" + host + "Transfer-Encoding: chunked\r\n\r\nb\r\n{\"on", want: []int{400}, to: body},
		{name: "a header by bytes", text: "GET /v1/status" + host + "X: a long value that takes its time\r\n\r\n", slowly: true, cut: true, to: header},
		{name: "a body by bytes", text: "PUT /v1/bypass" + host + "Content-Length: 80\r\n\r\n{\"on\": true                            }", want: []int{400}, slowly: true, to: body},
		{name: "one request, then silence", text: "GET /v1/status" + host + "\r\n", want: []int{200}, to: next},
		{name: "a large header", text: "GET /v1/status" + host + "X: " + large[:100<<10] + "\r\n\r\n", want: []int{431}, to: none},
		{name: "a large line", text: "GET /v1/" + large[:100<<10] + host + "\r\n", want: []int{431}, to: none},
		{name: "a large body", text: fmt.Sprintf("PUT /v1/bypass%sContent-Length: %d\r\n\r\n%s", host, len(large), large), want: []int{413}, to: none},
		{name: "a large body in chunks", text: fmt.Sprintf("PUT /v1/bypass%sTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", host, len(large), large), want: []int{413}, to: none},
		{name: "a large unread body", text: fmt.Sprintf("GET /v1/status%sContent-Length: %d\r\n\r\n%s", host, len(large), large), want: []int{200}, to: none},
		{name: "a body of enormous size", text: fmt.Sprintf("PUT /v1/bypass%sContent-Length: %d\r\n\r\n{", host, int64(math.MaxInt64)), want: []int{400}, to: body},
		{name: "a body larger than numbers", text: "PUT /v1/bypass" + host + "Content-Length: 99999999999999999999\r\n\r\n{", want: []int{400}, to: none},
		{name: "a body of two sizes", text: "PUT /v1/bypass" + host + "Content-Length: 11\r\nContent-Length: 12\r\n\r\n{\"on\":true} ", want: []int{400}, to: none},
		{name: "a body of fewer bytes than none", text: "PUT /v1/bypass" + host + "Content-Length: -1\r\n\r\n", want: []int{400}, to: none},
		{name: "garbage", text: "\x16\x03\x01\x00\xff\r\n\r\n", want: []int{400}, to: none},
		{name: "a request, garbage behind it", text: "GET /v1/status" + host + "\r\n\x00\xff \r\n\r\n", want: []int{200, 400}, to: none},
		{name: "no host", text: "GET /v1/status HTTP/1.1\r\n\r\n", want: []int{400}, to: none},
		{name: "HTTP/2", text: "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", want: []int{400}, to: none},
		{name: "wrong escapes", text: "GET /v1/limits/%zz" + host + "\r\n", want: []int{400}, to: none},
		{name: "deep JSON", text: fmt.Sprintf("PUT /v1/bypass%sContent-Length: 50000\r\n\r\n%s", host, strings.Repeat("[", 50000)), want: []int{400}, to: next},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c := dial(t, tt.to)
			go func() {
				if tt.slowly {
					byBytes(c, tt.text)
				} else {
					_, _ = io.WriteString(c, tt.text)
				}
			}()
			got := codes(t, c, "GET")
			if tt.cut && slices.Equal(got, []int{400}) {
				return
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("answers %v, want %v", got, tt.want)
			}
		})
	}
	t.Cleanup(func() {
		if len(daemon.calls) > 0 {
			t.Errorf("the daemon was asked to %v", daemon.calls)
		}
	})
}

// A request for an unknown endpoint or object gets a JSON error.
func TestServer_InvalidRequests(t *testing.T) {
	daemon := &fakeDaemon{}
	o := options(t, fakes.Shaper(t, 1))
	o.Daemon, o.Proxy = daemon, recordingProxy{fakeDaemon: daemon}
	client := testutil.UnixClient(t, serveOn(t, o, -1, nil).socket.path)
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	for _, tt := range []struct {
		method, target string
		code           int
		says           string
	}{
		{"GET", "/", 404, "no such endpoint: GET /"},
		{"GET", "/v1", 404, "no such endpoint: GET /v1"},
		{"GET", "/v2/status", 404, "no such endpoint: GET /v2/status"},
		{"GET", "/v1/status/", 404, "no such endpoint: GET /v1/status/"},
		{"POST", "/v1/status", 404, "no such endpoint: POST /v1/status"},
		{"OPTIONS", "/v1/status", 404, "no such endpoint: OPTIONS /v1/status"},
		{"TRACE", "/v1/status", 404, "no such endpoint: TRACE /v1/status"},
		{"GET", "/v1/reload", 404, "no such endpoint: GET /v1/reload"},
		{"DELETE", "/v1/limits/aa", 404, "no such endpoint: DELETE /v1/limits/aa"},
		{"DELETE", "/v1/limits/aa%2Foverride", 404, "no such endpoint: DELETE /v1/limits/aa/override"},
		{"GET", "/v1/limits/a%2Fb", 404, `unknown limit "a/b"`},
		{"GET", "/v1/limits/a%25b", 404, `unknown limit "a%b"`},
		{"GET", "/v1/limits/%00%1b", 404, `unknown limit "\x00\x1b"`},
		{"GET", "/v1/limits/%2e%2e", 404, ""},
		{"GET", "/v1/limits/..%2Fstatus", 404, ""},
		{"GET", "/v1/limits/%3Cscript%3E", 404, `unknown limit "<script>"`},
		{"PATCH", "/v1/limits/", 404, "no such endpoint: PATCH /v1/limits/"},
		{"DELETE", "/v1/connections/%31%2F", 400, `invalid connection ID "1/"`},
	} {
		q, err := http.NewRequest(tt.method, "http://shaperd"+tt.target, nil)
		if err != nil {
			t.Fatal(err)
		}
		a, err := client.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		var said api.Error
		if err := json.NewDecoder(a.Body).Decode(&said); err != nil && tt.says != "" {
			t.Errorf("%s %s: %v", tt.method, tt.target, err)
		}
		a.Body.Close()
		if a.StatusCode != tt.code || tt.says != "" && said.Message != tt.says {
			t.Errorf("%s %s: %d, %q", tt.method, tt.target, a.StatusCode, said.Message)
		}
	}
	if len(daemon.calls) > 0 {
		t.Errorf("the daemon was asked to %v", daemon.calls)
	}
}

// HEAD works wherever GET does, and does not start a stream.
func TestServer_Head(t *testing.T) {
	t.Parallel()
	s := serveOn(t, options(t, fakes.Shaper(t, 1)), -1, patient)
	c := dial(t, s)
	for _, path := range []string{"/v1/status", "/v1/openapi.json", "/v1/live", "/v1/history", "/debug/pprof/"} {
		last := ""
		if path == "/debug/pprof/" {
			last = "Connection: close\r\n"
		}
		if _, err := fmt.Fprintf(c, "HEAD %s HTTP/1.1\r\nHost: x\r\n%s\r\n", path, last); err != nil {
			t.Fatal(err)
		}
	}
	if got := codes(t, c, "HEAD"); !slices.Equal(got, []int{200, 200, 200, 200, 200}) {
		t.Errorf("answers %v", got)
	}
}

// A user that holds all connections it gets does not delay other users.
func TestConnLimiter_OneUserDoesNotBlockOthers(t *testing.T) {
	s := serveOn(t, options(t, fakes.Shaper(t, 2)), -1, nil)
	// answers returns how long a server takes to answer a request.
	answers := func(t *testing.T, s *Server) time.Duration {
		t.Helper()
		client := testutil.UnixClient(t, s.socket.path)
		client.Transport.(*http.Transport).DisableKeepAlives = true
		begun := time.Now()
		a, err := client.Get("http://shaperd/v1/status")
		if err != nil {
			t.Fatal(err)
		}
		a.Body.Close()
		if a.StatusCode != http.StatusOK {
			t.Fatal(a.Status)
		}
		return time.Since(begun)
	}
	t.Run("held", func(t *testing.T) {
		alone := serveOn(t, options(t, fakes.Shaper(t, 2)), -1, patient)
		start(t, unprivileged.command(t, "crowd", holdArgs{s.socket.path, 1000}))
		var within, reference []time.Duration
		for range 20 {
			within = append(within, answers(t, s))
			reference = append(reference, answers(t, alone))
		}
		slices.Sort(within)
		slices.Sort(reference)
		// Half of them may be late because the machine is busy.
		if within[len(within)/2] > 100*time.Millisecond+3*reference[len(reference)/2] {
			t.Errorf("answered within %v, and by a server without the other user within %v", within, reference)
		}
		testutil.WaitFor(t, "the user is at its maximum", func() bool { return s.connections() == maxUserConnections })
	})
	testutil.WaitFor(t, "all connections are closed", func() bool { return s.connections() == 0 })
}

// A stream that is not read is closed, and one that is read is not.
func TestLive_ClosesUnreadStream(t *testing.T) {
	t.Parallel()
	const timeout = 2 * time.Second // longer than a stall keeps the other stream from being read
	o := options(t, fakes.Shaper(t, shaper.MaxLimits))
	s := serveOn(t, o, -1, func(h *http.Server) { patient(h); h.WriteTimeout = timeout })
	bad := dial(t, s)
	begun := time.Now()
	if _, err := io.WriteString(bad, "GET /v1/live HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	good, err := testutil.UnixClient(t, s.socket.path).Get("http://shaperd/v1/live")
	if err != nil {
		t.Fatal(err)
	}
	defer good.Body.Close()
	var got atomic.Int64
	read := make(chan struct{})
	go func() {
		defer close(read)
		for r := bufio.NewReader(good.Body); ; {
			line, err := r.ReadString('\n')
			if err != nil {
				return
			}
			if strings.HasPrefix(line, "data: ") {
				got.Add(1)
			}
		}
	}()
	testutil.WaitFor(t, "both streams are open", func() bool { return s.connections() == 2 && got.Load() > 0 })
	testutil.WaitFor(t, "the unread stream is closed", func() bool {
		o.Monitor.Sample(time.Now())
		return s.connections() == 1
	})
	if took := time.Since(begun); took < timeout {
		t.Errorf("closed after only %v", took)
	}
	// The other one outlives the write timeout.
	was := int64(0)
	testutil.WaitFor(t, "the other stream is served", func() bool {
		o.Monitor.Sample(time.Now())
		if was == 0 || time.Since(begun) < 2*timeout {
			was = got.Load()
		}
		return was > 0 && got.Load() > was
	})
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	<-read
}

// slowDaemon is slow to reload, until the context ends.
type slowDaemon struct {
	fakeDaemon
	takes  time.Duration
	begins chan struct{}
	ended  atomic.Bool
}

func (d *slowDaemon) Reload(ctx context.Context) error {
	defer d.ended.Store(true)
	close(d.begins)
	select {
	case <-time.After(d.takes):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (d *slowDaemon) Bypass(ctx context.Context, _ bool, _ time.Duration) error { return d.Reload(ctx) }

// The timeouts for reading a request and writing a response do not bound its processing.
func TestServer_NoTimeoutForChanges(t *testing.T) {
	t.Parallel()
	const timeout = 2 * time.Second // longer than a stall while the request is read
	for _, tt := range []struct{ method, path, body string }{{"POST", "/v1/reload", ""}, {"PUT", "/v1/bypass", `{"on":true}`}} {
		t.Run(tt.path, func(t *testing.T) {
			t.Parallel()
			o := options(t, fakes.Shaper(t, 1))
			o.Daemon = &slowDaemon{takes: timeout + testTimeout, begins: make(chan struct{})}
			s := serveOn(t, o, -1, func(h *http.Server) { patient(h); h.ReadTimeout, h.WriteTimeout = timeout, timeout })
			q, err := http.NewRequest(tt.method, "http://shaperd"+tt.path, strings.NewReader(tt.body))
			if err != nil {
				t.Fatal(err)
			}
			a, err := testutil.UnixClient(t, s.socket.path).Do(q)
			if err != nil {
				t.Fatal(err)
			}
			a.Body.Close()
			if a.StatusCode != http.StatusOK {
				t.Errorf("%s: %s", tt.path, a.Status)
			}
		})
	}
}

// Close waits for running requests, which end when the server or their client does.
func TestServer_CloseWaitsForRequests(t *testing.T) {
	for name, end := range map[string]func(s *Server, c net.Conn){
		"the server ends": func(s *Server, _ net.Conn) { s.Close() },
		"the client leaves": func(s *Server, c net.Conn) {
			c.Close()
			testutil.WaitFor(t, "the connection is closed", func() bool { return s.connections() == 0 })
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := options(t, fakes.Shaper(t, 1))
			daemon := &slowDaemon{takes: time.Minute, begins: make(chan struct{})}
			o.Daemon = daemon
			s := serveOn(t, o, -1, nil)
			c := dial(t, s)
			if _, err := io.WriteString(c, "POST /v1/reload HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			<-daemon.begins
			end(s, c)
			if !daemon.ended.Load() {
				t.Error("the request still runs")
			}
			if n := s.connections(); n != 0 {
				t.Errorf("%d connections are open", n)
			}
		})
	}
}
