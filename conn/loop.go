// Owner: the loop's thread, except for what a lock protects.

package conn

import (
	"fmt"
	"net/netip"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// watcher handles the events of a descriptor.
type watcher interface {
	ready(events uint32, now leaky.Time)
}

// loop is the thread that moves bytes.
type loop struct {
	clock     *pacer.Clock
	pacer     *pacer.Pacer
	scheduler *scheduler
	sharing   *sharing
	quotas    *quotas

	epoll         int
	wakeFD        int // eventfd; written with mu, which others need to read it
	registrations []registration
	events        [128]unix.EpollEvent
	timeout       [2]int64               // struct __kernel_timespec, of 64-bit words on every processor
	deferred      []func(now leaky.Time) // work for the next round
	spare         []func(now leaky.Time)
	scratch       []byte // data on its way from one socket to another
	pieces        sock.Pieces
	pipes         sock.PipePool
	headroom      *headroom
	now           leaky.Time // start of the round
	moderation    moderation
	rounds        uint64 // so far
	quick         int    // how many polls in succession have returned events within busyWait
	stopping      bool

	batch  *sock.Batch
	train  train // the datagrams of batch
	single train // a datagram that was queued
	memory memory

	done chan struct{} // closed when run ends

	mu sync.Mutex
	// mu protects:
	posted []func(now leaky.Time)
}

// registration is the watcher of a descriptor. generation distinguishes the descriptor from an earlier
// one of the same number, of which an event may still be pending.
type registration struct {
	watcher    watcher
	events     uint32
	generation int32
}

// pollWindow is how close a departure must be for the loop to poll sockets without waiting. A wake-up
// takes 20 us, and the work it brings as long again, which would make the departure late. Sockets then
// wait up to pollWindow.
const pollWindow = leaky.Second / 1e6 * 100

// busyWait is how soon events must follow one another, for busyPolls polls, for the loop to be busy. Its waits are no longer
// then: a thread that is busy should keep its Go processor, but other goroutines may need it.
const (
	busyWait  = leaky.Second / 1e6 * 200
	busyPolls = 4
)

// scratchSize is the most that is copied from one TCP socket to the other at once.
const scratchSize = 64 << 10

func newLoop(clock *pacer.Clock, s *shaper.Shaper, h *headroom) (*loop, error) {
	l := &loop{
		clock:    clock,
		pacer:    pacer.New(clock),
		scratch:  make([]byte, scratchSize),
		batch:    sock.NewBatch(),
		pipes:    sock.PipePool{Size: maxGrant, Open: &h.pipes, Max: maxPipes},
		memory:   memory{holders: map[netip.Addr]*holder{}},
		headroom: h,
		done:     make(chan struct{}),
	}
	l.sharing = newSharing(s, &l.pacer.Wheel, clock.Now, clock.Boot)
	l.scheduler = l.sharing.scheduler
	var err error
	if l.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("create epoll: %w", err)
	}
	if l.wakeFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		unix.Close(l.epoll)
		return nil, fmt.Errorf("create eventfd: %w", err)
	}
	h.sockets.Add(1) // that of epoll
	err = l.watch(l.wakeFD, unix.EPOLLIN, wakeup{l})
	if err == nil {
		if _, errno := l.epollWait(true); errno != 0 && errno != unix.EINTR {
			err = fmt.Errorf("epoll_pwait2, which requires Linux 5.11: %w", errno)
		}
	}
	if err != nil {
		l.unwatch(l.wakeFD)
		h.sockets.Add(-1)
		unix.Close(l.epoll)
		unix.Close(l.wakeFD)
		return nil, err
	}
	return l, nil
}

// run runs the loop until stop is called. It closes the loop's own descriptors.
func (l *loop) run() {
	l.pacer.Run(l.round)
	wakeFD := l.wakeFD
	l.clearWatch(wakeFD)
	l.mu.Lock()
	unix.Close(wakeFD)
	l.wakeFD = -1
	l.mu.Unlock()
	unix.Close(l.epoll)
	l.headroom.sockets.Add(-1)
	l.pipes.Close()
	close(l.done)
}

// stop ends run after the posted work is done, and waits for that.
func (l *loop) stop() {
	l.post(func(leaky.Time) { l.stopping = true })
	<-l.done
}

// post calls f on the loop's thread. After stop f is discarded.
func (l *loop) post(f func(now leaky.Time)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.posted = append(l.posted, f)
	if len(l.posted) == 1 && l.wakeFD >= 0 {
		one := uint64(1)
		_, _ = unix.Write(l.wakeFD, unsafe.Slice((*byte)(unsafe.Pointer(&one)), 8)) // EAGAIN means that a wake-up is pending
	}
}

