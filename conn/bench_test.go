package conn

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/quota"
)

// BenchmarkScheduler measures one unit through two queues, without sockets.
func BenchmarkScheduler(b *testing.B) {
	s := shaper.New(1000)
	wheel, now := new(pacer.Wheel), leaky.Second
	clock := func() leaky.Time { return now }
	sc := newSharing(s, wheel, clock, clock).scheduler
	p := policy(b, s,
		shaper.Limit{Name: "all", Rate: 100e9, MaxDelay: time.Second},
		shaper.Limit{Name: "per-source", Key: shaper.KeySource, Rate: 10e9, MaxDelay: time.Second})
	s.Swap(p, 0)
	f := flowFrom("10.0.0.1", 1)
	route := p.Route(f)
	u := &benchUnit{}
	u.unit = unit{owner: u, path: sc.newPath(pathSpec{policy: p, flow: f, route: route, set: route.ToDownstream}), bytes: 1500, packets: 1, credit: 1}
	b.ReportAllocs()
	for b.Loop() {
		sc.submit(&u.unit, now)
		for u.queued {
			now, _ = wheel.Next()
			wheel.Advance(now)
		}
	}
}

type benchUnit struct{ unit }

func (u *benchUnit) send(leaky.Time) (bytes, packets uint64, requeue bool) { return 1500, 1, false }
func (u *benchUnit) resubmit(leaky.Time)                                   {}
func (u *benchUnit) refused(*queue, shaper.Reason)                         {}

// BenchmarkUDP measures datagrams through the proxy, and for comparison without a proxy.
func BenchmarkUDP(b *testing.B) {
	for _, tt := range []struct {
		name   string
		proxy  bool
		limits []shaper.Limit
	}{
		{"direct", false, nil},
		{"proxy", true, nil},
		{"limited", true, []shaper.Limit{{Name: "l", Rate: 100e9, MaxDelay: time.Second}}},
	} {
		b.Run(tt.name, func(b *testing.B) {
			server, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
			if err != nil {
				b.Fatal(err)
			}
			defer server.Close()
			server.SetReadBuffer(4 << 20)
			to := server.LocalAddr().String()
			if tt.proxy {
				to = start(b, shaper.UDP, to, tt.limits...).addr()
			}
			c, err := net.Dial("udp4", to)
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			data, in := make([]byte, 512), make([]byte, 2048)
			const window = 32 // in the buffers, so that none is lost
			sent := 0
			for b.Loop() {
				c.Write(data)
				if sent++; sent%window == 0 {
					server.SetReadDeadline(time.Now().Add(time.Second))
					for range window {
						if _, err := server.Read(in); err != nil {
							b.Fatal(err)
						}
					}
				}
			}
		})
	}
}

