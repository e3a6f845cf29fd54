package netns

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// stallEnv is set in the environment of the process that watches for stalls. A separate
// process sees stalls of the machine, but not of the test's runtime.
const stallEnv = "SHAPERD_NETNS_STALLS"

const (
	stallPeriod = 200 * time.Microsecond // sleep between two clock readings
	minStall    = 300 * time.Microsecond // minimum lateness of a wake-up that counts as a stall
)

// A stall of this program delays what the test sends and receives, but nothing that passes between the daemon and a
// capture. Shorter ones do not empty the buffers of senders.
const minOwnStall = 20 * time.Millisecond

// A stall is a late wake-up.
type stall struct {
	cpu  int
	at   time.Time // when the wake-up was due
	late time.Duration
	own  bool // of this program, as one of its threads has seen it
}

type stallReport []stall

// machine returns the stalls that other processes have as well.
func (r stallReport) machine() stallReport {
	return slices.DeleteFunc(slices.Clone(r), func(s stall) bool { return s.own })
}

func (r stallReport) longest() time.Duration {
	var d time.Duration
	for _, s := range r {
		d = max(d, s.late)
	}
	return d
}

// medianWindow divides the time into equal windows, and returns the median of their
// longest stalls. It is 0 if most windows have no stall.
func (r stallReport) medianWindow(windows int) time.Duration {
	if len(r) < 2 {
		return 0
	}
	early := func(a, b stall) int { return a.at.Compare(b.at) }
	first := slices.MinFunc(r, early).at
	span := slices.MaxFunc(r, early).at.Sub(first) + 1
	longest := make([]time.Duration, windows)
	for _, s := range r {
		w := &longest[int(s.at.Sub(first)*time.Duration(windows)/span)]
		*w = max(*w, s.late)
	}
	slices.Sort(longest)
	return longest[windows/2]
}

// sum returns the total time in stalls of at least a millisecond, over all processors, in seconds.
func (r stallReport) sum() float64 {
	var d time.Duration
	for _, s := range r {
		if s.late >= time.Millisecond {
			d += s.late
		}
	}
	return d.Seconds()
}

// maxWithin returns the largest total of stalls in any window of the given length, over
// all processors: the additional delay of a unit that is in flight for that long.
func (r stallReport) maxWithin(window time.Duration) (most time.Duration) {
	for _, first := range r {
		var sum time.Duration
		for _, s := range r {
			if after := s.at.Sub(first.at); after >= 0 && after < window {
				sum += s.late
			}
		}
		most = max(most, sum)
	}
	return most
}

// share returns the share of stalls in the time watched: the possible shortfall of a
// pacer that does not catch up. It is at most one half.
func (r stallReport) share(watched time.Duration) float64 {
	return min(r.sum()/watched.Seconds(), 0.5)
}

// noisy reports whether the machine stalled so much during the time watched that a
// measurement may show the machine and not the daemon.
func (r stallReport) noisy(watched time.Duration) bool {
	return r.longest() > 2*time.Millisecond || r.share(watched) > 0.01
}

// awaitQuiet waits until the machine is not noisy for a moment, at most for some seconds.
func awaitQuiet(t *testing.T) {
	const moment = 500 * time.Millisecond
	for range 10 {
		watch := startStallWatch(t)
		time.Sleep(moment)
		if !watch.stop().noisy(moment) {
			return
		}
	}
}

// retryOnStall fails the test with the error of measure. If the machine was noisy
// meanwhile, it measures again, at most four times: a defect fails each time.
func retryOnStall(t *testing.T, measure func() (stallReport, error)) {
	t.Helper()
	for retries := 4; ; retries-- {
		start := time.Now()
		report, err := measure()
		if err == nil {
			return
		}
		if retries == 0 || !report.noisy(time.Since(start)) {
			t.Error(err)
			return
		}
		t.Logf("retrying, because the machine had %v: %v", report, err)
		awaitQuiet(t)
	}
}

func (r stallReport) String() string {
	if len(r) == 0 {
		return fmt.Sprintf("no stall of %v or more", minStall)
	}
	late := make([]time.Duration, len(r))
	for i, s := range r {
		late[i] = s.late
	}
	slices.Sort(late)
	return fmt.Sprintf("%d stalls of %v or more (median %v, longest %v), %.1f ms in those of 1 ms or more",
		len(r), minStall, lab.Percentile(late, 50).Round(time.Microsecond),
		r.longest().Round(time.Microsecond), 1000*r.sum())
}

