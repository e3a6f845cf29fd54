package sock

import (
	"sync/atomic"

	"golang.org/x/sys/unix"
)

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

// PipePool has the empty pipes of a thread, and bounds the number of those of all threads: each takes two descriptors.
type PipePool struct {
	Open  *atomic.Int64 // pipes, of all pools
	Max   int           // maximum of Open
	Size  int           // bytes that each should hold
	empty []*Pipe
	inUse int
}

// Take returns an empty pipe, or nil if none is available.
func (pp *PipePool) Take() *Pipe {
	if n := len(pp.empty); n > 0 {
		p := pp.empty[n-1]
		pp.empty = pp.empty[:n-1]
		pp.inUse++
		return p
	}
	var fds [2]int
	if pp.Open.Add(1) > int64(pp.Max) || unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC) != nil {
		pp.Open.Add(-1)
		return nil
	}
	// On an error it keeps the default of 64 KiB.
	_, _ = unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, pp.Size)
	pp.inUse++
	return &Pipe{r: fds[0], w: fds[1]}
}

// maxEmpty is how many empty pipes a pool keeps. Most moves need one, and only for a moment.
const maxEmpty = 4

// Put returns an empty pipe to the pool. It is closed if the pool has enough, or if it has any and other pools may have none.
func (pp *PipePool) Put(p *Pipe) {
	pp.inUse--
	if n := len(pp.empty); n >= maxEmpty || n > 0 && pp.Open.Load() >= int64(pp.Max) {
		pp.close(p)
		return
	}
	pp.empty = append(pp.empty, p)
}

// Drop closes a pipe that was taken, and may hold bytes.
func (pp *PipePool) Drop(p *Pipe) {
	pp.close(p)
	pp.inUse--
}

func (pp *PipePool) close(p *Pipe) {
	unix.Close(p.r)
	unix.Close(p.w)
	pp.Open.Add(-1)
}

// Absorb takes over the pipes of o, which ends.
func (pp *PipePool) Absorb(o *PipePool) {
	pp.empty = append(pp.empty, o.empty...)
	pp.inUse += o.inUse
	o.empty, o.inUse = nil, 0
}

// Close closes the empty pipes.
func (pp *PipePool) Close() {
	for _, p := range pp.empty {
		pp.close(p)
	}
	pp.empty = nil
}

// InUse returns the number of pipes that were taken.
func (pp *PipePool) InUse() int { return pp.inUse }
