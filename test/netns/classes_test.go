package netns

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// class returns the lines of a class of the sources of a prefix.
func class(name string, source any, lines string) string {
	return fmt.Sprintf("\n[[class]]\nname = %q\nmatch.source = \"%v\"\n%s\n", name, source, lines)
}

// flood makes sources fill a bucket for so long, after half a second, each with a number of connections, and returns what part
// of all bytes each tag had.
func (n *network) flood(t *testing.T, to netip.AddrPort, s *sink, bulks map[byte][]*bulk, d time.Duration) (map[byte]float64, stallReport) {
	t.Helper()
	stalls := startStallWatch(t)
	c := n.downstream.capture(t, lab.DownstreamLink, to.Port(), 1<<17)
	stop := make(chan struct{})
	var all sync.WaitGroup
	for _, list := range bulks {
		for _, b := range list {
			all.Go(func() { _ = b.floodUntil(stop) })
		}
	}
	defer func() { close(stop); all.Wait() }()
	time.Sleep(500 * time.Millisecond)
	begin := c.Elapsed()
	time.Sleep(d)
	end := c.Elapsed()
	list := c.stop()
	parts, sum := map[byte]float64{}, 0.0
	for tag := range bulks {
		parts[tag] = float64(lab.Total(lab.Between(lab.Bytes(s.arrivals(tag, list)), begin, end)))
		sum += parts[tag]
	}
	for tag := range parts {
		parts[tag] /= sum
	}
	return parts, stalls.stop()
}

// Sources of three classes share a bucket 10:3:1, whatever number of connections they have, within 2 %.
func TestClasses_Weights(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			retryOnStall(t, func() (stallReport, error) {
				n := newNetwork(t)
				s := n.downstream.newSink(t, f.tcp())
				n.shaper.shaperd(t, config(f, limit("all", onTCP, keyAll, `rate = "4MB/s"`))+
					class("gold", f.sources[0], "weight = 10")+class("silver", f.sources[1], "weight = 3"))
				bulks := map[byte][]*bulk{}
				for i, source := range f.sources {
					tag := byte('a' + i)
					bulks[tag] = []*bulk{n.client.newBulk(t, source, f.listenAddr(), 4+3*i, tag)}
				}
				d := 6 * time.Second
				if f.name != ipv4.name {
					d = 3 * time.Second
				}
				parts, report := n.flood(t, f.listenAddr(), s, bulks, d)
				var errs []error
				for i, weight := range []float64{10, 3, 1} {
					got, want := parts[byte('a'+i)], weight/14
					t.Logf("weight %v: %.4f of the bytes, %+.2f %%", weight, got, 100*(got/want-1))
					if math.Abs(got/want-1) > 0.02 {
						errs = append(errs, fmt.Errorf("a source of weight %v has %.4f of the bytes, want %.4f", weight, got, want))
					}
				}
				return report, errors.Join(errs...)
			})
		})
	}
}

// All 256 addresses of a /24 share a bucket with one address elsewhere: each side has half.
func TestClasses_TurnsByPrefix(t *testing.T) {
	retryOnStall(t, func() (stallReport, error) {
		n, f := newNetwork(t), ipv4
		var prefix []netip.Addr
		for i := range 256 {
			prefix = append(prefix, netip.AddrFrom4([4]byte{10, 1, 77, byte(i)}))
		}
		must(t, n.client.AddAddress(lab.ClientLink, f.outerBits, prefix...))
		s := n.downstream.newSink(t, f.tcp())
		n.shaper.shaperd(t, config(f, limit("all", onTCP, keyAll, `rate = "8MB/s"`, `turns = ["prefix24", "source"]`)))
		bulks := map[byte][]*bulk{'a': {n.client.newBulk(t, f.sources[0], f.listenAddr(), 4, 'a')}}
		for _, source := range prefix {
			bulks['b'] = append(bulks['b'], n.client.newBulk(t, source, f.listenAddr(), 1, 'b'))
		}
		parts, report := n.flood(t, f.listenAddr(), s, bulks, 4*time.Second)
		t.Logf("one address: %.4f of the bytes; 256 of a /24: %.4f", parts['a'], parts['b'])
		if parts['a'] < 0.49 || parts['a'] > 0.51 {
			return report, fmt.Errorf("one address has %.4f of the bytes, and 256 of a /24 %.4f, want half each", parts['a'], parts['b'])
		}
		return report, nil
	})
}

