package peer

import (
	"context"
	"sync"
	"time"

	"shaperd.dev/shaperd/cluster"
)

// Client calls the ledger of its group at one of several servers: the first in the list that works. It
// leaves a server that has not answered a call for a lease, and returns when that has answered
// again for a while, so that the hosts of a group come together at the same one.
//
// A Client is used by one goroutine at a time.
type Client struct {
	addresses []string
	ledgers   []ledger // at addresses

	mu       sync.Mutex
	choice   choice
	answered int           // index of the server that has answered last
	host     string        // of the last call
	timeout  time.Duration // of the last call

	stop     context.CancelFunc
	watching sync.WaitGroup
}

// ledger is the ledger of one server. Its methods may be called concurrently.
type ledger interface {
	Call(context.Context, *cluster.Request) (*cluster.Reply, error)
	Snapshot(ctx context.Context, keys ...string) (cluster.Snapshot, error)
	Forget(ctx context.Context, host string) (bool, error)
	Ping(ctx context.Context, host string) error // checks that a call of host would be answered
	Close()
}

// ClientOptions are the settings of a client.
type ClientOptions struct {
	Addresses []string // of the servers, each host:port, the preferred one first
	Group     string
	Files     Files

	// Local, unless nil, is the server in this process, at LocalAddress: it is called without a
	// connection.
	Local        *Server
	LocalAddress string
}

// NeedsStrict reports whether the hosts of a group that has its ledger at these addresses must be
// [cluster.Params.Strict]: at several addresses, several ledgers may be alive at once.
func NeedsStrict(addresses []string) bool { return len(addresses) > 1 }

// pingInterval is the interval between pings of the servers that are preferred to the current one.
const pingInterval = time.Second

// NewClient returns a client. It connects with the first call.
func NewClient(o ClientOptions) *Client {
	c := &Client{addresses: o.Addresses, choice: newChoice(len(o.Addresses), time.Now())}
	for _, address := range o.Addresses {
		if o.Local != nil && address == o.LocalAddress {
			c.ledgers = append(c.ledgers, local{o.Local, o.Group})
		} else {
			c.ledgers = append(c.ledgers, newRemote(address, o.Group, o.Files))
		}
	}
	ctx, stop := context.WithCancel(context.Background())
	c.stop = stop
	if len(c.ledgers) > 1 {
		c.watching.Go(func() { c.watch(ctx) })
	}
	return c
}

// Server returns the address of the server that has answered the last call that was answered.
func (c *Client) Server() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.addresses[c.answered]
}

// Close ends the connections. It must be called after the last call has returned.
func (c *Client) Close() {
	c.stop()
	for _, l := range c.ledgers {
		l.Close()
	}
	c.watching.Wait()
}

// Call makes a call, once. ctx should have the deadline of a call.
func (c *Client) Call(ctx context.Context, q *cluster.Request) (*cluster.Reply, error) {
	c.mu.Lock()
	current := c.choice.current
	c.host, c.timeout = q.Host, q.Params.Timeout().Duration()
	c.mu.Unlock()
	r, err := c.ledgers[current].Call(ctx, q)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.choice.called(time.Now(), current, q.Params.Lease.Duration(), err == nil)
	if err == nil {
		c.answered = current
	}
	return r, err
}

// Snapshot asks the server that is called, see [cluster.Ledger.Snapshot].
func (c *Client) Snapshot(ctx context.Context, keys ...string) (cluster.Snapshot, error) {
	return c.current().Snapshot(ctx, keys...)
}

// Forget tells the server that is called, see [cluster.Ledger.Forget].
func (c *Client) Forget(ctx context.Context, host string) (bool, error) {
	return c.current().Forget(ctx, host)
}

func (c *Client) current() ledger {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ledgers[c.choice.current]
}

// watch pings the servers that are preferred to the current one, until ctx ends.
func (c *Client) watch(ctx context.Context) {
	tick := time.NewTicker(pingInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		c.mu.Lock()
		preferred, host, timeout := c.ledgers[:c.choice.current], c.host, c.timeout
		c.mu.Unlock()
		var pings sync.WaitGroup
		for i, l := range preferred {
			pings.Go(func() {
				ctx, cancel := context.WithTimeout(ctx, timeout)
				defer cancel()
				err := l.Ping(ctx, host)
				c.mu.Lock()
				defer c.mu.Unlock()
				c.choice.pinged(time.Now(), i, err == nil)
			})
		}
		pings.Wait()
	}
}
