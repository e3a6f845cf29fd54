package netns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/test/lab"
)

const (
	instancesRate  = 4_000_000 // bytes a second, of both instances together
	instancesSlots = 10        // connections in flight, of both together
	slotsOfEach    = 2         // of a source
	instancesCalls = 5433      // port of the listener with slots
)

// instances are two daemons of one host that listen at the same addresses.
type instances struct {
	t        *testing.T
	f        family
	n        *network
	sources  []netip.Addr // of which each has an IPv6 /64
	daemons  [2]*daemon
	password string
	dir      string
}

func newInstances(t *testing.T, f family) *instances {
	in := &instances{t: t, f: f, n: newNetwork(t), dir: t.TempDir()}
	for i := range 8 {
		source := netip.AddrFrom4([4]byte{10, 1, 4, byte(i + 1)})
		if f.proxy.Is6() {
			source = netip.MustParseAddr(fmt.Sprintf("fd00:1:0:%x::1", 0x400+i))
		}
		in.sources = append(in.sources, source)
	}
	must(t, in.n.client.AddAddress(lab.ClientLink, f.outerBits, in.sources...))
	at := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), redisPort)
	in.n.shaper.redis(t, at)
	in.password = filepath.Join(in.dir, "redis.pass")
	must(t, os.WriteFile(in.password, []byte(redisPassword+"\n"), 0o600))
	for i := range in.daemons {
		in.start(i)
	}
	return in
}

func (in *instances) start(i int) {
	in.t.Helper()
	f := in.f
	in.daemons[i] = in.n.shaper.shaperd(in.t, fmt.Sprintf(`[daemon]
metrics = "127.0.0.1:%d"
dashboard = ""
pin_path = %q

[[listen]]
name = "door"
address = ["tcp://%v"]
downstream = ["%v"]
instances = 2

[[listen]]
name = "calls"
address = ["tcp://%v"]
downstream = ["%v"]
instances = 2

[[limit]]
name = "total"
match.listen = "door"
rate = "%dB/s"
shared = true

[[limit]]
name = "each"
match.listen = "door"
key = "source"
rate = "%dB/s"
shared = true

[[limit]]
name = "slots"
match.listen = "calls"
max_connections = %d
queue_timeout = "30s"
shared = true

[[limit]]
name = "slots-of-each"
match.listen = "calls"
key = "source"
max_connections = %d
queue_timeout = "30s"
shared = true

[shared]
hosts = 2
name = "instance-%d"
store = ["redis://127.0.0.1:%d"]
password_file = %q
`, 9464+100*i, unusedPinPath, f.listenAddr(), f.tcp(), netip.AddrPortFrom(f.proxy, instancesCalls), netip.AddrPortFrom(f.downstream, instancesCalls),
		instancesRate, instancesRate/4, instancesSlots, slotsOfEach, i, redisPort, in.password), "--state", filepath.Join(in.dir, fmt.Sprint("state", i)))
}

// at returns at which instance the connections of a source are, -1 if it has none, or -2 if they are at both.
func (in *instances) at(source netip.Addr) int {
	in.t.Helper()
	found := -1
	for i, d := range in.daemons {
		if !d.Running() {
			continue
		}
		all, err := d.api().Connections(context.Background(), api.ConnectionQuery{Source: source.String()})
		must(in.t, err)
		switch {
		case len(all.Connections) == 0:
		case found >= 0:
			return -2
		default:
			found = i
		}
	}
	return found
}

