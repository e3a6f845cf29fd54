package conn

import (
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pipe holds bytes on their way between two sockets, in the kernel: they are not copied. A direction
// has one only while it is not empty.
type pipe struct {
	r, w int
	n    int // bytes in it
}

const (
	// spliceMin is how many bytes must be available at once for a pipe to be worth its two additional
	// system calls.
	spliceMin = 32 << 10

	// maxPipes is how many directions may hold a pipe with bytes that their downstream does not accept
	// yet; others copy. A pipe takes two descriptors.
	maxPipes = 64
)

// takePipe returns an empty pipe, or nil if none is available.
func (l *loop) takePipe() *pipe {
	if n := len(l.pipes); n > 0 {
		p := l.pipes[n-1]
		l.pipes = l.pipes[:n-1]
		return p
	}
	if l.pipeCount >= maxPipes {
		return nil
	}
	var fds [2]int
	if unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC) != nil {
		return nil
	}
	// On an error it keeps the default of 64 KiB.
	_, _ = unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, maxGrant)
	l.pipeCount++
	return &pipe{r: fds[0], w: fds[1]}
}

// dropPipe closes a pipe that may hold bytes.
func (l *loop) dropPipe(p *pipe) {
	unix.Close(p.r)
	unix.Close(p.w)
	l.pipeCount--
}

// move moves up to limit bytes and returns how many dst accepted.
func (d *direction) move(limit int) int {
	n := 0
	switch {
	case d.pipe != nil:
		n = d.drainPipe(limit)
	case d.bulk && limit >= spliceMin && d.pieceSize == 0 && !d.src.mustPoll && len(d.unwritten) == 0 && !d.srcEOF && d.fillPipe(limit):
		if d.pipe != nil {
			n = d.drainPipe(limit)
		}
	default:
		n = d.copy(min(limit, scratchSize))
	}
	if n > 0 {
		d.moved += uint64(n)
		d.started = d.moved > d.headerLen
		d.bytes.Add(uint64(n))
		s, now := d.session, d.session.proxy.loop.now
		s.activity.moved += uint64(n)
		s.activity.lastActive = now
		if now.Sub(s.reportedAt) > reportInterval {
			s.reportUsage(now)
		}
		if d.onlyEOFLeft() {
			d.shutdown()
		}
	}
	return n
}

// onlyEOFLeft reports whether nothing is left to read from src but its FIN.
func (d *direction) onlyEOFLeft() bool {
	if !d.src.mustPoll || !d.src.readable || d.srcEOF || len(d.unwritten) > 0 || d.pipe != nil || d.session.stage != stageRelaying {
		return false
	}
	n, errno := peek(d.src.fd, d.session.proxy.loop.scratch[:1])
	return errno == 0 && n == 0 || d.src.failed && errno != 0 && errno != unix.EAGAIN
}

// fillPipe splices up to limit bytes of src into a pipe. It returns false, with no effect, if splicing
// is not possible.
func (d *direction) fillPipe(limit int) bool {
	l := d.session.proxy.loop
	p := l.takePipe()
	if p == nil {
		return false
	}
	n, errno := splice(d.src.fd, p.w, limit)
	p.n = n
	switch {
	case n > 0:
		d.pipe = p
		d.bulk = n >= spliceMin/2
		return true
	case errno == unix.EAGAIN:
		d.src.markDrained()
	case errno == unix.EINVAL || errno == unix.ENOMEM:
		l.pipes = append(l.pipes, p)
		d.bulk = false
		return false
	case errno != 0:
		d.session.abort(d.src.resetEnding(), l.clock.Now())
	default:
		d.shutdown()
	}
	l.pipes = append(l.pipes, p)
	return true
}

// drainPipe splices up to limit bytes from the pipe to dst, and returns how many dst accepted.
func (d *direction) drainPipe(limit int) int {
	l, p := d.session.proxy.loop, d.pipe
	limit = min(limit, p.n)
	moved := 0
	for moved < limit {
		n, errno := splice(p.r, d.dst.fd, limit-moved)
		if errno == unix.EAGAIN {
			d.dst.writable = false
			break
		}
		if errno != 0 || n == 0 {
			d.session.peerFailed(d.dst, l.clock.Now())
			return 0
		}
		moved += n
		p.n -= n
	}
	if p.n == 0 {
		d.pipe = nil
		l.pipes = append(l.pipes, p)
	}
	return moved
}

