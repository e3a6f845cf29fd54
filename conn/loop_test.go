package conn

import (
	"testing"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// busySocket is always ready, and each event of it takes a while.
type busySocket struct {
	*loop
	takes leaky.Time
}

func (b busySocket) ready(uint32, leaky.Time) { b.spin(b.takes) }

func (l *loop) spin(d leaky.Time) {
	for begun := l.clock.Now(); l.clock.Now() < begun+d; {
		continue
	}
}

// saturate makes sockets of l always ready, many more than one round handles.
func saturate(t *testing.T, l *loop, takes leaky.Time) {
	t.Helper()
	var fds []int
	for range 20 * len(l.events) {
		fd, err := unix.Eventfd(1, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			t.Fatal(err)
		}
		fds = append(fds, fd)
	}
	l.call(func(leaky.Time) {
		for _, fd := range fds {
			if err := l.watch(fd, unix.EPOLLIN, busySocket{l, takes}); err != nil {
				t.Error(err)
			}
		}
	})
	t.Cleanup(func() {
		l.call(func(leaky.Time) {
			for _, fd := range fds {
				l.close(fd)
			}
		})
	})
}

// Work that is posted to a saturated loop runs in the next round. (It waited until epoll had reported all sockets that were ready.)
func TestLoop_RunsPostedWorkInEachRound(t *testing.T) {
	l := newApplyRig(t, shaper.TCP, "127.0.0.1:9").proxy.home.loop
	saturate(t, l, leaky.Second/1e6)
	for range 20 {
		waited := make(chan uint64, 1)
		l.call(func(leaky.Time) {
			posted := l.rounds
			l.post(func(leaky.Time) { waited <- l.rounds - posted })
		})
		if n := <-waited; n > 1 {
			t.Fatalf("posted work waited for %d rounds, want 1", n)
		}
	}
}

// A change has a part of the time of a saturated loop, however long its rounds are. (It had followSlice after each turn of all sockets, and
// the bypass took effect after 4 to 14 s.)
func TestApply_ShareOfSaturatedLoop(t *testing.T) {
	l := newApplyRig(t, shaper.TCP, "127.0.0.1:9").proxy.home.loop
	saturate(t, l, leaky.Second/20000) // a round takes 6.4 ms
	var r registry[*session]
	var begun, end uint64
	var longest, last leaky.Time // from one update to the next
	l.call(func(now leaky.Time) {
		for i := range 400 {
			r.add(&session{}, uint64(i))
		}
		begun, last = l.rounds, now
	})
	inBatches(l, &r, func(*session, leaky.Time) {
		now := l.clock.Now()
		longest, last = max(longest, now-last), now
		l.spin(followSlice / 5)
		end = l.rounds
	})
	// 400 updates of 100 us, a quarter of 6.4 ms after each round, whole batches of 8: 25 rounds, and more where the thread waits for a
	// processor in an update, up to one for each batch. Where it waits for long in a round all of them may have their turn after that.
	const work = 400 * followSlice / 5
	if took := end - begun; took < 2 && longest < work || took > 100 {
		t.Errorf("the change took %d rounds, want about 25", took)
	}
}
