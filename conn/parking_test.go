package conn

import (
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// parkingRig is a parking for an epoll instance that watches an eventfd.
type parkingRig struct {
	*parking
	event int
}

// newParkingRig returns a rig. Its poll takes an event.
func newParkingRig(t *testing.T) *parkingRig {
	r := &parkingRig{}
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	must(t, err)
	t.Cleanup(func() { unix.Close(epoll) })
	r.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	must(t, err)
	t.Cleanup(func() { unix.Close(r.event) })
	must(t, unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, r.event, &unix.EpollEvent{Events: unix.EPOLLIN}))
	r.parking, err = newParking(epoll, func() bool {
		_, err := unix.Read(r.event, make([]byte, 8))
		return err == nil
	})
	must(t, err)
	t.Cleanup(r.close)
	return r
}

func (r *parkingRig) signal() { _, _ = unix.Write(r.event, []byte{1, 0, 0, 0, 0, 0, 0, 0}) }

// watched reports whether the runtime would be told of what is ready.
func (r *parkingRig) watched(t *testing.T) bool {
	t.Helper()
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(r.fd), Events: unix.POLLIN}}, 0)
	must(t, err)
	return n == 1
}

func TestParking_EndsWithTheEvent(t *testing.T) {
	r := newParkingRig(t)
	for name, before := range map[string]func(){
		"before": r.signal,
		"while it waits": func() {
			go func() { time.Sleep(20 * time.Millisecond); r.signal() }()
		},
	} {
		begun := time.Now()
		before()
		if r.wait(time.Minute); time.Since(begun) > testTimeout {
			t.Errorf("an event %s: waited %v", name, time.Since(begun))
		}
	}
}

func TestParking_EndsInTime(t *testing.T) {
	r := newParkingRig(t)
	for range 3 { // a deadline that has passed is no obstacle for the next wait
		begun := time.Now()
		r.wait(30 * time.Millisecond)
		if took := time.Since(begun); took < 29*time.Millisecond || took > testTimeout {
			t.Errorf("waited %v, want 30ms", took)
		}
	}
}

// Events that come between two waits do not wake up the runtime, and end the next wait.
func TestParking_WatchesOnlyWhileItWaits(t *testing.T) {
	r := newParkingRig(t)
	r.signal()
	if r.watched(t) {
		t.Error("the runtime is woken up by an event while nothing waits")
	}
	r.watch(unix.EPOLLIN)
	if !r.watched(t) {
		t.Error("the runtime is not woken up by an event")
	}
	r.watch(0)
	begun := time.Now()
	if r.wait(time.Minute); time.Since(begun) > testTimeout {
		t.Errorf("waited %v", time.Since(begun))
	}
}

// No event is lost, whenever it comes.
func TestParking_LosesNoEvent(t *testing.T) {
	r := newParkingRig(t)
	var taken atomic.Int64
	stop := make(chan struct{})
	go func() {
		defer close(stop)
		for i := range int64(2000) {
			for taken.Load() < i {
				time.Sleep(time.Duration(rand.IntN(20)) * time.Microsecond)
			}
			r.signal()
		}
	}()
	for i := range 2000 {
		begun := time.Now()
		if r.wait(time.Minute); time.Since(begun) > testTimeout {
			t.Fatalf("event %d: waited %v", i, time.Since(begun))
		}
		taken.Add(1)
	}
	<-stop
}

// A loop without events gives its Go processor away, and takes it back early enough before a departure that goroutines which use all
// processors, each for up to 10 ms, do not delay it.
func TestLoop_TakesProcessorBackInTime(t *testing.T) {
	l, err := newLoop(pacer.NewClock(), shaper.New(10), &headroom{})
	must(t, err)
	defer func() {
		go l.run()
		l.stop()
	}()
	const ahead, early = 60 * time.Millisecond, 10 * time.Millisecond
	begun := time.Now()
	for { // a busy host may delay some
		at := time.Now()
		n := l.poll(leaky.FromDuration(ahead))
		took := time.Since(at)
		if n != 0 {
			t.Fatalf("%d events", n)
		}
		if took <= ahead-early {
			return
		}
		if time.Since(begun) > testTimeout {
			t.Fatalf("waited %v of %v, want %v less", took, ahead, early)
		}
	}
}
