// Owner: the loop's thread.

package conn

import (
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
)

const (
	// statsInterval is how often the kernel is asked what TCP has measured of connections to downstreams that are in use.
	statsInterval = leaky.Second
	// endStatsInterval is the least time between two questions about connections that end before their first sample: a
	// question costs 2 % of the CPU time of such a connection.
	endStatsInterval = leaky.Second / 100
)

// statsSampler asks it.
type statsSampler struct {
	timer pacer.Event
	pos   int        // of the walk over sessions
	endAt leaky.Time // of the last sample of a connection that ended before its first one
	info  unix.TCPInfo
}

// scheduleStats schedules the next walk, unless one is scheduled.
func (p *worker) scheduleStats(now leaky.Time) {
	if v := &p.statsSampler; !v.timer.Scheduled() {
		v.pos, v.timer.Fire = fromEnd, p.sampleStats
		p.loop.pacer.ScheduleCoarse(&v.timer, now+statsInterval)
	}
}

// sampleStats samples some sessions, and schedules itself for the next ones.
func (p *worker) sampleStats(now leaky.Time) {
	v := &p.statsSampler
	p.walkRelaying(&v.pos, &v.timer, p.scheduleStats, now, func(s *session) {
		s.server.detectDeath()
		s.sampleStats()
		s.judge(false, now)
	})
}

// sampleStatsAtEnd samples s, which ends, unless it is one of many that were short.
func (s *session) sampleStatsAtEnd(now leaky.Time) {
	if v := &s.proxy.statsSampler; s.tcpStats.moved == 0 {
		if now < v.endAt+endStatsInterval {
			return
		}
		v.endAt = now
	}
	s.sampleStats()
}

// tcpStats is what TCP had measured of a connection to a downstream when it was last asked.
type tcpStats struct {
	moved                 uint64 // bytes in both directions
	retransmits           uint32
	busy, receiverLimited uint64
}

// sampleStats adds what TCP has measured since the last sample to the state of the downstream of s, if bytes have
// moved since.
func (s *session) sampleStats() {
	was, moved := &s.tcpStats, s.up.moved+s.down.moved
	info := &s.proxy.statsSampler.info
	if moved == was.moved || sock.TCPInfo(s.server.fd, info) != 0 {
		return
	}
	state := s.downstream.state
	state.RTT.Observe(time.Duration(info.Rtt) * time.Microsecond)
	state.Retransmits.Add(uint64(info.Total_retrans - was.retransmits))
	state.Busy.Add(info.Busy_time - was.busy)
	state.ReceiverLimited.Add(info.Rwnd_limited - was.receiverLimited)
	*was = tcpStats{moved, info.Total_retrans, info.Busy_time, info.Rwnd_limited}
}
