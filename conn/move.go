package conn

import (
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pipe holds bytes on their way between two sockets, in the kernel: they are not
// copied. A direction has one only while it holds some.
type pipe struct {
	r, w int
	n    int // bytes in it
}

const (
	// spliceMin is how many bytes have to come at once for a pipe to be worth its
	// two system calls more.
	spliceMin = 32 << 10

	// maxPipes is how many directions may hold a pipe with bytes that their
	// downstream does not take yet; others copy. A pipe takes two descriptors.
	maxPipes = 64
)

// takePipe returns an empty pipe, or nil when there is none to be had.
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
	// An error leaves the default of 64 KiB.
	_, _ = unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, maxGrant)
	l.pipeCount++
	return &pipe{r: fds[0], w: fds[1]}
}

// dropPipe ends a pipe that may hold bytes.
func (l *loop) dropPipe(p *pipe) {
	unix.Close(p.r)
	unix.Close(p.w)
	l.pipeCount--
}

// move moves at most limit bytes and returns how many dst took.
func (d *direction) move(limit int) int {
	n := 0
	switch {
	case d.pipe != nil:
		n = d.empty(limit)
	case d.bulk && limit >= spliceMin && d.piece == 0 && !d.src.unsure && len(d.left) == 0 && !d.ended && d.fill(limit):
		if d.pipe != nil {
			n = d.empty(limit)
		}
	default:
		n = d.copy(min(limit, scratchSize))
	}
	if n > 0 {
		d.moved += uint64(n)
		d.begun = d.moved > d.header
		d.bytes.Add(uint64(n))
		s, now := d.session, d.session.proxy.loop.now
		s.pace.moved += uint64(n)
		s.pace.active = now
		if now.Sub(s.settled) > tellEvery {
			s.settle(now)
		}
		if d.spent() {
			d.end()
		}
	}
	return n
}

// spent reports whether nothing is left of what src has sent, but its end.
func (d *direction) spent() bool {
	if !d.src.unsure || !d.src.readable || d.ended || len(d.left) > 0 || d.pipe != nil || d.session.stage != flowing {
		return false
	}
	n, errno := peek(d.src.fd, d.session.proxy.loop.scratch[:1])
	return errno == 0 && n == 0 || d.src.failed && errno != 0 && errno != unix.EAGAIN
}

// fill takes at most limit bytes of src into a pipe. It returns false, having done
// nothing, where that does not work.
func (d *direction) fill(limit int) bool {
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
		d.src.drained()
	case errno == unix.EINVAL || errno == unix.ENOMEM:
		l.pipes = append(l.pipes, p)
		d.bulk = false
		return false
	case errno != 0:
		d.session.abort(d.src.reset(), l.clock.Now())
	default:
		d.end()
	}
	l.pipes = append(l.pipes, p)
	return true
}

// empty gives dst at most limit bytes of the pipe, and returns how many it took.
func (d *direction) empty(limit int) int {
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
			d.session.lose(d.dst, l.clock.Now())
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

// copy is move by way of the loop's memory.
func (d *direction) copy(limit int) int {
	b := d.left
	if len(b) > limit {
		b = b[:limit]
	}
	if len(b) == 0 && !d.ended {
		n, errno := recv(d.src.fd, d.session.proxy.loop.scratch[:limit])
		switch {
		case errno == unix.EAGAIN:
			d.src.drained()
			return 0
		case errno != 0:
			d.session.abort(d.src.reset(), d.session.proxy.loop.clock.Now())
			return 0
		case n == 0:
			d.ended = true
		}
		b = d.session.proxy.loop.scratch[:n]
		d.bulk = n == limit
		if n > 0 && n < limit && !d.src.unsure {
			d.src.drained()
		}
	}
	if len(b) == 0 {
		if d.ended {
			d.end()
		}
		return 0
	}
	n, errno := d.put(b)
	switch {
	case errno == unix.EAGAIN:
		d.dst.writable = false
	case errno != 0:
		d.session.lose(d.dst, d.session.proxy.loop.clock.Now())
		return 0
	case n < len(b):
		d.dst.writable = false
	}
	if len(d.left) > 0 {
		d.left = d.left[n:]
	} else if n < len(b) {
		d.left = append([]byte(nil), b[n:]...)
	}
	if len(d.left) == 0 {
		d.left = nil
	}
	return n
}

// put gives dst bytes, in pieces that leave its socket one by one where the kernel paces
// them: joined, it would send up to 64 KiB at once.
func (d *direction) put(b []byte) (int, unix.Errno) {
	if d.piece == 0 || len(b) <= d.piece {
		return send(d.dst.fd, b)
	}
	l, whole := d.session.proxy.loop, b
	n := 0
	for ; len(b) > 0 && n < len(l.pieces); n++ {
		piece := b[:min(d.piece, len(b))]
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
		// The error that ended it is not told, and may be gone: a reset.
		more, errno := send(d.dst.fd, whole[total:][:min(d.piece, len(whole)-total)])
		if errno != 0 && errno != unix.EAGAIN {
			return 0, errno
		}
		total += more
	}
	return total, 0
}

// end passes on that src has sent its last byte, and that dst has got it. The last one
// before a failure is followed by a reset.
func (d *direction) end() {
	if d.src.failed {
		d.session.abort(d.src.reset(), d.session.proxy.loop.now)
		return
	}
	d.ended, d.shut = true, true
	if !d.session.up.shut || !d.session.down.shut { // else both sockets are closed at once
		_ = unix.Shutdown(d.dst.fd, unix.SHUT_WR)
	}
	l := d.session.proxy.loop
	d.session.pace.active = l.now
	if d.session.config.Load().HalfClose > 0 {
		l.pacer.Schedule(&d.session.timer, l.now)
	}
}

// accept returns a connection of a listening socket, and whose it is.
func accept(fd int) (int, netip.AddrPort, unix.Errno) {
	var name unix.RawSockaddrInet6
	size := uint32(unsafe.Sizeof(name))
	n, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(fd), uintptr(unsafe.Pointer(&name)),
		uintptr(unsafe.Pointer(&size)), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
	if errno != 0 {
		return -1, netip.AddrPort{}, errno
	}
	from, _ := fromSockaddr(&name)
	return int(n), unmapped(from), 0
}

func recv(fd int, b []byte) (int, unix.Errno) { return recvfrom(fd, b, unix.MSG_DONTWAIT) }

// peek is recv, but leaves the bytes where they are.
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
