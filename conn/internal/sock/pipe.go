package sock

import "golang.org/x/sys/unix"

// Pipe holds bytes on their way between two sockets, in the kernel: they are not copied.
type Pipe struct {
	r, w int
	n    int // bytes in it
}

// Len returns the number of bytes in p.
func (p *Pipe) Len() int { return p.n }

// Fill moves up to limit bytes from a socket to p, which is empty.
func (p *Pipe) Fill(fd, limit int) (errno unix.Errno) {
	p.n, errno = splice(fd, p.w, limit)
	return errno
}

// Drain moves up to limit bytes from p to a socket, and returns how many the socket accepted.
func (p *Pipe) Drain(fd, limit int) (int, unix.Errno) {
	n, errno := splice(p.r, fd, limit)
	p.n -= n
	return n, errno
}

func splice(from, to, n int) (int, unix.Errno) {
	moved, _, errno := unix.RawSyscall6(unix.SYS_SPLICE, uintptr(from), 0, uintptr(to), 0, uintptr(n),
		unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
	if errno != 0 {
		return 0, errno
	}
	return int(moved), 0
}

// PipePool has the empty pipes, and bounds the number of all: each takes two descriptors.
type PipePool struct {
	Max   int // pipes at once
	Size  int // bytes that each should hold
	empty []*Pipe
	open  int
}

// Take returns an empty pipe, or nil if none is available.
func (pp *PipePool) Take() *Pipe {
	if n := len(pp.empty); n > 0 {
		p := pp.empty[n-1]
		pp.empty = pp.empty[:n-1]
		return p
	}
	if pp.open >= pp.Max {
		return nil
	}
	var fds [2]int
	if unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC) != nil {
		return nil
	}
	// On an error it keeps the default of 64 KiB.
	_, _ = unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, pp.Size)
	pp.open++
	return &Pipe{r: fds[0], w: fds[1]}
}

// Put returns an empty pipe to the pool.
func (pp *PipePool) Put(p *Pipe) { pp.empty = append(pp.empty, p) }

// Drop closes a pipe that may hold bytes.
func (pp *PipePool) Drop(p *Pipe) {
	unix.Close(p.r)
	unix.Close(p.w)
	pp.open--
}

// Close closes the empty pipes.
func (pp *PipePool) Close() {
	for _, p := range pp.empty {
		pp.Drop(p)
	}
	pp.empty = nil
}

// Descriptors returns the number of descriptors of all pipes.
func (pp *PipePool) Descriptors() int { return 2 * pp.open }

// InUse returns the number of pipes that were taken.
func (pp *PipePool) InUse() int { return pp.open - len(pp.empty) }
