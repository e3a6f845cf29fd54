package api

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
	"unicode"

	"golang.org/x/sys/unix"
)

// DefaultSocket is the default path of the control socket, of the daemon and its clients.
const DefaultSocket = "/run/shaperd/control.sock"

// ErrNoDaemon is the error when no daemon answers at a control socket: there is no socket, no
// listener, or no response in time.
var ErrNoDaemon = errors.New("no daemon answers")

const (
	responseTimeout = 10 * time.Second
	reloadTimeout   = 60 * time.Second // ASN tables may be large, and the host busy
	maxResponse     = 64 << 20         // bytes
)

// APIError is a response of the daemon that is not a success.
type APIError struct {
	Code    int    // HTTP status code
	Message string // from the daemon

	body  []byte
	retry bool // the request was not processed, and may be repeated
}

func (e *APIError) Error() string { return e.Message }

// Client is a client of the API on a control socket. Its methods may be used concurrently.
// Their errors are an *APIError, or wrap [ErrNoDaemon] if there was no response.
type Client struct {
	path string
	http *http.Client
}

// NewClient returns a client of the socket at path. It connects with the first request.
func NewClient(path string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}
	// One connection per request: none is left to close, or outlives a restart of the daemon.
	return &Client{path: path, http: &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}}
}

// KeepAlive makes c reuse its connection, which halves the cost of a request for the daemon.
// The function that it returns closes the idle connection.
func (c *Client) KeepAlive() (closeIdle func()) {
	t := c.http.Transport.(*http.Transport)
	t.DisableKeepAlives = false
	return t.CloseIdleConnections
}

// Peer returns the user ID of the daemon that listens on the socket, from the kernel.
func (c *Client) Peer(ctx context.Context) (uid uint32, err error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", c.path)
	if err != nil {
		return 0, c.connectError(err, responseTimeout)
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	control := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(control, err); err != nil {
		return 0, fmt.Errorf("get the peer of %s: %w", c.path, err)
	}
	return cred.Uid, nil
}

// Status returns the state of the daemon.
func (c *Client) Status(ctx context.Context) (Status, error) {
	return get[Status](ctx, c, "/status", nil)
}

// Health returns whether the daemon can take traffic.
func (c *Client) Health(ctx context.Context) (Health, error) {
	return get[Health](ctx, c, "/health", nil)
}

// Limits returns all limits.
func (c *Client) Limits(ctx context.Context) ([]Limit, error) {
	return get[[]Limit](ctx, c, "/limits", nil)
}

// Limit returns one limit.
func (c *Client) Limit(ctx context.Context, name string) (Limit, error) {
	return get[Limit](ctx, c, limitPath(name), nil)
}

// Keys returns the top keys of a limit, sorted by "delayed", "dropped" or "rate".
func (c *Client) Keys(ctx context.Context, limit, sort string, top int) ([]Key, error) {
	return get[[]Key](ctx, c, limitPath(limit)+"/keys", query("sort", sort, "top", strconv.Itoa(top)))
}

// Talkers returns the top talkers by "source", "prefix" or "asn", sorted as in Keys.
func (c *Client) Talkers(ctx context.Context, by, sort string, top int) ([]Talker, error) {
	return get[[]Talker](ctx, c, "/talkers", query("by", by, "sort", sort, "top", strconv.Itoa(top)))
}

// ConnectionQuery selects connections; an empty field selects all.
type ConnectionQuery struct {
	Listener, Limit string
	Source          string // a prefix, or an address
	Sort            string // "bytes", "age", "waited" or "idle"
	Top             int    // maximum; 0 is the default of the daemon
}

// Connections returns TCP connections and UDP flows.
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
	return c.call(ctx, responseTimeout, http.MethodDelete, "/connections/"+strconv.FormatUint(id, 10), nil, nil, nil)
}

// Downstreams returns the downstreams of all listeners.
func (c *Client) Downstreams(ctx context.Context) ([]DownstreamStatus, error) {
	return get[[]DownstreamStatus](ctx, c, "/downstreams", nil)
}

