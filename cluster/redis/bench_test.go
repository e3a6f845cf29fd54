package redis

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"shaperd.dev/shaperd/cluster"
)

// BenchmarkCall measures calls of hosts of which nothing, or some buckets, have changed, on a server in the
// same machine. "server-us/op" is the time that the script takes there.
func BenchmarkCall(b *testing.B) {
	for _, load := range []struct{ hosts, hot, changed int }{
		{4, 1, 0},
		{10, 1, 0},
		{100, 1, 0},
		{4, 1, 1},
		{10, 1, 1},
		{100, 1, 1},
		{10, 1_000, 10},
		{10, 1_000, 100},
		{10, 10_000, 10},
		{10, 10_000, 100},
		{10, 100_000, 10},
		{10, 100_000, 100},
	} {
		for _, binary := range binaries() {
			b.Run(fmt.Sprintf("%s/hosts=%d/hot=%d/changed=%d", filepath.Base(binary), load.hosts, load.hot, load.changed), func(b *testing.B) {
				benchmarkCall(b, binary, load.hosts, load.hot, load.changed)
			})
		}
	}
}

// benchCaller is a host that calls, and of which the benchmark says what has changed.
type benchCaller struct {
	store *Store
	q     cluster.Request
	sent  time.Time
}

func (c *benchCaller) call(b *testing.B) *cluster.Reply {
	c.q.GotAge = cluster.FromDuration(time.Since(c.sent))
	c.q.N++
	c.sent = time.Now()
	r, err := c.store.Call(context.Background(), &c.q)
	if err != nil || r.Refused != cluster.NotRefused {
		b.Fatalf("%v, %+v", err, r)
	}
	c.q.Got, c.q.Epoch, c.q.Known, c.q.Leased, c.q.Items = r.N, r.Epoch, r.Version, r.Settled, nil
	return r
}

func (c *benchCaller) tell(k int, want int64) {
	c.q.Items = append(c.q.Items, cluster.Item{Key: fmt.Sprintf("per-source/2001:db8:%x::/64", k), Want: want, Weight: 1})
}

func benchmarkCall(b *testing.B, binary string, hosts, hot, changed int) {
	sv := startServer(b, binary)
	admin := sv.admin(b)
	s := openStore(b, Options{URL: "unix://" + sv.socket})
	var group []*benchCaller
	began := time.Now()
	for i := range hosts {
		params := cluster.Params{Hosts: hosts, Lease: 30 * cluster.Second, Step: 30 * cluster.Second}
		q := cluster.Request{Params: params, Host: fmt.Sprintf("gateway-%d", i), Start: 1, Over: true, Info: "1.2.3.4"}
		group = append(group, &benchCaller{store: s, q: q, sent: began})
	}
	for range 4 {
		for _, h := range group {
			h.call(b)
		}
	}
	// Each bucket is wanted by two hosts; the only one of a limit without key by all.
	wants := func(i, k int) bool { return hot == 1 || i == k%hosts || i == (k+1)%hosts }
	for i, h := range group {
		for k := range hot {
			if !wants(i, k) {
				continue
			}
			if h.tell(k, cluster.Whole/3); len(h.q.Items) == cluster.MaxItems {
				h.call(b)
			}
		}
		h.call(b)
	}
	for _, h := range group {
		if r := h.call(b); !r.Counted || r.Live != hosts {
			b.Fatalf("the group is not complete: %+v", r)
		}
	}
	admin("CONFIG", "RESETSTAT")
	k := make([]int, hosts)
	b.ResetTimer()
	for n := range b.N {
		i := n % hosts
		for range changed {
			for k[i] = (k[i] + 1) % hot; !wants(i, k[i]); k[i] = (k[i] + 1) % hot {
			}
			group[i].tell(k[i], cluster.Whole/16+int64(n*31+k[i])%50_000)
		}
		group[i].call(b)
	}
	b.StopTimer()
	calls, us := commandStat(admin, "evalsha")
	b.ReportMetric(us/calls, "server-us/op")
	if changed > 0 {
		b.ReportMetric(us/calls/float64(changed), "server-us/key")
	}
	b.ReportMetric(calls/b.Elapsed().Seconds(), "calls/s")
}
