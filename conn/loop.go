package conn

import (
	"fmt"
	"net/netip"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

// watcher is told when its descriptor has something to do.
type watcher interface {
	ready(events uint32, now leaky.Time)
}

// loop is the thread that moves bytes. Its fields belong to that thread, but for
// the posted work.
type loop struct {
	clock *leaky.Clock
	pacer *leaky.Pacer
	lines *lines

	epoll     int
	wake      int // eventfd; closed under mu
	watched   []watched
	events    [128]unix.EpollEvent
	timeout   unix.Timespec
	again     []func(now leaky.Time) // work left over, for the next round
	spare     []func(now leaky.Time)
	scratch   []byte // what is in hand while it moves from socket to socket
	pieces    [maxTrain]mmsghdr
	vectors   [maxTrain]unix.Iovec // of pieces
	pipes     []*pipe              // empty ones
	pipeCount int
	headroom  *headroom
	now       leaky.Time // when the round began
	stopping  bool

	batch  *batch
	memory memory

	mu     sync.Mutex
	posted []func(now leaky.Time)
	done   chan struct{}
}

// watched is who is told about a descriptor. generation tells a descriptor from
// an earlier one of the same number, of which an event may still be in hand.
type watched struct {
	watcher    watcher
	generation int32
}

// punctual is how close a departure is when sockets are only looked at, and not
// waited for: a wake-up takes 20 us, and what it brings about as long again, which
// would make the departure late. Sockets then wait up to punctual.
const punctual = leaky.Second / 1e6 * 100

// scratchSize is the most that is copied from one TCP socket to the other at once.
const scratchSize = 64 << 10

func newLoop(clock *leaky.Clock, s *shaper.Shaper) (*loop, error) {
	l := &loop{
		clock:   clock,
		pacer:   leaky.NewPacer(clock),
		scratch: make([]byte, scratchSize),
		batch:   newBatch(),
		memory:  memory{most: maxQueued, holders: map[netip.Addr]*holder{}},
		done:    make(chan struct{}),
	}
	l.lines = newLines(s, &l.pacer.Wheel, clock.Now)
	var err error
	if l.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("create epoll: %w", err)
	}
	if l.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		unix.Close(l.epoll)
		return nil, fmt.Errorf("create eventfd: %w", err)
	}
	l.headroom = newHeadroom()
	err = l.watch(l.wake, unix.EPOLLIN, wakeup{l})
	if err == nil {
		if _, errno := l.epollWait(true); errno != 0 && errno != unix.EINTR {
			err = fmt.Errorf("wait for sockets: epoll_pwait2, which Linux has since 5.11: %w", errno)
		}
	}
	if err != nil {
		l.headroom.close()
		unix.Close(l.epoll)
		unix.Close(l.wake)
		return nil, err
	}
	return l, nil
}

// run works until stop is called. It closes the loop's own descriptors.
func (l *loop) run() {
	l.pacer.Run(l.round)
	l.mu.Lock()
	unix.Close(l.wake)
	l.wake = -1
	l.mu.Unlock()
	unix.Close(l.epoll)
	l.headroom.close()
	for _, p := range l.pipes {
		l.dropPipe(p)
	}
	close(l.done)
}

// stop ends run, once what is posted has been done, and waits for it.
func (l *loop) stop() {
	l.post(func(leaky.Time) { l.stopping = true })
	<-l.done
}

// post has f called on the loop's thread. After stop it is lost.
func (l *loop) post(f func(now leaky.Time)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.posted = append(l.posted, f)
	if len(l.posted) == 1 && l.wake >= 0 {
		one := uint64(1)
		_, _ = unix.Write(l.wake, unsafe.Slice((*byte)(unsafe.Pointer(&one)), 8)) // full is a wake-up already
	}
}

// call has f called on the loop's thread and waits for it.
func (l *loop) call(f func(now leaky.Time)) {
	ran := make(chan struct{})
	l.post(func(now leaky.Time) { f(now); close(ran) })
	select {
	case <-ran:
	case <-l.done:
	}
}

// later has f called in the next round, after other sockets had their turn.
func (l *loop) later(f func(now leaky.Time)) { l.again = append(l.again, f) }