// A stallWatch records how late the machine wakes a sleeper on each processor.
type stallWatch struct {
	t     testing.TB
	cmd   *exec.Cmd
	stdin io.Closer
	out   io.Reader
	done  bool
	end   atomic.Bool      // of the thread that watches this program
	own   chan stallReport // what it has seen
}

func startStallWatch(t testing.TB) *stallWatch {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	w := &stallWatch{t: t, cmd: exec.Command(self), own: make(chan stallReport, 1)}
	w.cmd.Env = append(os.Environ(), stallEnv+"=1")
	w.cmd.Stderr = os.Stderr
	if w.stdin, err = w.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := w.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	w.out = bufio.NewReader(out)
	if err := w.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.finish() })
	var ready string
	if _, err := fmt.Fscanln(w.out, &ready); err != nil {
		w.own <- nil
		t.Fatalf("start stall watch: %v", err)
	}
	go w.watchOwn()
	return w
}

// watchOwn watches this program until the end: a stall may be one of its runtime, or a signal has stopped it.
func (w *stallWatch) watchOwn() {
	const period = 5 * time.Millisecond
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var list stallReport
	for due := time.Now().Add(period); !w.end.Load(); due = due.Add(period) {
		sleepUntil(due)
		woke := time.Now()
		if late := woke.Sub(due); late >= minOwnStall {
			list = append(list, stall{at: due, late: late, own: true})
			due = woke
		}
	}
	w.own <- list
}

// stop ends the watch and returns the stalls.
func (w *stallWatch) stop() stallReport {
	w.t.Helper()
	report, err := w.finish()
	if err != nil {
		w.t.Fatalf("stall watch: %v", err)
	}
	return report
}

func (w *stallWatch) finish() (stallReport, error) {
	if w.done {
		return nil, nil
	}
	w.done = true
	w.end.Store(true)
	w.stdin.Close()
	report := <-w.own
	for {
		var s stall
		var at int64
		_, err := fmt.Fscanln(w.out, &s.cpu, &at, &s.late)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, errors.Join(err, w.cmd.Wait())
		}
		s.at = time.Unix(0, at)
		report = append(report, s)
	}
	return report, w.cmd.Wait()
}

// watchStalls is the main function of the watching process: it watches until stdin ends, and then prints the stalls.
func watchStalls(stdin io.Reader, stdout io.Writer) error {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return fmt.Errorf("read affinity: %w", err)
	}
	var stop atomic.Bool
	var group sync.WaitGroup
	var mu sync.Mutex
	var report stallReport
	for cpu := range len(allowed) * 64 {
		if !allowed.IsSet(cpu) {
			continue
		}
		group.Go(func() {
			list := watchStallsOn(cpu, &stop)
			mu.Lock()
			defer mu.Unlock()
			report = append(report, list...)
		})
	}
	fmt.Fprintln(stdout, "ready")
	_, err := io.Copy(io.Discard, stdin)
	stop.Store(true)
	group.Wait()
	w := bufio.NewWriter(stdout)
	for _, s := range report {
		fmt.Fprintln(w, s.cpu, s.at.UnixNano(), int64(s.late))
	}
	return errors.Join(err, w.Flush())
}

func watchStallsOn(cpu int, stop *atomic.Bool) (list stallReport) {
	runtime.LockOSThread() // permanently: the thread is bound to one processor
	var only unix.CPUSet
	only.Set(cpu)
	if err := unix.SchedSetaffinity(0, &only); err != nil {
		panic(err)
	}
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	for due := time.Now(); !stop.Load(); {
		due = due.Add(stallPeriod)
		sleepUntil(due)
		woke := time.Now()
		if late := woke.Sub(due); late >= minStall {
			list = append(list, stall{cpu: cpu, at: due, late: late})
			due = woke
		}
	}
	return list
}

// sleepUntil sleeps in the thread, which wakes up sooner than a goroutine.
func sleepUntil(due time.Time) {
	for left := time.Until(due); left > 0; left = time.Until(due) {
		ts := unix.NsecToTimespec(int64(left))
		_ = unix.Nanosleep(&ts, nil) // a signal may interrupt it
	}
}