// call calls f on the loop's thread and waits for it.
func (l *loop) call(f func(now leaky.Time)) {
	ran := make(chan struct{})
	l.post(func(now leaky.Time) { f(now); close(ran) })
	select {
	case <-ran:
	case <-l.done:
	}
}

// runLater calls f in the next round, after other sockets had their turn.
func (l *loop) runLater(f func(now leaky.Time)) { l.deferred = append(l.deferred, f) }

// watch makes w handle the events on fd.
func (l *loop) watch(fd int, events uint32, w watcher) error {
	for fd >= len(l.registrations) {
		l.registrations = append(l.registrations, registration{})
	}
	at := &l.registrations[fd]
	at.watcher, at.events = w, events
	at.generation++
	ev := unix.EpollEvent{Events: events, Fd: int32(fd), Pad: at.generation}
	if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		at.watcher = nil
		return fmt.Errorf("watch socket: %w", err)
	}
	l.headroom.sockets.Add(1)
	return nil
}

// setEvents changes the events of a watched descriptor.
func (l *loop) setEvents(fd int, events uint32) {
	at := &l.registrations[fd]
	at.events = events
	ev := unix.EpollEvent{Events: events, Fd: int32(fd), Pad: at.generation}
	_ = unix.EpollCtl(l.epoll, unix.EPOLL_CTL_MOD, fd, &ev)
}

// close closes a descriptor that may be watched and has no duplicate.
func (l *loop) close(fd int) {
	l.clearWatch(fd)
	sock.Close(fd)
}

// unwatch undoes watch.
func (l *loop) unwatch(fd int) {
	l.clearWatch(fd)
	_ = unix.EpollCtl(l.epoll, unix.EPOLL_CTL_DEL, fd, nil)
}

func (l *loop) clearWatch(fd int) {
	if fd < len(l.registrations) && l.registrations[fd].watcher != nil {
		l.registrations[fd].watcher = nil
		l.headroom.sockets.Add(-1)
	}
}

// round waits until something is ready, or until the time until, and handles it. If a departure is
// near it handles what is ready, and then sleeps until the departure. While many datagrams arrive it rests.
func (l *loop) round(until leaky.Time) bool {
	if len(l.deferred) > 0 {
		until = 0
	}
	before := l.clock.Now()
	wait := until.Sub(before)
	n := 0
	if wait > pollWindow {
		n = l.poll(wait)
	} else {
		n = l.poll(0)
	}
	now := l.clock.Now()
	l.now = now
	l.rounds++
	if n > 0 && now.Sub(before) < busyWait {
		l.quick++
	} else {
		l.quick = 0
	}
	l.pacer.Skip(now)
	for i := range n {
		ev := &l.events[i]
		if at := l.registrations[ev.Fd]; at.watcher != nil && at.generation == ev.Pad {
			at.watcher.ready(ev.Events, now)
			l.pacer.Fire()
		}
	}
	work := l.deferred
	l.deferred = l.spare[:0]
	for i, f := range work {
		work[i] = nil
		f(now)
		l.pacer.Fire()
	}
	l.spare = work
	if wait > pollWindow {
		until = l.moderation.rest(now)
	}
	if until > now && len(l.deferred) == 0 {
		if at, ok := l.pacer.Next(); ok { // it may be earlier now
			until = min(until, at)
		}
		l.clock.Sleep(until)
	}
	return !l.stopping
}

// poll waits for events, for at most timeout. A long wait ends slightly early and releases the Go
// processor; a short one keeps it, see [pacer.MaxShortWait]. Those of a busy loop are short.
func (l *loop) poll(timeout leaky.Time) int {
	if l.quick >= busyPolls {
		timeout = min(timeout, busyWait)
	}
	short := timeout <= pacer.MaxShortWait
	if !short {
		timeout -= leaky.FromDuration(time.Millisecond)
	}
	ns := int64(min(timeout, leaky.Forever/2).Duration())
	l.timeout = [2]int64{ns / 1e9, ns % 1e9}
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

// wakeup runs the posted work.
type wakeup struct{ *loop }

func (w wakeup) ready(_ uint32, now leaky.Time) {
	var count [8]byte
	_, _ = unix.Read(w.wakeFD, count[:])
	w.mu.Lock()
	posted := w.posted
	w.posted = nil
	w.mu.Unlock()
	for _, f := range posted {
		f(now)
	}
}
