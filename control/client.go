package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// DefaultSocket is where a daemon listens, and a client looks for it, unless told otherwise.
const DefaultSocket = "/run/shaperd/control.sock"

// ErrNoDaemon says that nobody answers at a control socket: there is none, nobody
// listens on it, or who does has no answer in time.
var ErrNoDaemon = errors.New("no daemon answers")

const (
	answerTimeout = 10 * time.Second
	reloadTimeout = 60 * time.Second // tables of ASNs may be large, and the host busy
	maxAnswer     = 64 << 20         // bytes
)

// APIError is an answer of the daemon that is no success.
type APIError struct {
	Code    int    // of HTTP
	Message string // of the daemon

	body  []byte
	again bool // it was not even looked at: ask again
}

func (e *APIError) Error() string { return e.Message }

// Client asks the daemon that listens on a control socket. Its methods may be used
// concurrently. Their errors are an *APIError, or wrap [ErrNoDaemon] where there was no
// answer.
type Client struct {
	path string
	http *http.Client
}

// NewClient returns a client of the socket at path. It connects when it is used.
func NewClient(path string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}
	// A connection a request: nothing is left to close, and none outlives a restart of the daemon.
	return &Client{path: path, http: &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}}
}

// Keep has c ask again on the same connection, which halves what asking costs the daemon,
// until the connection is given back.
func (c *Client) Keep() (giveBack func()) {
	t := c.http.Transport.(*http.Transport)
	t.DisableKeepAlives = false
	return t.CloseIdleConnections
}