// SetDownstream drains or enables a downstream.
func (c *Client) SetDownstream(ctx context.Context, s SetDownstream) error {
	return c.call(ctx, responseTimeout, http.MethodPatch, "/downstreams", nil, s, nil)
}

// SetListener holds a listener, or resumes it.
func (c *Client) SetListener(ctx context.Context, s SetListener) (held HeldListener, err error) {
	err = c.call(ctx, responseTimeout, http.MethodPatch, "/listeners", nil, s, &held)
	return held, err
}

// ExplainQuery describes a connection to a listener, or packets at an attachment.
type ExplainQuery struct {
	Source      netip.Addr
	To          string     // "tcp/5432", "tcp/192.0.2.1:5432", or "icmp" at an attachment
	Listener    string     // needed if several listeners have the port
	Attach      string     // "" is a listener
	Destination netip.Addr // only for packets; may be invalid
	DSCP        string     // only for packets: "ef", or "46"; "" is 0
	Mark        string     // only for packets: "0x10"; "" is 0
	Cgroup      string     // of the local process that sends packets: "/system.slice/x.service"; may be ""
	TLV         string     // type and value in the PROXY header, as "0xE0=tenant-7"; may be ""
	Downstream  string     // needed if the listener has several, and a limit a bucket for each
}

// Explain returns the limits that apply to a connection or packet, and their verdict.
func (c *Client) Explain(ctx context.Context, q ExplainQuery) (Explanation, error) {
	destination := ""
	if q.Destination.IsValid() {
		destination = q.Destination.String()
	}
	return get[Explanation](ctx, c, "/explain",
		query("source", q.Source.String(), "to", q.To, "listener", q.Listener, "attach", q.Attach, "destination", destination, "dscp", q.DSCP, "mark", q.Mark, "downstream", q.Downstream, "tlv", q.TLV, "cgroup", q.Cgroup))
}

// SetLimit overrides keys of a limit, and returns the limit.
func (c *Client) SetLimit(ctx context.Context, name string, s SetLimit) (l Limit, err error) {
	err = c.call(ctx, responseTimeout, http.MethodPatch, limitPath(name), nil, s, &l)
	return l, err
}

// UnsetLimit removes the override of a limit, or with a source the one of these sources, or of some of its keys, and returns the limit.
func (c *Client) UnsetLimit(ctx context.Context, name, source string, keys ...string) (l Limit, err error) {
	err = c.call(ctx, responseTimeout, http.MethodDelete, limitPath(name)+"/override", query("source", source, "keys", strings.Join(keys, ",")), nil, &l)
	return l, err
}

// ResetBucket forgets what the bucket of a limit owes, or with a source that of the bucket of this source.
func (c *Client) ResetBucket(ctx context.Context, name, source string) error {
	return c.call(ctx, responseTimeout, http.MethodDelete, limitPath(name)+"/bucket", query("source", source), nil, nil)
}

// Quotas returns the quotas of limits of which most is used, up to top of them, or of one limit if it is not "".
func (c *Client) Quotas(ctx context.Context, limit string, top int) (Quotas, error) {
	return get[Quotas](ctx, c, "/quotas", query("limit", limit, "top", strconv.Itoa(top)))
}

// ResetQuota forgets what was used of the quota of a limit, or with a source of that of this source.
func (c *Client) ResetQuota(ctx context.Context, name, source string) error {
	return c.call(ctx, responseTimeout, http.MethodDelete, limitPath(name)+"/quota", query("source", source), nil, nil)
}

// Blocks returns the blocked prefixes.
func (c *Client) Blocks(ctx context.Context) ([]Block, error) {
	return get[[]Block](ctx, c, "/blocks", nil)
}

// Block blocks a source prefix.
func (c *Client) Block(ctx context.Context, s SetBlock) error {
	return c.call(ctx, responseTimeout, http.MethodPost, "/blocks", nil, s, nil)
}

