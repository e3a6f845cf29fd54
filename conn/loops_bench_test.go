package conn

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// loopsTime is for how long a benchmark measures one number of loops.
const loopsTime = time.Second

// BenchmarkLoops measures how many datagrams, of two listeners that share nothing, one loop and two loops forward, and the CPU time of
// the source: on two cores it leaves the rest to the loops. The limits apply and delay nothing. The server reads nothing, so it takes no
// time.
func BenchmarkLoops(b *testing.B) { compareOneAndTwo(b, measureLoops) }

// compareOneAndTwo reports what measure returns for one and for two, and the ratio: the datagrams forwarded in a second, and the
// processors that their source has used. server is where they go.
func compareOneAndTwo(b *testing.B, measure func(b *testing.B, server netip.AddrPort, n int) (rate, used float64)) {
	server, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		b.Fatal(err)
	}
	defer server.Close()
	var forwarded [3][]float64
	var source []float64
	for b.Loop() {
		for range 5 { // by turns, since other work on the host comes and goes
			for n := 1; n <= 2; n++ {
				rate, used := measure(b, server.LocalAddr().(*net.UDPAddr).AddrPort(), n)
				forwarded[n], source = append(forwarded[n], rate), append(source, used)
			}
		}
	}
	for n := 1; n <= 2; n++ {
		b.ReportMetric(median(forwarded[n]), fmt.Sprintf("datagrams/s-%d", n))
	}
	b.ReportMetric(median(forwarded[2])/median(forwarded[1]), "x")
	b.ReportMetric(median(source), "cores-of-source")
}

func measureLoops(b *testing.B, server netip.AddrPort, loops int) (rate, used float64) {
	r := newLoopsBench(b, loops, server)
	defer r.proxy.Close()
	limit := func(name string) shaper.Limit {
		return shaper.Limit{Name: name, Match: at(name), Key: shaper.KeySource, Packets: shaper.Frequency{N: 5_000_000, Per: time.Second}, MaxDelay: 50 * time.Millisecond}
	}
	r.apply([]string{"a", "b"}, limit("a"), limit("b"))
	var ends []func() (int, time.Duration)
	for _, name := range []string{"a", "b"} {
		ends = append(ends, startFlood(b, "udp", loopback, r.addr(name), 300_000))
	}
	return measureForwarded(ends, r.shaper)
}

// measureForwarded returns how many datagrams shapers let pass in a second, and how many processors their sources, which it ends, have used.
func measureForwarded(ends []func() (int, time.Duration), shapers ...*shaper.Shaper) (rate, used float64) {
	time.Sleep(loopsTime / 10)
	forwarded := func() (n uint64) {
		for _, s := range shapers {
			for i := range s.Policy().Len() {
				packets := &s.Policy().State(i).Packets
				n += packets[shaper.Pass][shaper.None].Load() + packets[shaper.Delay][shaper.ByRate].Load()
			}
		}
		return n
	}
	before, begun := forwarded(), time.Now()
	time.Sleep(loopsTime)
	rate = float64(forwarded()-before) / time.Since(begun).Seconds()
	for _, end := range ends {
		_, cpu := end()
		used += cpu.Seconds() / (loopsTime + loopsTime/10).Seconds()
	}
	return rate, used
}

// BenchmarkInstances is BenchmarkLoops of one listener with one and with two instances, which are in one process and each have an
// equal part of the limit, and of two sources.
func BenchmarkInstances(b *testing.B) { compareOneAndTwo(b, measureInstances) }

func measureInstances(b *testing.B, server netip.AddrPort, n int) (rate, used float64) {
	in := startInstances(b, shaper.UDP, server.String(), n, shaper.Limit{
		Name: "l", Shared: true, Packets: shaper.Frequency{N: 10_000_000, Per: time.Second}, MaxDelay: 50 * time.Millisecond,
	})
	var shapers []*shaper.Shaper
	for _, r := range in.proxies {
		defer r.proxy.Close()
		r.proxy.SetShares(shaper.Shares{Lease: steady(shaper.Whole / uint32(n))})
		shapers = append(shapers, r.shaper)
	}
	var ends []func() (int, time.Duration)
	for i := range 2 {
		ends = append(ends, startFlood(b, "udp", in.sourceAt(i%n, byte(i)), in.proxies[0].addr(), 300_000))
	}
	return measureForwarded(ends, shapers...)
}

// sourceAt returns a source that has an instance, in a network.
func (in *instances) sourceAt(instance int, network byte) netip.Addr {
	in.Helper()
	source := netip.AddrFrom4([4]byte{127, 1, network, 1})
	for ; source.As4()[2] == network; source = source.Next() {
		before := in.counts()
		c, err := net.DialUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(source, 0)), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(in.proxies[0].addr())))
		if err != nil {
			in.Fatal(err)
		}
		_, err = c.Write([]byte("hello"))
		c.Close()
		if err != nil {
			in.Fatal(err)
		}
		testutil.WaitFor(in, "the datagram", func() bool { return !slices.Equal(in.counts(), before) })
		if in.counts()[instance] > before[instance] {
			break
		}
	}
	return source
}

// BenchmarkSharedWord measures a bucket that threads share: one word, to which each departure adds its cost by compare-and-swap. It is an
// input of the model in docs/adr/0017-one-listener.md.
func BenchmarkSharedWord(b *testing.B) {
	var word atomic.Int64
	charge := func(now int64) {
		for {
			t := word.Load()
			if word.CompareAndSwap(t, max(t, now)+100) {
				return
			}
		}
	}
	b.Run("alone", func(b *testing.B) {
		for now := int64(0); b.Loop(); now++ {
			charge(now)
		}
	})
	b.Run("shared", func(b *testing.B) {
		b.RunParallel(func(pb *testing.PB) {
			for now := int64(0); pb.Next(); now++ {
				charge(now)
			}
		})
	})
}

// BenchmarkHandover measures the hand-over of work to a loop: of many at once, as a busy loop finds them, and of one for which the loop has
// to wake up, there and back.
func BenchmarkHandover(b *testing.B) {
	p, err := New(Options{Shaper: shaper.New(1000), Clock: pacer.NewClock(), Log: quietLog, TrafficLog: quietLog})
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	l := p.home.loop
	nothing := func(leaky.Time) {}
	b.Run("many", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			if l.post(nothing); i%64 == 0 {
				l.call(nothing)
			}
		}
	})
	b.Run("one", func(b *testing.B) {
		for b.Loop() {
			l.call(nothing)
		}
	})
}
