package redis

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/cluster"
)

// What BenchmarkLoad has: hosts that call every 100 ms, and hot buckets of which some move to another host.
const (
	loadHosts = 10
	loadHot   = 10_000
	loadMoves = 200 // a second
)

// BenchmarkLoad measures the time of its processor that a server needs for a group, a second each.
func BenchmarkLoad(b *testing.B) {
	for _, binary := range binaries() {
		b.Run(filepath.Base(binary), func(b *testing.B) { benchmarkLoad(b, binary) })
	}
}

func benchmarkLoad(b *testing.B, binary string) {
	sv := startServer(b, binary)
	admin := sv.admin(b)
	began := time.Now()
	clock := func() cluster.Time { return cluster.FromDuration(time.Since(began)) + cluster.Second }
	params := cluster.Params{Hosts: loadHosts, Lease: cluster.Second, Step: cluster.Second / 2}
	var hosts []*cluster.Host
	var stores []*Store
	for i := range loadHosts {
		hosts = append(hosts, cluster.NewHost(cluster.HostOptions{Params: params, Name: fmt.Sprintf("gateway-%d", i), Start: 1}, clock()))
		stores = append(stores, openStore(b, Options{URL: "redis://" + sv.address}))
	}
	// run has the hosts call until d has passed. want, unless nil, tells a host what it wants before a call.
	run := func(d time.Duration, want func(i int)) {
		var group sync.WaitGroup
		end := time.Now().Add(d)
		for i, h := range hosts {
			group.Go(func() {
				time.Sleep(time.Duration(i) * 100 * time.Millisecond / loadHosts)
				for tick := time.NewTicker(100 * time.Millisecond); time.Now().Before(end); <-tick.C {
					if want != nil {
						want(i)
					}
					for range 3 {
						r, err := stores[i].Call(context.Background(), h.Request(clock(), nil))
						if err != nil {
							b.Errorf("host %d: %v", i, err)
							return
						}
						if !h.Reply(clock(), r) {
							break
						}
					}
				}
			})
		}
		group.Wait()
	}
	key := func(k int) string { return fmt.Sprintf("per-source|source=2001:db8:%x::/64", k) }
	run(3*time.Second, nil)
	for k := range loadHot {
		hosts[k%loadHosts].Want(key(k), cluster.Whole*9/10, 1)
	}
	for range 60 {
		if run(2*time.Second, nil); hosts[0].Status(clock()).Hot == loadHot && admin("PING") != nil && settled(hosts, key) {
			break
		}
	}
	if !settled(hosts, key) {
		b.Fatalf("%d buckets are hot", hosts[0].Status(clock()).Hot)
	}
	cpu := func() (s float64) {
		info := admin("INFO", "cpu")
		for _, field := range []string{"used_cpu_sys", "used_cpu_user"} {
			v, err := strconv.ParseFloat(infoField(info, field), 64)
			if err != nil {
				b.Fatal(err)
			}
			s += v
		}
		return s
	}
	admin("CONFIG", "RESETSTAT")
	next := make([]int, loadHosts)
	before := cpu()
	b.ResetTimer()
	run(time.Duration(b.N)*time.Second, func(i int) {
		for range loadMoves / 10 / loadHosts { // what this host had goes to the next one, which does the same
			n := next[i]
			next[i]++
			give, take := (n*loadHosts+i)%loadHot, (n*loadHosts+i+loadHosts-1)%loadHot
			if n/(loadHot/loadHosts)%2 == 0 {
				hosts[i].Want(key(give), 0, 1)
				hosts[i].Lower(key(give), 0)
				hosts[i].Want(key(take), cluster.Whole*9/10, 1)
			}
		}
	})
	b.StopTimer()
	calls, us := commandStat(admin, "evalsha")
	s := b.Elapsed().Seconds()
	b.ReportMetric(100*(cpu()-before)/s, "%-of-a-core")
	b.ReportMetric(calls/s, "calls/s")
	b.ReportMetric(us/calls, "server-us/call")
}

// settled reports whether each host has its buckets.
func settled(hosts []*cluster.Host, key func(int) string) bool {
	for k := range loadHot {
		if parts, hot := hosts[k%loadHosts].Parts(key(k)); !hot || parts < cluster.Whole/2 {
			return false
		}
	}
	return true
}