// Peer returns the user whose daemon listens on the socket, by what the kernel says.
func (c *Client) Peer(ctx context.Context) (uid uint32, err error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", c.path)
	if err != nil {
		return 0, c.unanswered(err, answerTimeout)
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	control := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(control, err); err != nil {
		return 0, fmt.Errorf("ask who listens at %s: %w", c.path, err)
	}
	return cred.Uid, nil
}

// Status is how the daemon is doing.
func (c *Client) Status(ctx context.Context) (Status, error) {
	return get[Status](ctx, c, "/status", nil)
}

// Limits is all limits.
func (c *Client) Limits(ctx context.Context) ([]Limit, error) {
	return get[[]Limit](ctx, c, "/limits", nil)
}

// Limit is one limit.
func (c *Client) Limit(ctx context.Context, name string) (Limit, error) {
	return get[Limit](ctx, c, limitPath(name), nil)
}

// Keys is the heaviest buckets of a limit, at most top, by "delayed", "dropped" or "rate".
func (c *Client) Keys(ctx context.Context, limit, sort string, top int) ([]Key, error) {
	return get[[]Key](ctx, c, limitPath(limit)+"/keys", query("sort", sort, "top", strconv.Itoa(top)))
}

// Who is the heaviest by "source", "prefix" or "asn", at most top, sorted as Keys is.
func (c *Client) Who(ctx context.Context, by, sort string, top int) ([]Who, error) {
	return get[[]Who](ctx, c, "/who", query("by", by, "sort", sort, "top", strconv.Itoa(top)))
}

// ConnectionQuery selects connections; what is empty selects all.
type ConnectionQuery struct {
	Listener, Limit string
	Source          string // a prefix, or an address
	Sort            string // "bytes", "age", "waited" or "idle"
	Top             int    // 0 is as many as the daemon gives
}

// Connections is TCP connections and UDP flows.
func (c *Client) Connections(ctx context.Context, q ConnectionQuery) (Connections, error) {
	top := ""
	if q.Top > 0 {
		top = strconv.Itoa(q.Top)
	}
	return get[Connections](ctx, c, "/connections",
		query("listener", q.Listener, "limit", q.Limit, "source", q.Source, "sort", q.Sort, "top", top))
}

// Kill ends a connection.
func (c *Client) Kill(ctx context.Context, id uint64) error {
	return c.call(ctx, answerTimeout, http.MethodDelete, "/connections/"+strconv.FormatUint(id, 10), nil, nil, nil)
}

// Downstreams is the downstreams of all listeners.
func (c *Client) Downstreams(ctx context.Context) ([]DownstreamStatus, error) {
	return get[[]DownstreamStatus](ctx, c, "/downstreams", nil)
}

// SetDownstream takes a downstream out of use, or into it again.
func (c *Client) SetDownstream(ctx context.Context, s SetDownstream) error {
	return c.call(ctx, answerTimeout, http.MethodPatch, "/downstreams", nil, s, nil)
}

// ExplainQuery is what to explain: a connection to a listener, or packets at an attachment.
type ExplainQuery struct {
	Source      netip.Addr
	To          string     // "tcp/5432", "tcp/192.0.2.1:5432", or "icmp" at an attachment
	Listener    string     // where several take it
	Attach      string     // "" asks for a listener
	Destination netip.Addr // of packets; may be invalid
}

// Explain is what a connection, or a packet, would meet now.
func (c *Client) Explain(ctx context.Context, q ExplainQuery) (Explanation, error) {
	destination := ""
	if q.Destination.IsValid() {
		destination = q.Destination.String()
	}
	return get[Explanation](ctx, c, "/explain",
		query("source", q.Source.String(), "to", q.To, "listener", q.Listener, "attach", q.Attach, "destination", destination))
}

// SetLimit changes keys of a limit, and returns what it is now.
func (c *Client) SetLimit(ctx context.Context, name string, s SetLimit) (l Limit, err error) {
	err = c.call(ctx, answerTimeout, http.MethodPatch, limitPath(name), nil, s, &l)
	return l, err
}

// UnsetLimit takes back what was set in a limit, or keys of it, and returns what it is now.
func (c *Client) UnsetLimit(ctx context.Context, name string, keys ...string) (l Limit, err error) {
	err = c.call(ctx, answerTimeout, http.MethodDelete, limitPath(name)+"/override", query("keys", strings.Join(keys, ",")), nil, &l)
	return l, err
}

// Blocks is the prefixes from which nothing passes.
func (c *Client) Blocks(ctx context.Context) ([]Block, error) {
	return get[[]Block](ctx, c, "/blocks", nil)
}

// Block lets nothing pass from a prefix.
func (c *Client) Block(ctx context.Context, s SetBlock) error {
	return c.call(ctx, answerTimeout, http.MethodPost, "/blocks", nil, s, nil)
}

// Unblock takes a block away.
func (c *Client) Unblock(ctx context.Context, prefix string) error {
	return c.call(ctx, answerTimeout, http.MethodDelete, "/blocks", query("prefix", prefix), nil, nil)
}

// Bypass turns the kill switch on or off.
func (c *Client) Bypass(ctx context.Context, s SetBypass) (status Status, err error) {
	err = c.call(ctx, answerTimeout, http.MethodPut, "/bypass", nil, s, &status)
	return status, err
}

// Reload puts the configuration file in force as it is now. What is wrong with the file
// is in the status, and no error.
func (c *Client) Reload(ctx context.Context) (r ReloadStatus, err error) {
	err = c.call(ctx, reloadTimeout, http.MethodPost, "/reload", nil, nil, &r)
	var wrong *APIError
	if errors.As(err, &wrong) && wrong.Code == http.StatusUnprocessableEntity &&
		json.Unmarshal(wrong.body, &r) == nil && len(r.Errors) > 0 {
		return r, nil
	}
	return r, err
}

// Drain lets the daemon end: no new connections, and those that are there go on for as
// long as it was told when it started.
func (c *Client) Drain(ctx context.Context) (status Status, err error) {
	err = c.call(ctx, answerTimeout, http.MethodPost, "/drain", nil, nil, &status)
	return status, err
}

// Events is what the daemon logged after the event since; 0 is all that it remembers.
func (c *Client) Events(ctx context.Context, since uint64) ([]Event, error) {
	return get[[]Event](ctx, c, "/events", query("since", strconv.FormatUint(since, 10)))
}

func limitPath(name string) string { return "/limits/" + url.PathEscape(name) }

// query is pairs of a name and a value, without those that have none.
func query(pairs ...string) url.Values {
	q := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			q.Set(pairs[i], pairs[i+1])
		}
	}
	return q
}

