package conn

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"shaperd/leaky"
)

// vanishedAfter is when a peer is taken for gone that has bytes under way to it and
// acknowledges nothing: as long as keepalive takes to find that out when there are none. By
// itself Linux takes a quarter of an hour (net.ipv4.tcp_retries2), with a slot held.
//
// TCP_USER_TIMEOUT would also end a reader that answers, and only pauses for so long: one
// whose window is closed.
const vanishedAfter = 150 * leaky.Second

const (
	// vanishedLooks is how often that time peers are looked at.
	vanishedLooks = 10

	// vanishedTurn is how many sessions are looked at before bytes have their turn.
	vanishedTurn = 128
)

// vanishing looks for peers that have vanished. It belongs to the loop's thread.
type vanishing struct {
	after leaky.Time
	timer leaky.Event
	at    int // of the walk
	info  unix.TCPInfo
}

// watchPeers begins to look, if that has not begun.
func (p *Proxy) watchPeers(now leaky.Time) {
	if v := &p.vanishing; !v.timer.Scheduled() {
		v.at, v.timer.Fire = toAll, p.lookAtPeers
		p.loop.pacer.ScheduleCoarse(&v.timer, now+v.after/vanishedLooks)
	}
}

// lookAtPeers ends sessions of which a peer has vanished.
func (p *Proxy) lookAtPeers(now leaky.Time) {
	v := &p.vanishing
	for range vanishedTurn {
		s, ok := p.sessions.before(&v.at)
		if !ok {
			v.at = toAll
			if len(p.sessions.all) > 0 {
				p.watchPeers(now)
			}
			return
		}
		if s.stage != flowing {
			continue
		}
		for _, d := range []*direction{&s.up, &s.down} {
			if d.vanished(v, now) {
				s.abort(d.dst.reset(), now)
				break
			}
		}
	}
	p.loop.pacer.Schedule(&v.timer, now)
}

// vanished reports whether what d has sent was not acknowledged for too long. A direction
// whose last byte was, is not looked at again before there is another one.
func (d *direction) vanished(v *vanishing, now leaky.Time) bool {
	under := &d.underWay
	if under.none && under.moved == d.moved && under.shut == d.shut {
		return false
	}
	size := uint32(unsafe.Sizeof(v.info))
	_, _, errno := unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(d.dst.fd), unix.IPPROTO_TCP, unix.TCP_INFO,
		uintptr(unsafe.Pointer(&v.info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return false
	}
	under.moved, under.shut = d.moved, d.shut
	under.none = v.info.Unacked == 0 && v.info.Notsent_bytes == 0
	heard := now.Sub(leaky.Time(v.info.Last_ack_recv) * (leaky.Second / 1000))
	if under.none || under.since == 0 || heard > under.since {
		under.since = now
		return false
	}
	after := v.after
	if v.info.Unacked == 0 {
		after *= 2 // a closed window is asked about every 120 s at the least, and that may be lost once
	}
	return now.Sub(under.since) >= after
}

// underWay is what is known of the bytes that a direction has sent.
type underWay struct {
	since leaky.Time // when there were some, or an acknowledgement came
	none  bool       // all were acknowledged, when as much had
	moved uint64     // as this,
	shut  bool       // and the end
}
