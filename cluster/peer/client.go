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
	"time"

	"shaperd.dev/shaperd/cluster"
)

// Client calls the ledger of one of several servers: the first of them that answers. When an earlier one
// is back, it returns to it after a while. Each server has a ledger of its own, so with more than one
// hosts must be [cluster.Params.Strict].
//
// It is not safe for concurrent use.
type Client struct {
	targets []*target
	current int
	probes  chan int // an earlier target that has been back for a while; nil while none is probed
	stop    context.CancelFunc
}

// target is one server.
type target struct {
	address string
	local   *Server // in this process, or nil
	files   Files
	http    *http.Client
}

// An earlier target must answer so many probes in a row, at this interval, before the client returns to it.
const (
	returnProbes  = 5
	probeInterval = time.Second
)

// NewClient returns a client of the servers at addresses, each host:port, in the order of preference.
// local, unless nil, is the one at localAddress.
func NewClient(addresses []string, files Files, local *Server, localAddress string) *Client {
	c := &Client{stop: func() {}}
	for _, address := range addresses {
		t := &target{address: address, files: files}
		if local != nil && address == localAddress {
			t.local = local
		} else {
			t.http = &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, Transport: &http.Transport{
				DialTLSContext: t.dial, MaxConnsPerHost: 1, IdleConnTimeout: idleTimeout, DisableCompression: true,
			}}
		}
		c.targets = append(c.targets, t)
	}
	return c
}

// dial connects to t.
func (t *target) dial(ctx context.Context, network, address string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	config, err := t.files.client(host)
	if err != nil {
		return nil, err
	}
	return (&tls.Dialer{Config: config}).DialContext(ctx, network, address)
}

// Close closes the connections.
func (c *Client) Close() {
	c.stop()
	for _, t := range c.targets {
		if t.http != nil {
			t.http.CloseIdleConnections()
		}
	}
}

// Call makes one call. After an error the next one goes to the next server.
func (c *Client) Call(ctx context.Context, q *cluster.Request) (*cluster.Reply, error) {
	c.returnToEarlier()
	t := c.targets[c.current]
	if t.local != nil {
		return t.local.Call(ctx, q)
	}
	r := new(cluster.Reply)
	if err := t.post(ctx, "call", q, r); err != nil {
		c.moveOn()
		return nil, err
	}
	return r, nil
}

// Snapshot asks the current server, see [cluster.Ledger.Snapshot].
func (c *Client) Snapshot(ctx context.Context, keys ...string) (s cluster.Snapshot, err error) {
	t := c.targets[c.current]
	if t.local != nil {
		return t.local.Snapshot(ctx, keys...)
	}
	return s, t.post(ctx, "snapshot", snapshotRequest{keys}, &s)
}

// Forget tells the current server, see [cluster.Ledger.Forget].
func (c *Client) Forget(ctx context.Context, host string) (ok bool, err error) {
	t := c.targets[c.current]
	if t.local != nil {
		return t.local.Forget(ctx, host)
	}
	return ok, t.post(ctx, "forget", forgetRequest{host}, &ok)
}

// moveOn goes on to the next target, and has earlier ones probed.
func (c *Client) moveOn() {
	c.current = (c.current + 1) % len(c.targets)
	c.stop()
	c.probes = nil
	if c.current == 0 {
		return
	}
	ctx, stop := context.WithCancel(context.Background())
	back := make(chan int, 1)
	c.probes, c.stop = back, stop
	go probe(ctx, c.targets[:c.current], back)
}

// returnToEarlier returns to an earlier target that has been back for a while.
func (c *Client) returnToEarlier() {
	select {
	case c.current = <-c.probes:
		c.stop()
		c.probes = nil
	default:
	}
}

// probe sends the first of targets that answers returnProbes probes in a row to back, unless ctx ends.
func probe(ctx context.Context, targets []*target, back chan<- int) {
	tick := time.NewTicker(probeInterval)
	defer tick.Stop()
	for answered := make([]int, len(targets)); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for i, t := range targets {
			if !t.answers(ctx) {
				answered[i] = 0
			} else if answered[i]++; answered[i] == returnProbes {
				back <- i
				return
			}
		}
	}
}

func (t *target) answers(ctx context.Context) bool {
	if t.local != nil {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, probeInterval/2)
	defer cancel()
	var s cluster.Snapshot
	return t.post(ctx, "snapshot", snapshotRequest{[]string{"-"}}, &s) == nil
}

// post makes a request, and decodes its reply. It is not repeated.
func (t *target) post(ctx context.Context, what string, request, reply any) error {
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	err = t.roundTrip(ctx, what, body, reply)
	if ctx.Err() != nil {
		err = fmt.Errorf("no reply in time: %w", context.Cause(ctx))
	}
	if err != nil {
		return fmt.Errorf("ledger at %s: %w", t.address, err)
	}
	return nil
}

func (t *target) roundTrip(ctx context.Context, what string, body []byte, reply any) error {
	// GetBody stays nil: the transport cannot repeat the request.
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+t.address+"/v1/"+what, io.NopCloser(bytes.NewReader(body)))
	if err != nil {
		return err
	}
	r.ContentLength = int64(len(body))
	response, err := t.http.Do(r)
	if err != nil {
		return errors.Unwrap(err) // of [url.Error], which repeats the address
	}
	defer response.Body.Close()
	text, err := io.ReadAll(http.MaxBytesReader(nil, response.Body, maxBody))
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %.200s", response.Status, strings.TrimSpace(string(text)))
	}
	return json.Unmarshal(text, reply)
}