// BenchmarkTCP moves a megabyte through a connection, with and without a proxy.
func BenchmarkTCP(b *testing.B) {
	for _, tt := range []struct {
		name   string
		proxy  bool
		limits []shaper.Limit
	}{
		{"direct", false, nil},
		{"proxy", true, nil},
		{"limited", true, []shaper.Limit{{Name: "l", Rate: 1e12}}},
		{"quota", true, []shaper.Limit{{Name: "l", Quota: quota.Quota{Amount: quota.MaxAmount, Period: quota.Period{Calendar: quota.Day}}}}},
	} {
		b.Run(tt.name, func(b *testing.B) {
			const size = 1 << 20
			to := testutil.ServeTCP(b, func(c *net.TCPConn) {
				in := make([]byte, size)
				for {
					if _, err := io.ReadFull(c, in); err != nil {
						return
					}
					c.Write(in[:1])
				}
			})
			if tt.proxy {
				r := start(b, shaper.TCP, to)
				r.proxy.UseQuotas(&memoryFile{records: map[string]*quota.Record{}}, nil)
				r.apply(tt.limits...)
				to = r.addr()
			}
			c, err := net.Dial("tcp4", to)
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			data := make([]byte, size)
			b.SetBytes(size)
			for b.Loop() {
				c.Write(data)
				if _, err := io.ReadFull(c, data[:1]); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkTCP_Connections makes connections of one request and one answer each, with and without a proxy.
func BenchmarkTCP_Connections(b *testing.B) {
	for _, proxy := range []bool{false, true} {
		b.Run(map[bool]string{false: "direct", true: "proxy"}[proxy], func(b *testing.B) {
			to := testutil.ServeTCP(b, testutil.Echo)
			if proxy {
				to = start(b, shaper.TCP, to).addr()
			}
			message := make([]byte, 64)
			b.ReportAllocs()
			for b.Loop() {
				c, err := net.Dial("tcp4", to)
				if err != nil {
					b.Fatal(err)
				}
				c.Write(message)
				if _, err := io.ReadFull(c, message); err != nil {
					b.Fatal(err)
				}
				c.Close()
			}
		})
	}
}

// BenchmarkShares measures an update of the parts of 10,000 hot keys, a report of what they need, and
// what a unit costs more whose limit hosts share.
func BenchmarkShares(b *testing.B) {
	const keys = 10_000
	hot := func(b *testing.B) (*sharing, *leaky.Time, shaper.Shares) {
		s := shaper.New(2 * keys)
		wheel, now := new(pacer.Wheel), leaky.Second
		clock := func() leaky.Time { return now }
		sg := newSharing(s, wheel, clock, pacer.NewClock().Boot)
		p := policy(b, s, shaper.Limit{Name: "all", Key: shaper.KeySource, Shared: true, Rate: 10e9, MaxDelay: time.Second})
		s.Swap(p, 0)
		shares := shaper.Shares{Lease: steady(shaper.Whole / 10)}
		for i := range keys {
			f := flowFrom("10.0.0.1", 1)
			f.Source = netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
			shares.Given = append(shares.Given, shaper.KeyParts{Key: p.Key(0, f, p.Route(f)), Parts: shaper.Whole / 10})
		}
		sg.set(&shares)
		return sg, &now, shares
	}
	b.Run("set", func(b *testing.B) {
		sg, now, shares := hot(b)
		b.ReportAllocs()
		for b.Loop() {
			for i := range shares.Given {
				shares.Given[i].Parts ^= 1 << (i % 20)
			}
			*now += leaky.Second / 10
			sg.set(&shares)
		}
	})
	b.Run("reset", func(b *testing.B) {
		sg, now, shares := hot(b)
		shares.Reset = true
		b.ReportAllocs()
		for b.Loop() {
			for i := range shares.Given {
				shares.Given[i].Parts ^= 1 << (i % 20)
			}
			*now += leaky.Second / 10
			sg.set(&shares)
		}
	})
	b.Run("renew", func(b *testing.B) {
		sg, now, shares := hot(b)
		shares.Given = nil
		b.ReportAllocs()
		for b.Loop() {
			*now += leaky.Second / 10
			sg.set(&shares)
		}
	})
	b.Run("demands", func(b *testing.B) {
		sg, now, _ := hot(b)
		var all []shaper.Demand
		b.ReportAllocs()
		for b.Loop() {
			for _, sh := range sg.shares {
				sg.use(sh, 1000, 1)
			}
			*now += leaky.Second / 10
			span, more := sg.beginReport(), true
			for all = all[:0]; more; {
				all, more = sg.report(all, span, *now)
			}
			if len(all) != keys {
				b.Fatalf("%d demands", len(all))
			}
		}
	})
	for name, shared := range map[string]bool{"shared unit": true, "unit": false} {
		b.Run(name, func(b *testing.B) {
			s := shaper.New(1000)
			wheel, now := new(pacer.Wheel), leaky.Second
			clock := func() leaky.Time { return now }
			sg := newSharing(s, wheel, clock, pacer.NewClock().Boot)
			p := policy(b, s, shaper.Limit{Name: "all", Shared: shared, Rate: 100e9, MaxDelay: time.Second})
			s.Swap(p, 0)
			sg.set(&shaper.Shares{Lease: steady(shaper.Whole)})
			sg.lease.End = leaky.Forever
			f := flowFrom("10.0.0.1", 1)
			u := &benchUnit{}
			u.unit = unit{owner: u, path: sg.scheduler.newPath(pathSpec{policy: p, flow: f, route: p.Route(f), set: 1}), bytes: 1500, packets: 1}
			b.ReportAllocs()
			for b.Loop() {
				sg.scheduler.submit(&u.unit, now)
				for u.queued {
					now, _ = wheel.Next()
					wheel.Advance(now)
				}
			}
		})
	}
}

type busyUnit struct{ unit }

func (u *busyUnit) send(leaky.Time) (bytes, packets uint64, requeue bool) { return 1448, 1, true }
func (u *busyUnit) resubmit(leaky.Time)                                   {}
func (u *busyUnit) refused(*queue, shaper.Reason)                         {}

// BenchmarkReserve measures a unit of one of 10,000 sources in 16 classes that always have something to send, with and without
// a part for each class.
func BenchmarkReserve(b *testing.B) {
	const sources = 10_000
	for _, percent := range []int{0, 1, 6} {
		b.Run(fmt.Sprintf("%d%%", percent), func(b *testing.B) {
			s := shaper.New(1000)
			wheel, now := new(pacer.Wheel), leaky.Second
			sc := newSharing(s, wheel, func() leaky.Time { return now }, func() leaky.Time { return now }).scheduler
			limit := shaper.Limit{Name: "all", Rate: 10e9}
			var classes []shaper.TrafficClass
			for i := range shaper.MaxClasses {
				c := classOf(fmt.Sprintf("10.%d.0.0/16", i), 1+i)
				classes = append(classes, c)
				if percent > 0 {
					limit.Reserve = append(limit.Reserve, shaper.Reserve{Class: c.Name, Percent: percent})
				}
			}
			p := policyOf(b, s, classes, limit)
			s.Swap(p, 0)
			for i := range sources {
				f := flowFrom("10.0.0.1", 1)
				f.Source = netip.AddrFrom4([4]byte{10, byte(i % 17), byte(i >> 8), byte(i)})
				route := p.Route(f)
				u := &busyUnit{}
				u.unit = unit{owner: u, path: sc.newPath(pathSpec{policy: p, flow: f, route: route, set: route.ToDownstream}), bytes: 1448, packets: 1}
				sc.submit(&u.unit, now)
			}
			b.ReportAllocs()
			for b.Loop() {
				now, _ = wheel.Next()
				wheel.Advance(now)
			}
		})
	}
}

// BenchmarkMerge measures how long all loops stand still when a reload moves connections from one to another.
func BenchmarkMerge(b *testing.B) {
	const n = 2000
	r := newLoopsRig(b, 2, shaper.TCP, testutil.ServeTCP(b, testutil.Discard))
	var stood time.Duration
	for i := range b.N {
		b.StopTimer()
		fresh := fmt.Sprint("n", i)
		r.apply([]string{"a", fresh})
		var clients []net.Conn
		for j := range 2 * n { // home has as many, and one more
			c, err := net.Dial("tcp4", r.addr([]string{"a", fresh}[j%2]))
			if err != nil {
				b.Fatal(err)
			}
			clients = append(clients, c)
		}
		testutil.WaitFor(b, "the connections", func() bool {
			return r.shaper.Listener("a").Open.Load() == n && r.shaper.Listener(fresh).Open.Load() == n
		})
		if len(r.proxy.workers) != 2 {
			b.Fatal("not on two loops")
		}
		m := merge{from: r.proxy.workers[1], into: r.proxy.home}
		b.StartTimer()
		r.proxy.stopAll(func(now leaky.Time) {
			begun := time.Now()
			m.run(now)
			stood += time.Since(begun)
		})
		b.StopTimer()
		r.proxy.workers = r.proxy.workers[:1]
		addProcessors(-1)
		for _, c := range clients {
			c.Close()
		}
		testutil.WaitFor(b, "the end", func() bool { return r.proxy.openConns.Load() == 0 })
	}
	b.ReportMetric(float64(stood.Nanoseconds())/float64(b.N)/n, "ns/connection")
}