// Unblock removes a block.
func (c *Client) Unblock(ctx context.Context, prefix string) error {
	return c.call(ctx, responseTimeout, http.MethodDelete, "/blocks", query("prefix", prefix), nil, nil)
}

// ChangeBlocks blocks and unblocks many prefixes at once.
func (c *Client) ChangeBlocks(ctx context.Context, s ChangeBlocks) (changes BlockChanges, err error) {
	err = c.call(ctx, responseTimeout, http.MethodPatch, "/blocks", nil, s, &changes)
	return changes, err
}

// Penalties returns the sources that penalties of limits block, would block, or have blocked and remember.
func (c *Client) Penalties(ctx context.Context) ([]Penalty, error) {
	return get[[]Penalty](ctx, c, "/penalties", nil)
}

// EndPenalty ends the penalty of a source, by a limit, or by all if limit is "".
func (c *Client) EndPenalty(ctx context.Context, source, limit string) (left []Penalty, err error) {
	err = c.call(ctx, responseTimeout, http.MethodDelete, "/penalties", query("source", source, "limit", limit), nil, &left)
	return left, err
}

// Bypass turns the kill switch on or off.
func (c *Client) Bypass(ctx context.Context, s SetBypass) (status Status, err error) {
	err = c.call(ctx, responseTimeout, http.MethodPut, "/bypass", nil, s, &status)
	return status, err
}

// Shared returns the state of the group of hosts that share limits.
func (c *Client) Shared(ctx context.Context) (Shared, error) {
	return get[Shared](ctx, c, "/shared", nil)
}

// ForgetHost tells the ledger that a host of the group is gone for good.
func (c *Client) ForgetHost(ctx context.Context, host string) (s Shared, err error) {
	err = c.call(ctx, responseTimeout, http.MethodDelete, "/shared/hosts/"+url.PathEscape(host), nil, nil, &s)
	return s, err
}

// Reload loads the configuration again. Mistakes in its files are reported in the status, not
// as an error.
func (c *Client) Reload(ctx context.Context) (r ReloadStatus, err error) {
	err = c.call(ctx, reloadTimeout, http.MethodPost, "/reload", nil, nil, &r)
	var apiErr *APIError
	if errors.As(err, &apiErr) && apiErr.Code == http.StatusUnprocessableEntity &&
		json.Unmarshal(apiErr.body, &r) == nil && len(r.Errors) > 0 {
		return r, nil
	}
	return r, err
}

// Revisions returns the configurations that are kept, the newest first.
func (c *Client) Revisions(ctx context.Context) ([]Revision, error) {
	return get[[]Revision](ctx, c, "/revisions", nil)
}

// Configuration returns the configuration in effect, as its files were read.
func (c *Client) Configuration(ctx context.Context) (Configuration, error) {
	return get[Configuration](ctx, c, "/config/files", nil)
}

// Rollback applies a configuration that is kept, until the next reload or start.
func (c *Client) Rollback(ctx context.Context, r SetRevision) (status Status, err error) {
	err = c.call(ctx, reloadTimeout, http.MethodPost, "/rollback", nil, r, &status)
	return status, err
}

// Stop ends the daemon gracefully: it accepts no new connections, and gives open ones until
// its drain timeout.
func (c *Client) Stop(ctx context.Context) (status Status, err error) {
	err = c.call(ctx, responseTimeout, http.MethodPost, "/stop", nil, nil, &status)
	return status, err
}

// Events returns the events after the event ID since, those of a kind or all if that is ""; since 0 returns all that the daemon retains.
func (c *Client) Events(ctx context.Context, since uint64, kind string) ([]Event, error) {
	return get[[]Event](ctx, c, "/events", query("since", strconv.FormatUint(since, 10), "kind", kind))
}

func limitPath(name string) string { return "/limits/" + url.PathEscape(name) }

// query returns a query of pairs of a name and a value, without empty values.
func query(pairs ...string) url.Values {
	q := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			q.Set(pairs[i], pairs[i+1])
		}
	}
	return q
}

