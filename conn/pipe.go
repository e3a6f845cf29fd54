package conn

import (
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
