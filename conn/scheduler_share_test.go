package conn

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

func TestStreamsOfOneBucketTakeTurns(t *testing.T) {
	r := newRig(t, shaper.Limit{Name: "per-source", Key: shaper.KeySource, Rate: 80e6})
	path := r.path(flowFrom("10.0.0.1", 1))
	var streams []*stream
	for range 50 {
		s := &stream{rig: r, left: 1 << 40}
		s.unit = unit{owner: s, path: path, bytes: 7000, credit: grantCredit}
		streams = append(streams, s)
	}
	for _, s := range streams {
		r.scheduler.submit(&s.unit, leaky.Second)
	}
	r.advance(3*leaky.Second, onTime)
	var sum uint64
	for _, s := range streams {
		sum += s.moved
		// The first stream gets its second grant before the last one gets its first.
		if diff := int64(s.moved) - int64(streams[1].moved); diff > 14000 || diff < -14000 {
			t.Errorf("one stream moved %d bytes, another %d", s.moved, streams[1].moved)
		}
	}
	if want := uint64(20e6); sum < want-14000 || sum > want+14000 {
		t.Errorf("%d bytes moved in 2 s, want %d", sum, want)
	}
}

func TestSourcesShareABucket(t *testing.T) {
	for _, tt := range []struct {
		share shaper.Scheduling
		want  [3]float64 // share of the bucket, with 1, 4 and 25 connections
	}{
		{shaper.ScheduleFair, [3]float64{1. / 3, 1. / 3, 1. / 3}},
		{shaper.ScheduleFIFO, [3]float64{1. / 30, 4. / 30, 25. / 30}},
	} {
		t.Run(tt.share.String(), func(t *testing.T) {
			r := newRig(t, shaper.Limit{Name: "all", Rate: 80e6, Scheduling: tt.share})
			var moved [3][]*stream
			for source, n := range []int{1, 4, 25} {
				for connection := range n {
					f := flowFrom(fmt.Sprintf("10.0.0.%d", source), 1)
					f.Connection = uint64(connection)
					s := &stream{rig: r, left: 1 << 40}
					s.unit = unit{owner: s, path: r.path(f), bytes: uint64(1448 + 100*source), credit: grantCredit}
					moved[source] = append(moved[source], s)
					r.scheduler.submit(&s.unit, leaky.Second)
				}
			}
			r.advance(5*leaky.Second, onTime)
			for source, streams := range moved {
				var sum uint64
				for _, s := range streams {
					sum += s.moved
					if tt.share == shaper.ScheduleFair && (s.moved < streams[0].moved-2*s.bytes || s.moved > streams[0].moved+2*s.bytes) {
						t.Errorf("source %d: one connection moved %d bytes, another %d", source, s.moved, streams[0].moved)
					}
				}
				if got := float64(sum) / 40e6; got < tt.want[source]*0.88 || got > tt.want[source]*1.12 {
					t.Errorf("source %d got %.3f of the bucket, want %.3f", source, got, tt.want[source])
				}
			}
		})
	}
}

// Datagrams share the rate, whatever their size.
func TestDatagramsShareBytesNotPackets(t *testing.T) {
	r := newRig(t, shaper.Limit{Name: "all", Rate: 8e6, MaxDelay: time.Minute})
	sizes := map[string]uint64{"10.0.0.1": 64, "10.0.0.2": 1400}
	paths := map[string][]hop{}
	for source, size := range sizes {
		paths[source] = r.path(flowFrom(source, 1))
		r.flood(paths[source], int(2e6/size), size, leaky.Second)
	}
	r.advance(2*leaky.Second, onTime)
	left := map[string]uint64{}
	for source, path := range paths {
		for u := range path[0].flowQueue.Backward() {
			left[source] += u.bytes
		}
	}
	if a, b := 2e6-float64(left["10.0.0.1"]), 2e6-float64(left["10.0.0.2"]); a < 0.99*b || a > 1.01*b {
		t.Errorf("the source of small datagrams got %.0f bytes through, the other %.0f", a, b)
	}
}