func get[T any](ctx context.Context, c *Client, path string, q url.Values) (result T, err error) {
	err = c.call(ctx, responseTimeout, http.MethodGet, path, q, nil, &result)
	return result, err
}

// RetryTime is how long a client retries while its user has too many connections: by then
// the daemon can close one of them.
const RetryTime = 3 * time.Second

// call sends body, unless it is nil, and decodes the response into result, unless that is nil.
func (c *Client) call(ctx context.Context, timeout time.Duration, method, path string, q url.Values, body, result any) error {
	if c.path == "" {
		return fmt.Errorf("%w: no control socket configured", ErrNoDaemon)
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
	for start := time.Now(); ; {
		err := c.roundTrip(ctx, timeout, method, path+"?"+q.Encode(), send, result)
		var apiErr *APIError
		if !errors.As(err, &apiErr) || !apiErr.retry || time.Since(start) > RetryTime {
			return err
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

// roundTrip is call without retries.
func (c *Client) roundTrip(ctx context.Context, timeout time.Duration, method, target string, body []byte, result any) error {
	r, err := http.NewRequestWithContext(ctx, method, "http://shaperd/v1"+target, bytes.NewReader(body))
	if err != nil {
		return err
	}
	if login := LoginUser("self"); login != "" {
		r.Header.Set(LoginHeader, login)
	}
	if len(body) > 0 {
		r.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(r)
	if err != nil {
		return c.connectError(err, timeout)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse+1))
	if err != nil {
		return c.connectError(err, timeout)
	}
	if len(b) > maxResponse {
		return fmt.Errorf("the response of %s is larger than %d MiB: request less", c.path, maxResponse>>20)
	}
	if resp.StatusCode/100 != 2 {
		e := &APIError{Code: resp.StatusCode, body: b, retry: resp.Header.Get("Retry-After") != ""}
		var body Error
		if json.Unmarshal(b, &body); body.Message == "" {
			body.Message = "the daemon answered " + resp.Status
		}
		lines := strings.Split(body.Message, "\n")
		for i := range lines { // no escape sequences reach the terminal
			lines[i] = Printable(lines[i])
		}
		e.Message = strings.Join(lines, "\n")
		return e
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(b, result); err != nil {
		return fmt.Errorf("decode the response of %s: %w", c.path, err)
	}
	return nil
}

// connectError describes why there was no response.
func (c *Client) connectError(err error, timeout time.Duration) error {
	switch {
	case errors.Is(err, context.Canceled):
		return context.Canceled
	case os.IsTimeout(err):
		return fmt.Errorf("%w at %s within %v", ErrNoDaemon, c.path, timeout)
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w at %s: the socket does not exist", ErrNoDaemon, c.path)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w at %s: nothing is listening", ErrNoDaemon, c.path)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("connect to %s: permission denied: requires root or membership in the group shaperd", c.path)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return fmt.Errorf("%w at %s: it closed the connection", ErrNoDaemon, c.path)
	}
	var urlErr *url.Error // its prefix "Get \"http://shaperd/v1/...\": " is noise
	if errors.As(err, &urlErr) {
		err = urlErr.Err
	}
	return fmt.Errorf("request to the daemon at %s: %w", c.path, err)
}

// LoginHeader is the header with the login user, which is trusted from root only: under
// systemd's ProtectProc= the daemon does not see the processes of other users.
const LoginHeader = "Shaperd-Login"

// LoginUser returns the user of the login session that started a process, which is a PID or
// "self"; "" if it is unknown or there was no login. See loginuid in proc(5).
func LoginUser(process string) string {
	text, err := os.ReadFile("/proc/" + process + "/loginuid")
	id := strings.TrimSpace(string(text))
	if err != nil || id == fmt.Sprint(^uint32(0)) {
		return ""
	}
	return id
}

// Printable returns s, quoted as in Go if it contains a rune that cannot be printed.
func Printable(s string) string {
	for _, r := range s {
		// An invalid UTF-8 byte decodes to this too.
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return strconv.Quote(s)
		}
	}
	return s
}