// The same for slots: 256 addresses of a /24 that ask for all slots get half of them beside one that does.
func TestClasses_SlotsByPrefix(t *testing.T) {
	retryOnStall(t, func() (stallReport, error) { return measureSlotsByPrefix(t) })
}

func measureSlotsByPrefix(t *testing.T) (stallReport, error) {
	n, f := newNetwork(t), ipv4
	var prefix []netip.Addr
	for i := range 256 {
		prefix = append(prefix, netip.AddrFrom4([4]byte{10, 1, 77, byte(i)}))
	}
	must(t, n.client.AddAddress(lab.ClientLink, f.outerBits, prefix...))
	n.downstream.serveSlowly(t, netip.AddrPortFrom(f.downstream, tcpPort), 20*time.Millisecond)
	n.shaper.shaperd(t, config(f, limit("all", onTCP, "max_connections = 4", `queue_timeout = "1m"`, `turns = ["prefix24", "source"]`)))
	stalls := startStallWatch(t)
	var group sync.WaitGroup
	var ended atomic.Bool
	defer func() { ended.Store(true); group.Wait() }()
	var answers [2]atomic.Int64
	ask := func(side int, from netip.Addr) {
		group.Go(func() {
			for !ended.Load() {
				if _, err := n.client.request(from, f.listenAddr()); err == nil {
					answers[side].Add(1)
				}
			}
		})
	}
	for range 20 {
		ask(0, f.sources[0])
	}
	for _, source := range prefix {
		ask(1, source)
	}
	time.Sleep(time.Second)
	before := [2]int64{answers[0].Load(), answers[1].Load()}
	time.Sleep(2 * time.Second)
	one, many := answers[0].Load()-before[0], answers[1].Load()-before[1]
	t.Logf("one address: %d answers; 256 of a /24: %d", one, many)
	if part := float64(one) / float64(one+many); part < 0.47 || part > 0.53 {
		return stalls.stop(), fmt.Errorf("one address has %.2f of the answers, want half", part)
	}
	return stalls.stop(), nil
}

// Three sources ask for twice of what the downstream behind a limit bears. All that the one of the highest priority asks is answered, and
// that of the lowest, which would have nothing left, has the answers of the slots that are reserved for it.
func TestClasses_Critical(t *testing.T) {
	retryOnStall(t, func() (stallReport, error) { return measureCritical(t) })
}

func measureCritical(t *testing.T) (stallReport, error) {
	n, f := newNetwork(t), ipv4
	const service, slots = 20 * time.Millisecond, 10 // 500 answers a second, or a few less
	n.downstream.serveSlowly(t, netip.AddrPortFrom(f.downstream, tcpPort), service)
	n.shaper.shaperd(t, config(f, limit("database", onTCP, fmt.Sprint("max_connections = ", slots), `queue_timeout = "1s"`, `reserve = { batch = "10%" }`))+
		class("critical", f.sources[0], "priority = 10")+class("bulk", f.sources[1], "priority = 5")+class("batch", f.sources[2], "priority = 0"))
	stalls := startStallWatch(t)
	var group sync.WaitGroup
	var made, answered [3]int
	rates := []float64{200, 700, 100}
	const d = 5 * time.Second
	for i, rate := range rates {
		group.Go(func() { made[i], answered[i] = n.client.openLoop(f.sources[i], f.listenAddr(), rate, d) })
	}
	group.Wait()
	for i, name := range []string{"critical", "bulk", "batch with 10 % of the slots"} {
		t.Logf("%s: %d of %d answered, %.2f %%", name, answered[i], made[i], 100*float64(answered[i])/float64(made[i]))
	}
	report := stalls.stop()
	var errs []error
	if float64(answered[0]) < 0.999*float64(made[0]) {
		errs = append(errs, fmt.Errorf("%d of %d critical questions were answered", answered[0], made[0]))
	}
	if load, all := made[0]+made[1]+made[2], answered[0]+answered[1]+answered[2]; float64(load) < 1.5*float64(all) { // those that wait at the end are answered after it
		errs = append(errs, fmt.Errorf("%d of %d were answered: the load is too low to show anything", all, load))
	}
	if part := 0.1 * slots * d.Seconds() / service.Seconds(); float64(answered[2]) < 0.8*part || float64(answered[2]) > 1.3*part {
		errs = append(errs, fmt.Errorf("%d of batch were answered, want about %.0f", answered[2], part))
	}
	return report, errors.Join(errs...)
}