// watch has w told about events on fd.
func (l *loop) watch(fd int, events uint32, w watcher) error {
	for fd >= len(l.watched) {
		l.watched = append(l.watched, watched{})
	}
	at := &l.watched[fd]
	at.watcher = w
	at.generation++
	ev := unix.EpollEvent{Events: events, Fd: int32(fd), Pad: at.generation}
	if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		at.watcher = nil
		return fmt.Errorf("watch socket: %w", err)
	}
	l.headroom.sockets++
	return nil
}

// rewatch changes the events of a descriptor that is watched.
func (l *loop) rewatch(fd int, events uint32) {
	ev := unix.EpollEvent{Events: events, Fd: int32(fd), Pad: l.watched[fd].generation}
	_ = unix.EpollCtl(l.epoll, unix.EPOLL_CTL_MOD, fd, &ev)
}

// close closes a descriptor that may be watched, and of which there is no duplicate.
func (l *loop) close(fd int) {
	l.unwatch(fd)
	unix.Close(fd)
}

// forget ends watch.
func (l *loop) forget(fd int) {
	l.unwatch(fd)
	_ = unix.EpollCtl(l.epoll, unix.EPOLL_CTL_DEL, fd, nil)
}

func (l *loop) unwatch(fd int) {
	if fd < len(l.watched) && l.watched[fd].watcher != nil {
		l.watched[fd].watcher = nil
		l.headroom.sockets--
	}
}

// round waits until something is ready, at most until until, and handles it.
// Before a departure that is near it handles what is ready, and waits for that.
func (l *loop) round(until leaky.Time) bool {
	if len(l.again) > 0 {
		until = 0
	}
	wait := until.Sub(l.clock.Now())
	n := 0
	if wait > punctual {
		n = l.poll(wait)
	} else {
		n = l.poll(0)
	}
	now := l.clock.Now()
	l.now = now
	l.pacer.Skip(now)
	for i := range n {
		ev := &l.events[i]
		if at := l.watched[ev.Fd]; at.watcher != nil && at.generation == ev.Pad {
			at.watcher.ready(ev.Events, now)
			l.pacer.Fire()
		}
	}
	work := l.again
	l.again = l.spare[:0]
	for i, f := range work {
		work[i] = nil
		f(now)
		l.pacer.Fire()
	}
	l.spare = work
	if wait <= punctual && len(l.again) == 0 {
		if at, ok := l.pacer.Next(); ok { // it may be sooner now
			until = min(until, at)
		}
		l.clock.Sleep(until)
	}
	return !l.stopping
}

// poll waits for events, at most for timeout. A long wait is left a little early
// and without a Go processor; a short one keeps it, see [leaky.ShortWait].
func (l *loop) poll(timeout leaky.Time) int {
	short := leaky.ShortWait(timeout)
	if !short {
		timeout -= leaky.FromDuration(time.Millisecond)
	}
	l.timeout = unix.NsecToTimespec(int64(min(timeout, leaky.Forever/2).Duration()))
	n, errno := l.epollWait(short)
	if errno != 0 { // EINTR
		return 0
	}
	return n
}

func (l *loop) epollWait(short bool) (int, unix.Errno) {
	var n uintptr
	var errno unix.Errno
	if short {
		n, _, errno = unix.RawSyscall6(unix.SYS_EPOLL_PWAIT2, uintptr(l.epoll), uintptr(unsafe.Pointer(&l.events[0])),
			uintptr(len(l.events)), uintptr(unsafe.Pointer(&l.timeout)), 0, 0)
	} else {
		n, _, errno = unix.Syscall6(unix.SYS_EPOLL_PWAIT2, uintptr(l.epoll), uintptr(unsafe.Pointer(&l.events[0])),
			uintptr(len(l.events)), uintptr(unsafe.Pointer(&l.timeout)), 0, 0)
	}
	return int(n), errno
}

// wakeup does the posted work.
type wakeup struct{ *loop }

func (w wakeup) ready(_ uint32, now leaky.Time) {
	var count [8]byte
	_, _ = unix.Read(w.wake, count[:])
	w.mu.Lock()
	posted := w.posted
	w.posted = nil
	w.mu.Unlock()
	for _, f := range posted {
		f(now)
	}
}