func get[T any](ctx context.Context, c *Client, path string, q url.Values) (answer T, err error) {
	err = c.call(ctx, answerTimeout, http.MethodGet, path, q, nil, &answer)
	return answer, err
}

// retryTime is for how long a client asks again while its user has too many connections: by
// then one of them makes room.
const retryTime = busyTime + time.Second

// call sends body, unless it is nil, and reads the answer into answer, unless that is nil.
func (c *Client) call(ctx context.Context, timeout time.Duration, method, path string, q url.Values, body, answer any) error {
	if c.path == "" {
		return fmt.Errorf("%w: no socket is named", ErrNoDaemon)
	}
	var send []byte
	if body != nil {
		var err error
		if send, err = json.Marshal(body); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for begun := time.Now(); ; {
		err := c.ask(ctx, timeout, method, path+"?"+q.Encode(), send, answer)
		var said *APIError
		if !errors.As(err, &said) || !said.again || time.Since(begun) > retryTime {
			return err
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

// ask is call, once.
func (c *Client) ask(ctx context.Context, timeout time.Duration, method, target string, body []byte, answer any) error {
	r, err := http.NewRequestWithContext(ctx, method, "http://shaperd/v1"+target, bytes.NewReader(body))
	if err != nil {
		return err
	}
	if login := loginOf("self"); login != "" {
		r.Header.Set(loginHeader, login)
	}
	if len(body) > 0 {
		r.Header.Set("Content-Type", "application/json")
	}
	a, err := c.http.Do(r)
	if err != nil {
		return c.unanswered(err, timeout)
	}
	defer a.Body.Close()
	b, err := io.ReadAll(io.LimitReader(a.Body, maxAnswer+1))
	if err != nil {
		return c.unanswered(err, timeout)
	}
	if len(b) > maxAnswer {
		return fmt.Errorf("the answer of %s is larger than %d MiB: ask for less", c.path, maxAnswer>>20)
	}
	if a.StatusCode/100 != 2 {
		e := &APIError{Code: a.StatusCode, body: b, again: a.Header.Get("Retry-After") != ""}
		var said Error
		if json.Unmarshal(b, &said); said.Message == "" {
			said.Message = "the daemon answered " + a.Status
		}
		lines := strings.Split(said.Message, "\n")
		for i := range lines { // whoever plays the daemon commands no terminal
			lines[i] = printable(lines[i])
		}
		e.Message = strings.Join(lines, "\n")
		return e
	}
	if answer == nil {
		return nil
	}
	if err := json.Unmarshal(b, answer); err != nil {
		return fmt.Errorf("read the answer of %s: %w", c.path, err)
	}
	return nil
}

// unanswered says why there is no answer.
func (c *Client) unanswered(err error, timeout time.Duration) error {
	switch {
	case errors.Is(err, context.Canceled):
		return context.Canceled
	case os.IsTimeout(err):
		return fmt.Errorf("%w at %s within %v", ErrNoDaemon, c.path, timeout)
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w at %s: there is no such socket", ErrNoDaemon, c.path)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w at %s: nobody listens there", ErrNoDaemon, c.path)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("connect to %s: not permitted: be root or in the group shaperd", c.path)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return fmt.Errorf("%w at %s: it closed the connection", ErrNoDaemon, c.path)
	}
	var in *url.Error // "Get \"http://shaperd/v1/...\": " says nothing to anybody
	if errors.As(err, &in) {
		err = in.Err
	}
	return fmt.Errorf("ask the daemon at %s: %w", c.path, err)
}