// flood sends from sources, with two connections each, and returns how many bytes a second of each arrived at the downstream after a
// while, and all that arrived.
func (in *instances) flood(s *sink, sources ...netip.Addr) (rates []float64, arrived []lab.Arrival, stalls stallReport) {
	in.t.Helper()
	const from, to = 500 * time.Millisecond, 2 * time.Second
	c := in.n.downstream.capture(in.t, lab.DownstreamLink, tcpPort, 1<<16)
	watch := startStallWatch(in.t)
	stop := make(chan struct{})
	var all sync.WaitGroup
	var bulks []*bulk
	for i, source := range sources {
		b := in.n.client.newBulk(in.t, source, in.f.listenAddr(), 2, byte('a'+i))
		bulks = append(bulks, b)
		all.Go(func() { _ = b.floodUntil(stop) })
	}
	time.Sleep(from)
	begin := c.Elapsed()
	time.Sleep(to - from)
	end := c.Elapsed()
	arrived, stalls = c.stop(), watch.stop()
	for i := range sources {
		got := lab.Total(lab.Between(lab.Bytes(s.arrivals(byte('a'+i), arrived)), begin, end))
		rates = append(rates, float64(got)/(end-begin).Seconds())
	}
	close(stop)
	all.Wait()
	for _, b := range bulks {
		b.abort()
	}
	return rates, arrived, stalls
}

// awaitJoined waits until both instances share the limits.
func (in *instances) awaitJoined() {
	in.t.Helper()
	for _, d := range in.daemons {
		waitFor(in.t, patience, func() error {
			s, err := d.api().Shared(in.t.Context())
			if err == nil && (s.State != "joined" || s.Live != 2) {
				err = fmt.Errorf("%s is %s, with %d of 2", s.Name, s.State, s.Live)
			}
			return err
		})
	}
}

func sum(all []float64) (s float64) {
	for _, v := range all {
		s += v
	}
	return s
}

// TestInstances has two daemons at one address. Each source is at one of them; together they keep to a rate and to a maximum of
// connections; and when one is killed the other one serves all.
func TestInstances(t *testing.T) {
	t.Run("ipv4", func(t *testing.T) {
		retryOnStall(t, func() (stallReport, error) { return measureInstances(t, ipv4) })
	})
	t.Run("ipv6", func(t *testing.T) {
		in := newInstances(t, ipv6)
		in.n.downstream.newSink(t, ipv6.tcp())
		in.spread()
	})
}

func measureInstances(t *testing.T, f family) (stallReport, error) {
	in := newInstances(t, f)
	s := in.n.downstream.newSink(t, f.tcp())
	in.awaitJoined()
	var errs []error
	var stalls stallReport
	check := func(what string, least float64, sources ...netip.Addr) {
		rates, arrived, report := in.flood(s, sources...)
		stalls = append(stalls, report...)
		most := min(instancesRate, float64(len(sources))*instancesRate/4)
		t.Logf("%-20s %.0f B/s of %.0f, of each source %.0f to %.0f; sigma %.0f bytes", what, sum(rates), most, slices.Min(rates), slices.Max(rates), lab.Sigma(lab.Bytes(arrived), most))
		// A unit of each, which is a grant of 4 ms of the rate, and the catch-up.
		e := envelope{rate: most, burst: 2 * (0.004*instancesRate + 2*1448), unit: "bytes"}
		if err := e.checkBurst(lab.Bytes(arrived), report); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
		if sum(rates) < (least-report.share(2*time.Second))*most {
			errs = append(errs, fmt.Errorf("%s: %.0f B/s arrived of %.0f", what, sum(rates), most))
		}
		if fair := sum(rates) / float64(len(rates)); slices.Min(rates) < 0.5*fair || slices.Max(rates) > 1.5*fair {
			errs = append(errs, fmt.Errorf("%s: sources got %.0f bytes a second each, want more alike", what, rates))
		}
	}
	check("all sources", 0.9, in.sources...)
	check("one source", 0.9, in.sources[0])
	in.spread()

	// The service manager keeps no sockets of an instance.
	for i, d := range in.daemons {
		if n := len(d.Notify.Stored); n > 0 {
			t.Errorf("instance %d has stored %d sockets", i, n)
		}
	}
	errs = append(errs, in.slots(func() {
		time.Sleep(2 * time.Second)
		in.daemons[0].Kill()
		time.Sleep(time.Second)
	}))
	check("without one instance", 0.45, in.sources...) // which keeps its half
	errs = append(errs, in.slots(func() {
		in.start(0)
		in.awaitJoined()
		time.Sleep(2 * time.Second)
	}))
	in.spread()
	return stalls, errors.Join(errs...)
}