// A full queue drops datagrams of the source with the most in it, and another source waits only for
// its turn.
func TestFloodOfOneSourceCostsAnotherNothing(t *testing.T) {
	r := newRig(t, shaper.Limit{Name: "all", Rate: 8e6, MaxDelay: 100 * time.Millisecond})
	hog, other := r.path(flowFrom("10.0.0.1", 1)), r.path(flowFrom("10.0.0.2", 1))
	worst, lost := leaky.Time(0), 0
	now := leaky.Second
	for range 200 {
		r.flood(hog, 50, 1000, now) // five times the rate
		r.polite(other, &worst, &lost, now)
		now += leaky.Second / 100
		r.advance(now, onTime)
	}
	if most := leaky.FromDuration(2100 * time.Microsecond); worst == 0 || worst > most || lost > 0 {
		t.Errorf("the other source lost %d, and waited up to %v, want some, at most two datagrams", lost, worst.Duration())
	}
	if sent := r.count; sent < 1990 || sent > 2010 {
		t.Errorf("%d datagrams left in 2 s, want 2000", sent)
	}
}

// A million unverified sources get one turn next to a verified source.
func TestUnverifiedSourcesShareOneQueue(t *testing.T) {
	r := newRig(t, shaper.Limit{Name: "all", Rate: 8e6, MaxDelay: 100 * time.Millisecond})
	known := r.path(flowFrom("10.0.0.1", 1))
	worst, lost := leaky.Time(0), 0
	now := leaky.Second
	var paths [][]hop
	for i := range 20_000 {
		path := r.pathOf(flowFrom(netip.AddrFrom4([4]byte{172, 16, byte(i >> 8), byte(i)}).String(), 1), true)
		paths = append(paths, path)
		r.flood(path, 1, 1000, now)
		if i%20 == 0 { // 5 % of the traffic
			r.polite(known, &worst, &lost, now)
		}
		now += leaky.Second / 10_000
		r.advance(now, onTime)
	}
	if most := leaky.FromDuration(2100 * time.Microsecond); worst == 0 || worst > most || lost > 0 {
		t.Errorf("the verified source lost %d, and waited up to %v, want some, at most two datagrams", lost, worst.Duration())
	}
	for _, path := range append(paths, known) {
		r.scheduler.releasePath(path, now)
	}
	if n := len(r.scheduler.byKey); n != 0 {
		t.Errorf("%d queues are left", n)
	}
}

// A sender without replies, of 20 of the 100 datagrams/s, is not starved by a flood of forged sources
// of one datagram each: those share a queue.
func TestUnansweredSenderSurvivesForgedFlood(t *testing.T) {
	for _, flood := range []int{50, 110, 1000} {
		r := newRig(t, shaper.Limit{Name: "all", Packets: shaper.Frequency{N: 100, Per: time.Second}, MaxDelay: 2 * time.Second})
		from := func(source string) []hop {
			f := flowFrom(source, 1)
			f.Protocol = shaper.UDP
			return r.pathOf(f, true)
		}
		mine := from("10.0.0.1")
		giveOwnQueues(mine) // it has sent before
		worst, lost := leaky.Time(0), 0
		forged := 0
		for ms := range 20_000 {
			r.advance(r.now+leaky.Second/1000, onTime)
			for ; forged < ms*flood/1000; forged++ {
				source := netip.AddrFrom4([4]byte{11, byte(forged >> 16), byte(forged >> 8), byte(forged)})
				r.flood(from(source.String()), 1, 100, r.now)
			}
			if ms%50 == 0 {
				r.polite(mine, &worst, &lost, r.now)
			}
		}
		if most := leaky.FromDuration(21 * time.Millisecond); lost > 0 || worst > most {
			t.Errorf("with %d forged sources per second it lost %d of 400, and waited for up to %v, want two turns", flood, lost, worst.Duration())
		}
		if flood > 100 && r.refused == 0 {
			t.Errorf("%d forged sources per second lost nothing", flood)
		}
	}
}

