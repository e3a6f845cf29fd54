// Owner: the loop's thread, except for what a lock protects.

package conn

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
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
	parking       *parking
	wakeFD        int // eventfd; written with mu, which others need to read it
	registrations []registration
	events        [128]unix.EpollEvent
	polled        int                    // events of the last poll
	timeout       [2]int64               // struct __kernel_timespec, of 64-bit words on every processor
	deferred      []func(now leaky.Time) // work for the next round
	spare         []func(now leaky.Time)
	scratch       []byte // data on its way from one socket to another
	pieces        sock.Pieces
	pipes         sock.PipePool
	headroom      *headroom
	now           leaky.Time // start of the round
	hearing       hearing
	moderation    moderation
	rounds        uint64 // so far
	stopping      bool

	batch  *sock.Batch
	train  train // the datagrams of batch
	single train // a datagram that was queued
	memory memory

	done chan struct{} // closed when run ends

	hasPosted atomic.Bool // len(posted) > 0

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

const (
	// busyWait is the longest wait after events: others often follow, and a thread that is busy should keep its Go processor.
	busyWait = leaky.Second / 1e6 * 200

	maxParking = 3600 * leaky.Second
)

// loopDescriptors are the descriptors of a loop besides those that it watches: of its epoll instance, and of parking.
const loopDescriptors = 2

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
	h.sockets.Add(loopDescriptors)
	err = l.watch(l.wakeFD, unix.EPOLLIN, wakeup{l})
	if err == nil {
		if errno := l.wait(0); errno != 0 && errno != unix.EINTR {
			err = fmt.Errorf("epoll_pwait2, which requires Linux 5.11: %w", errno)
		}
	}
	if err == nil {
		l.parking, err = newParking(l.epoll, func() bool { return l.wait(0) == 0 && l.polled > 0 })
	}
	if err != nil {
		l.unwatch(l.wakeFD)
		h.sockets.Add(-loopDescriptors)
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
	l.parking.close()
	unix.Close(l.epoll)
	l.headroom.sockets.Add(-loopDescriptors)
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
	l.hasPosted.Store(true)
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
	l.hearing.sockets++
	ev := unix.EpollEvent{Events: events, Fd: int32(fd), Pad: at.generation}
	if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		at.watcher = nil
		l.hearing.sockets--
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
		l.hearing.sockets--
		l.headroom.sockets.Add(-1)
	}
}

// round waits until something is ready, or until the time until, and handles it. If a departure is
// near it handles what is ready, and then sleeps until the departure. While many datagrams arrive it rests.
func (l *loop) round(until leaky.Time) bool {
	if l.hasDeferred() {
		until = 0
	}
	l.hearing.begun = l.clock.Now()
	wait := until.Sub(l.hearing.begun)
	n := 0
	if wait > pollWindow {
		n = l.poll(wait)
	} else {
		n = l.poll(0)
	}
	now := l.clock.Now()
	l.now = now
	l.rounds++
	l.pacer.Skip(now)
	for i := range n {
		ev := &l.events[i]
		if at := l.registrations[ev.Fd]; at.watcher != nil && at.generation == ev.Pad {
			at.watcher.ready(ev.Events, now)
			l.pacer.Fire()
		}
	}
	if l.hasPosted.Load() {
		l.runPosted(now)
	}
	work := l.deferred
	l.deferred = l.spare[:0]
	for i, f := range work {
		work[i] = nil
		f(now)
		l.pacer.Fire()
	}
	l.spare = work
	l.hearing.end(n, len(l.events))
	l.pacer.FireDeferred(now)
	if wait > pollWindow {
		until = l.moderation.rest(now)
	}
	if until > now && !l.hasDeferred() {
		if at, ok := l.pacer.Next(); ok { // it may be earlier now
			until = min(until, at)
		}
		l.clock.Sleep(until)
	}
	return !l.stopping
}

// poll waits for events, for at most timeout, and returns how many there are. A long wait releases the Go processor, and ends
// [pacer.MaxShortWait] early: the timers of the runtime are coarse, and it takes time to get a processor back. A short one keeps it.
func (l *loop) poll(timeout leaky.Time) int {
	if l.polled > 0 {
		timeout = min(timeout, busyWait)
	}
	if timeout <= pacer.MaxShortWait {
		_ = l.wait(timeout) // or EINTR
	} else {
		l.parking.wait(min(timeout-pacer.MaxShortWait, maxParking).Duration())
	}
	return l.polled
}

// wait is a poll that keeps the Go processor.
func (l *loop) wait(timeout leaky.Time) unix.Errno {
	ns := int64(timeout.Duration())
	l.timeout = [2]int64{ns / 1e9, ns % 1e9}
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT2, uintptr(l.epoll), uintptr(unsafe.Pointer(&l.events[0])),
		uintptr(len(l.events)), uintptr(unsafe.Pointer(&l.timeout)), 0, 0)
	if l.polled = int(n); errno != 0 {
		l.polled = 0
	}
	return errno
}

// hasDeferred reports whether work waits for the next round, which then must not wait.
func (l *loop) hasDeferred() bool { return len(l.deferred) > 0 || l.pacer.HasDeferred() }

// runPosted runs the posted work. It does so in each round: the event of wakeFD may come many rounds late, since epoll reports it
// after those of all sockets that were ready before.
func (l *loop) runPosted(now leaky.Time) {
	l.mu.Lock()
	posted := l.posted
	l.posted = nil
	l.hasPosted.Store(false)
	l.mu.Unlock()
	for _, f := range posted {
		f(now)
	}
	l.pacer.Fire()
}

// wakeup ends a wait when work is posted.
type wakeup struct{ *loop }

func (w wakeup) ready(uint32, leaky.Time) {
	var count [8]byte
	_, _ = unix.Read(w.wakeFD, count[:])
}