// A class has the part of a rate that is reserved for it, which is more than its weight gives, within 2 %, and the others share the rest.
func TestClasses_ReservedRate(t *testing.T) {
	retryOnStall(t, func() (stallReport, error) {
		n, f := newNetwork(t), ipv4
		s := n.downstream.newSink(t, f.tcp())
		n.shaper.shaperd(t, config(f, limit("all", onTCP, keyAll, `rate = "4MB/s"`, `reserve = { gold = "60%" }`))+class("gold", f.sources[0], ""))
		bulks := map[byte][]*bulk{}
		for i, source := range f.sources {
			tag := byte('a' + i)
			bulks[tag] = []*bulk{n.client.newBulk(t, source, f.listenAddr(), 4+7*i, tag)}
		}
		parts, report := n.flood(t, f.listenAddr(), s, bulks, 4*time.Second)
		var errs []error
		for i, want := range []float64{0.6, 0.2, 0.2} {
			got := parts[byte('a'+i)]
			t.Logf("%.4f of the bytes, want %.4f", got, want)
			if math.Abs(got/want-1) > 0.02 {
				errs = append(errs, fmt.Errorf("source %d has %.4f of the bytes, want %.4f", i, got, want))
			}
		}
		return report, errors.Join(errs...)
	})
}

// Of the datagrams of a class within its part of a rate none is lost, while others ask for ten times of what there is.
func TestClasses_ReservedDatagrams(t *testing.T) {
	retryOnStall(t, func() (stallReport, error) {
		n, f := newNetwork(t), ipv4
		n.downstream.echoUDP(t, f.udp()) // what classes match by source counts once it was answered
		d := n.shaper.shaperd(t, config(f, limit("all", onUDP, keyAll, `packets = "2000pps"`, `max_delay = "100ms"`, `reserve = { critical = "70%" }`))+
			class("critical", f.sources[0], ""))
		stalls := startStallWatch(t)
		c := n.downstream.capture(t, lab.DownstreamLink, udpPort, 1<<16)
		senders := []*paced{
			n.client.newPaced(t, f.sources[0], f.udpListenAddr(), paced{tag: 'c', size: 256, rate: 1200}),
			n.client.newPaced(t, f.sources[1], f.udpListenAddr(), paced{tag: 'x', size: 256, rate: 10000}),
			n.client.newPaced(t, f.sources[2], f.udpListenAddr(), paced{tag: 'y', size: 256, rate: 10000}),
		}
		mustEcho(t, senders[0].conn)
		var sent int
		var all sync.WaitGroup
		var errs [3]error
		for i, p := range senders {
			all.Go(func() {
				n, err := p.send(3 * time.Second)
				if errs[i] = err; i == 0 {
					sent = n
				}
			})
		}
		all.Wait()
		time.Sleep(300 * time.Millisecond)
		list, report := c.stop(), stalls.stop()
		if err := errors.Join(errs[:]...); err != nil {
			t.Fatal(err)
		}
		mustHaveLimited(t, d, "all")
		toDownstream := func(tag byte) (n int) {
			for _, a := range tagged(list, tag) {
				if a.To == f.udp() {
					n++
				}
			}
			return n
		}
		got := toDownstream('c')
		t.Logf("%d of %d datagrams of the class arrived; of the others %d and %d", got, sent, toDownstream('x'), toDownstream('y'))
		if float64(got) < 0.999*float64(sent) {
			return report, fmt.Errorf("%d of %d datagrams of the class arrived", got, sent)
		}
		return report, nil
	})
}
