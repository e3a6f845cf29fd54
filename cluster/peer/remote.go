package peer

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"shaperd.dev/shaperd/cluster"
)

// remote is the ledger of a group at a server.
type remote struct {
	address, group string
	files          Files
	http           http.Client
	connecting     atomic.Int32 // number of connections that are being made
	closed         context.Context
	close          context.CancelFunc
}

const (
	// connectTimeout bounds how long a connection is made. That is not ended by the timeout of the
	// call that needs it: the next call may use it.
	connectTimeout = time.Second

	maxReply      = 32 << 20 // bytes
	maxErrorReply = 1 << 10
)

func newRemote(address, group string, files Files) *remote {
	r := &remote{address: address, group: group, files: files}
	r.closed, r.close = context.WithCancel(context.Background())
	r.http = http.Client{
		Transport: &http.Transport{
			DialTLSContext: r.connect, MaxConnsPerHost: 1, IdleConnTimeout: idleTimeout, DisableCompression: true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return r
}

// Close ends the connection.
func (r *remote) Close() {
	r.close()
	r.http.CloseIdleConnections()
}

func (r *remote) Call(ctx context.Context, q *cluster.Request) (*cluster.Reply, error) {
	reply := new(cluster.Reply)
	if err := r.ask(ctx, opCall, q, reply); err != nil {
		return nil, err
	}
	return reply, nil
}

func (r *remote) Snapshot(ctx context.Context, keys ...string) (s cluster.Snapshot, err error) {
	return s, r.ask(ctx, opSnapshot, snapshotRequest{keys}, &s)
}

func (r *remote) Forget(ctx context.Context, host string) (ok bool, err error) {
	return ok, r.ask(ctx, opForget, forgetRequest{host}, &ok)
}

func (r *remote) Ping(ctx context.Context, host string) error {
	return r.ask(ctx, opPing, pingRequest{host}, &struct{}{})
}

// connect connects to the server.
func (r *remote) connect(ctx context.Context, network, address string) (net.Conn, error) {
	r.connecting.Add(1)
	defer r.connecting.Add(-1)
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	config, err := r.files.client(host)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	defer context.AfterFunc(r.closed, cancel)()
	c, err := (&tls.Dialer{Config: config}).DialContext(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	return c, nil
}

// ask sends a request once, and decodes the reply.
func (r *remote) ask(ctx context.Context, op string, request, reply any) error {
	body, err := json.Marshal(request)
	if err == nil {
		err = r.post(ctx, op, body, reply)
	}
	var remoteError *net.OpError
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil && r.connecting.Load() > 0:
		err = fmt.Errorf("no connection in time: %w", context.Cause(ctx))
	case ctx.Err() != nil:
		err = fmt.Errorf("no reply in time: %w", context.Cause(ctx))
	case errors.As(err, &remoteError) && remoteError.Op == "remote error":
		err = fmt.Errorf("it refuses the certificate of this host: %w", err)
	}
	return fmt.Errorf("ask the ledger at %s: %w", r.address, err)
}

func (r *remote) post(ctx context.Context, op string, body []byte, reply any) error {
	// Without GetBody the transport cannot send it twice.
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+r.address+path(r.group, op), io.NopCloser(bytes.NewReader(body)))
	if err != nil {
		return err
	}
	q.ContentLength = int64(len(body))
	response, err := r.http.Do(q)
	if err != nil {
		return errors.Unwrap(err) // of a url.Error, which repeats the address
	}
	defer response.Body.Close()
	most := int64(maxReply)
	if response.StatusCode != http.StatusOK {
		most = maxErrorReply
	}
	text, err := io.ReadAll(io.LimitReader(response.Body, most))
	switch {
	case err != nil:
		return err
	case response.StatusCode != http.StatusOK:
		return fmt.Errorf("%s: %s", response.Status, strings.TrimSpace(string(text)))
	case len(text) == maxReply:
		return fmt.Errorf("a reply of %d bytes or more", maxReply)
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(reply); err != nil {
		return fmt.Errorf("decode the reply: %w", err)
	}
	return nil
}
