package peer

import (
	"crypto/x509"
	"fmt"
	"syscall"
	"testing"
	"time"

	"shaperd.dev/shaperd/cluster"
)

// BenchmarkCall has hosts call a server of the same process, one after the other, with so many items that change.
// It reports the CPU time of a call on both sides together.
func BenchmarkCall(b *testing.B) {
	a := newAuthority(b)
	for _, hosts := range []int{4, 10, 100} {
		for _, items := range []int{0, 1, 10, 100} {
			b.Run(fmt.Sprintf("%d hosts, %d items", hosts, items), func(b *testing.B) { benchmarkCall(b, a, hosts, items, false) })
		}
	}
	for _, items := range []int{0, 1, 10, 100} {
		b.Run(fmt.Sprintf("in process, %d items", items), func(b *testing.B) { benchmarkCall(b, a, 4, items, true) })
	}
}

func benchmarkCall(b *testing.B, a authority, hosts, items int, inProcess bool) {
	server, err := Serve(ServerOptions{
		Address: "127.0.0.1:0", Files: a.host("gw"), Hosts: hosts,
		Clock: func() cluster.Time { return cluster.FromDuration(time.Since(processStart)) },
	})
	if err != nil {
		b.Fatal(err)
	}
	defer server.Close()
	address := server.listener.Addr().String()
	files := a.host("all", func(c *x509.Certificate) {
		c.DNSNames = nil
		for i := range hosts {
			c.DNSNames = append(c.DNSNames, fmt.Sprintf("gw%d", i))
		}
	})
	type host struct {
		*cluster.Host
		*Client
	}
	var all []host
	p := cluster.Params{Hosts: hosts, Lease: 10 * cluster.Second, Step: 10 * cluster.Second}
	for i := range hosts {
		o := ClientOptions{Addresses: []string{address}, Group: "default", Files: files}
		if inProcess {
			o.Local, o.LocalAddress = server, address
		}
		h := host{newHost(fmt.Sprintf("gw%d", i), p), NewClient(o)}
		defer h.Close()
		for range 3 { // joins
			benchmarkStep(b, h.Host, h.Client, 0, 0)
		}
		all = append(all, h)
	}
	before := cpuTime(b)
	b.ResetTimer()
	for n := range b.N {
		h := all[n%hosts]
		benchmarkStep(b, h.Host, h.Client, n, items)
	}
	b.StopTimer()
	b.ReportMetric(float64((cpuTime(b)-before).Nanoseconds())/1000/float64(b.N), "cpu-us/op")
}

var processStart = time.Now().Add(-time.Second)

func benchmarkStep(b *testing.B, h *cluster.Host, c *Client, n, items int) {
	for i := range items {
		h.Want(fmt.Sprintf("per-source|source=192.0.2.%d/32", i), int64(1000+(n+i)%1000), 1)
	}
	now := cluster.FromDuration(time.Since(processStart))
	r, err := c.Call(b.Context(), h.Request(now, nil))
	if err != nil {
		b.Fatal(err)
	}
	h.Reply(cluster.FromDuration(time.Since(processStart)), r)
}

func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
