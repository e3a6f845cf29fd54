package peer

import (
	"context"
	"crypto/x509"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/cluster"
)

// gateway is a host that calls its client all the time, in real time.
type gateway struct {
	clock func() cluster.Time

	mu     sync.Mutex
	client *Client
	next   *Client // takes the place of client
	host   *cluster.Host
	want   int64 // parts
}

func (g *gateway) run(ctx context.Context) {
	for ctx.Err() == nil {
		g.mu.Lock()
		if g.next != nil {
			g.client.Close()
			g.client, g.next = g.next, nil
		}
		client := g.client
		g.host.Want("db", g.want, 1)
		q := g.host.Request(g.clock(), nil)
		g.mu.Unlock()
		ctx, cancel := context.WithTimeout(ctx, g.host.Params.Timeout().Duration())
		r, err := client.Call(ctx, q)
		cancel()
		again := false
		if err == nil {
			g.mu.Lock()
			again = g.host.Reply(g.clock(), r)
			g.mu.Unlock()
		}
		if !again {
			time.Sleep(20 * time.Millisecond)
		}
	}
	g.client.Close()
}

// calls reports whether a gateway calls a server, by its number.
func (g *gateway) calls(server int) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.client.mu.Lock()
	defer g.client.mu.Unlock()
	return g.next == nil && g.client.choice.current == server
}

// gateways are a group. Time stands still for all of them while they are looked at.
type gateways []*gateway

// use returns what all may use at one instant, and what one of them may.
func (all gateways) use(of *gateway) (sum, part int64) {
	for _, g := range all {
		g.mu.Lock()
		defer g.mu.Unlock()
	}
	now := all[0].clock()
	for _, g := range all {
		use := g.host.Use("db", now)
		if sum += use; g == of {
			part = use
		}
	}
	return sum, part
}

// want makes one of them want all.
func (all gateways) want(busy *gateway) {
	for _, g := range all {
		g.mu.Lock()
		g.want = 0
		if g == busy {
			g.want = cluster.Whole
		}
		g.mu.Unlock()
	}
}

// TestGroup_StaysWithinTheWhole has three hosts share a bucket by two servers, each in the process of a host,
// while a server stops and starts and the network cuts a host off from it.
func TestGroup_StaysWithinTheWhole(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	files := a.host("gw1")
	first, second := startServer(t, files, defaultBounds, ""), startServer(t, a.host("gw2"), defaultBounds, "")
	network := newRelay(t, first.address) // between gw3 and the first server
	start := time.Now()
	clock := func() cluster.Time { return cluster.FromDuration(time.Since(start)) }
	p := cluster.Params{Hosts: 3, Lease: cluster.Second, Step: cluster.Second / 2, Strict: true}
	client := func(name, firstAddress string, own *testServer) *Client {
		o := ClientOptions{
			Addresses: []string{firstAddress, second.address}, Group: "default",
			Files: a.host(name+"-client", func(c *x509.Certificate) { c.DNSNames = []string{name} }),
		}
		if !NeedsStrict(o.Addresses) {
			t.Error("two addresses are not strict")
		}
		if own != nil {
			o.Local, o.LocalAddress = own.Server, own.address
		}
		c := NewClient(o)
		c.choice.minimum, c.choice.leases = 0, 4
		return c
	}
	all := gateways{{client: client("gw1", first.address, first)}, {client: client("gw2", first.address, second)}, {client: client("gw3", network.address, nil)}}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for i, name := range []string{"gw1", "gw2", "gw3"} {
		g := all[i]
		g.clock, g.host = clock, cluster.NewHost(cluster.HostOptions{Params: p, Name: name, Start: 1}, 0)
		running.Go(func() { g.run(ctx) })
	}
	defer func() { cancel(); running.Wait() }()

	// until has one of them want all, and looks at what all may use until done.
	until := func(what string, busy *gateway, done func(part int64) bool) {
		t.Helper()
		all.want(busy)
		began, samples := time.Now(), 0
		for ; ; time.Sleep(time.Millisecond) {
			sum, part := all.use(busy)
			samples++
			switch {
			case sum > cluster.Whole:
				t.Fatalf("%s: the hosts may use %d of %d parts", what, sum, cluster.Whole)
			case done(part):
				t.Logf("%s after %v, %d samples", what, time.Since(began).Round(time.Millisecond), samples)
				return
			case time.Since(began) > 2*time.Minute:
				t.Fatalf("not in time: %s; the busy host may use %d parts", what, part)
			}
		}
	}
	hasMost := func(part int64) bool { return part >= cluster.Whole*9/10 }
	allCall := func(server int) func(int64) bool {
		return func(part int64) bool {
			return hasMost(part) && all[0].calls(server) && all[1].calls(server) && all[2].calls(server)
		}
	}
	until("all call the first server", all[0], allCall(0))
	until("another host has most", all[2], hasMost)
	first.Close()
	until("all call the second server", all[1], allCall(1))
	first = startServer(t, files, defaultBounds, first.address)
	all[0].mu.Lock()
	all[0].next = client("gw1", first.address, first) // as its daemon has started again
	all[0].mu.Unlock()
	until("all call the first server again", all[2], allCall(0))
	network.set(func() { network.stall = true })
	until("the host that is cut off calls the second server", all[0], func(part int64) bool { return all[2].calls(1) })
	until("one of two islands has its part", all[0], func(part int64) bool { return part >= cluster.Whole*6/10 })
	network.set(func() { network.stall = false })
	until("it has come back", all[2], allCall(0))
}