// copy moves bytes through the loop's memory.
func (d *direction) copy(limit int) int {
	b := d.unwritten
	if len(b) > limit {
		b = b[:limit]
	}
	if len(b) == 0 && !d.srcEOF {
		n, errno := recv(d.src.fd, d.session.proxy.loop.scratch[:limit])
		switch {
		case errno == unix.EAGAIN:
			d.src.markDrained()
			return 0
		case errno != 0:
			d.session.abort(d.src.resetEnding(), d.session.proxy.loop.clock.Now())
			return 0
		case n == 0:
			d.srcEOF = true
		}
		b = d.session.proxy.loop.scratch[:n]
		d.bulk = n == limit
		if n > 0 && n < limit && !d.src.mustPoll {
			d.src.markDrained()
		}
	}
	if len(b) == 0 {
		if d.srcEOF {
			d.shutdown()
		}
		return 0
	}
	n, errno := d.write(b)
	switch {
	case errno == unix.EAGAIN:
		d.dst.writable = false
	case errno != 0:
		d.session.peerFailed(d.dst, d.session.proxy.loop.clock.Now())
		return 0
	case n < len(b):
		d.dst.writable = false
	}
	if len(d.unwritten) > 0 {
		d.unwritten = d.unwritten[n:]
	} else if n < len(b) {
		d.unwritten = append([]byte(nil), b[n:]...)
	}
	if len(d.unwritten) == 0 {
		d.unwritten = nil
	}
	return n
}

// write sends bytes to dst, in pieces that its socket sends separately where the kernel paces them:
// merged, up to 64 KiB would leave at once.
func (d *direction) write(b []byte) (int, unix.Errno) {
	if d.pieceSize == 0 || len(b) <= d.pieceSize {
		return send(d.dst.fd, b)
	}
	l, whole := d.session.proxy.loop, b
	n := 0
	for ; len(b) > 0 && n < len(l.pieces); n++ {
		piece := b[:min(d.pieceSize, len(b))]
		b = b[len(piece):]
		l.vectors[n].Base = &piece[0]
		l.vectors[n].SetLen(len(piece))
		l.pieces[n].header.Iov = &l.vectors[n]
		l.pieces[n].header.SetIovlen(1)
	}
	sent, _, errno := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(d.dst.fd), uintptr(unsafe.Pointer(&l.pieces[0])), uintptr(n),
		unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL|unix.MSG_EOR, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	total := 0
	for i := range int(sent) {
		total += int(l.pieces[i].len)
	}
	if last := &l.pieces[sent-1]; int(sent) < n && uint64(last.len) == l.vectors[sent-1].Len {
		// The error that ended the call is not reported, and may be lost: a reset.
		more, errno := send(d.dst.fd, whole[total:][:min(d.pieceSize, len(whole)-total)])
		if errno != 0 && errno != unix.EAGAIN {
			return 0, errno
		}
		total += more
	}
	return total, 0
}

// shutdown shuts down dst after the last byte of src. If src has failed, the session is reset instead.
func (d *direction) shutdown() {
	if d.src.failed {
		d.session.abort(d.src.resetEnding(), d.session.proxy.loop.now)
		return
	}
	d.srcEOF, d.dstShut = true, true
	if !d.session.up.dstShut || !d.session.down.dstShut { // else both sockets are closed right away
		_ = unix.Shutdown(d.dst.fd, unix.SHUT_WR)
	}
	l := d.session.proxy.loop
	d.session.activity.lastActive = l.now
	if d.session.config.Load().HalfClose > 0 {
		l.pacer.Schedule(&d.session.timer, l.now)
	}
}

// accept returns a connection of a listening socket, and the address of its client.
func accept(fd int) (int, netip.AddrPort, unix.Errno) {
	var name unix.RawSockaddrInet6
	size := uint32(unsafe.Sizeof(name))
	n, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(fd), uintptr(unsafe.Pointer(&name)),
		uintptr(unsafe.Pointer(&size)), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
	if errno != 0 {
		return -1, netip.AddrPort{}, errno
	}
	from, _ := fromSockaddr(&name)
	return int(n), unmap(from), 0
}

func recv(fd int, b []byte) (int, unix.Errno) { return recvfrom(fd, b, unix.MSG_DONTWAIT) }

// peek is recv without consuming the bytes.
func peek(fd int, b []byte) (int, unix.Errno) {
	return recvfrom(fd, b, unix.MSG_DONTWAIT|unix.MSG_PEEK)
}

func recvfrom(fd int, b []byte, flags uintptr) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd),
		uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), flags, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

func send(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd),
		uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

func splice(from, to, n int) (int, unix.Errno) {
	moved, _, errno := unix.RawSyscall6(unix.SYS_SPLICE, uintptr(from), 0, uintptr(to), 0, uintptr(n),
		unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
	if errno != 0 {
		return 0, errno
	}
	return int(moved), 0
}