func TestSlowKeyDoesNotHoldUpTheOthers(t *testing.T) {
	r := newRig(t,
		shaper.Limit{Name: "all", Rate: 800e6},
		shaper.Limit{Name: "per-source", Key: shaper.KeySource, Rate: 8e3})
	var moved [10]*stream
	for i := range moved {
		s := &stream{rig: r, left: 1 << 40}
		s.unit = unit{owner: s, path: r.path(flowFrom(fmt.Sprintf("10.0.0.%d", i), 1)), bytes: 1448, credit: grantCredit}
		moved[i] = s
		r.scheduler.submit(&s.unit, leaky.Second)
	}
	r.advance(21*leaky.Second, onTime)
	for i, s := range moved {
		if s.moved < 18000 || s.moved > 21500 {
			t.Errorf("source %d moved %d bytes in 20 s, want about 20000", i, s.moved)
		}
	}
}

// Units in the queue of their own source must not take space in the queue of the limit for all.
func TestQueueOfOneSourceTakesNoRoomFromAnother(t *testing.T) {
	r := newRig(t,
		shaper.Limit{Name: "all", Rate: 8e6, MaxDelay: 100 * time.Millisecond},
		shaper.Limit{Name: "per-source", Key: shaper.KeySource, Rate: 80e3, MaxDelay: 5 * time.Second})
	send := func(source string, n int, now leaky.Time) {
		path := r.path(flowFrom(source, 1))
		for range n {
			p := &packet{rig: r}
			p.unit = unit{owner: p, path: path, bytes: 1000, packets: 1, credit: 1, droppable: true}
			r.scheduler.submit(&p.unit, now)
		}
	}
	now := leaky.Second
	for i := range 20 {
		for hog := range 4 {
			send(fmt.Sprintf("10.0.0.%d", 1+hog), 40, now)
		}
		if i > 0 { // the first ones of the hogs all arrived at once
			send("10.0.1.1", 1, now)
		}
		now += leaky.Second / 4
		r.advance(now, onTime)
	}
	if r.refusedBy["all"] != 0 || r.refusedBy["per-source"] == 0 {
		t.Errorf("refused: %v, want the hogs by their own limit alone", r.refusedBy)
	}
}

// Datagrams that wait for a limit of their own must not hold up TCP that shares their wider limit.
func TestDatagramsDoNotHoldUpStreams(t *testing.T) {
	r := newRig(t,
		shaper.Limit{Name: "bytes", Key: shaper.KeySource, Rate: 8e6, MaxDelay: time.Second},
		shaper.Limit{Name: "datagrams", Key: shaper.KeySource, Packets: shaper.Frequency{N: 10, Per: time.Second}, MaxDelay: time.Second})
	tcp, udp := flowFrom("10.0.0.1", 1), flowFrom("10.0.0.1", 1)
	udp.Protocol = shaper.UDP
	s := &stream{rig: r, left: 1 << 40}
	s.unit = unit{owner: s, path: r.path(tcp), bytes: minGrant, credit: grantCredit}
	path := r.path(udp)
	for range 50 {
		p := &packet{rig: r}
		p.unit = unit{owner: p, path: path, bytes: 1000, packets: 1, credit: 1, droppable: true}
		r.scheduler.submit(&p.unit, leaky.Second)
	}
	r.scheduler.submit(&s.unit, leaky.Second)
	r.advance(2*leaky.Second, onTime)
	if s.moved < 980e3 || r.refusedBy["datagrams"] == 0 {
		t.Errorf("the stream moved %d bytes in a second, want nearly 1,000,000; refused %v", s.moved, r.refusedBy)
	}
}