// spread checks that connections of each source, from several ports and of the same IPv6 /64, are at one instance, and not all at the same.
func (in *instances) spread() {
	in.t.Helper()
	var of [2]int
	for _, source := range in.sources {
		froms := []netip.Addr{source, source, source}
		if source.Is6() {
			last := source.As16()
			last[15] = 99
			neighbor := netip.AddrFrom16(last)
			must(in.t, in.n.client.AddAddress(lab.ClientLink, in.f.outerBits, neighbor))
			froms = append(froms, neighbor, neighbor)
			defer func() {
				must(in.t, in.n.client.Run("ip", "address", "del", netip.PrefixFrom(neighbor, in.f.outerBits).String(), "dev", lab.ClientLink))
			}()
		}
		var conns []*net.TCPConn
		for _, from := range froms {
			conns = append(conns, in.n.client.mustDial(in.t, from, in.f.listenAddr()))
			_, err := conns[len(conns)-1].Write([]byte("x"))
			must(in.t, err)
		}
		at := -1
		waitFor(in.t, patience, func() error {
			if at = in.at(source); at < 0 {
				return fmt.Errorf("the connections of %v are nowhere, or those of before at the other instance still: %d", source, at)
			}
			return nil
		})
		for _, from := range froms {
			if got := in.at(from); got != at {
				in.t.Errorf("%v is at instance %d, and %v at %d", source, at, from, got)
			}
		}
		of[at]++
		for _, c := range conns {
			abort(c)
		}
	}
	if of[0] == 0 || of[1] == 0 {
		in.t.Errorf("of %d sources %d are at the instances", len(in.sources), of)
	}
}

// slots has more connections than may be in flight, of all sources and of each, and counts them at the downstream.
func (in *instances) slots(meanwhile func()) error {
	in.t.Helper()
	var mu sync.Mutex
	var inFlight, most, served int
	of, mostOf := make([]int, len(in.sources)), 0
	l := in.n.downstream.listenTCP(in.t, netip.AddrPortFrom(in.f.downstream, instancesCalls))
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			all.Go(func() {
				defer c.Close()
				source := make([]byte, 1)
				if _, err := io.ReadFull(c, source); err != nil { // its instance was killed
					return
				}
				i := source[0]
				mu.Lock()
				inFlight++
				of[i]++
				most, mostOf = max(most, inFlight), max(mostOf, of[i])
				mu.Unlock()
				time.Sleep(50 * time.Millisecond)
				mu.Lock()
				inFlight-- // before an instance can know
				of[i]--
				served++
				mu.Unlock()
				_, _ = c.Write([]byte("x"))
			})
		}
	})
	ctx, end := context.WithCancel(context.Background())
	var clients sync.WaitGroup
	for i := range 5 * len(in.sources) {
		clients.Go(func() {
			for ctx.Err() == nil {
				c, err := in.n.client.dialTCP(in.sources[i%len(in.sources)], netip.AddrPortFrom(in.f.proxy, instancesCalls))
				if err != nil {
					continue
				}
				_ = c.SetDeadline(time.Now().Add(3 * time.Second))
				_, _ = c.Write([]byte{byte(i % len(in.sources))})
				_, _ = io.Copy(io.Discard, c)
				c.Close()
			}
		})
	}
	begun := time.Now()
	meanwhile()
	seconds := time.Since(begun).Seconds()
	end()
	clients.Wait()
	l.Close()
	all.Wait()
	in.t.Logf("at most %d in flight, %d of a source; %d served in %.1f s", most, mostOf, served, seconds)
	if most > instancesSlots || mostOf > slotsOfEach {
		return fmt.Errorf("%d connections were in flight, and %d of a source, more than %d or %d", most, mostOf, instancesSlots, slotsOfEach)
	}
	// One instance has at least its half of the slots, of which 20 connections a second each have one.
	if least := seconds * 20 * instancesSlots / 2 / 2; float64(served) < least {
		return fmt.Errorf("%d connections were served, want %.0f", served, least)
	}
	return nil
}
