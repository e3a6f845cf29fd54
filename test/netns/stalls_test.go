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

	"shaperd/test/lab"
)

// stallEnv is set in the environment of the process that watches for stalls. A
// process of its own sees those of the machine and none of the test's runtime.
const stallEnv = "SHAPERD_NETNS_STALLS"

const (
	stallPeriod = 200 * time.Microsecond // between two looks at the clock
	stallLeast  = 300 * time.Microsecond // lateness from which on a wake-up is a stall
)

// A stall is a wake-up that came late.
type stall struct {
	cpu  int
	at   time.Time // when it was due
	late time.Duration
}

type stallReport []stall

func (r stallReport) longest() time.Duration {
	var d time.Duration
	for _, s := range r {
		d = max(d, s.late)
	}
	return d
}

// middle divides the time into equal windows, sorts these by their longest stalls, and
// returns that of the middle one. It is 0 when most windows have no stall.
func (r stallReport) middle(windows int) time.Duration {
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

// sum is the time in stalls of a millisecond and more, over all processors, in
// seconds.
func (r stallReport) sum() float64 {
	var d time.Duration
	for _, s := range r {
		if s.late >= time.Millisecond {
			d += s.late
		}
	}
	return d.Seconds()
}

// within is the most time in stalls that were due in one window of that length,
// over all processors: what may add to the way of a unit that takes so long.
func (r stallReport) within(window time.Duration) (most time.Duration) {
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

// share is the part of the time watched that stalls took: what a pacer that never
// makes up for much may fall short of its rate. It excuses half of it at most.
func (r stallReport) share(watched time.Duration) float64 {
	return min(r.sum()/watched.Seconds(), 0.5)
}

// loud reports whether the machine stalled so much, while it was watched for the
// time watched, that a measurement may tell of it and not of the daemon.
func (r stallReport) loud(watched time.Duration) bool {
	return r.longest() > 2*time.Millisecond || r.share(watched) > 0.01
}

// awaitQuiet waits until the machine is not loud for a moment, for some seconds at most.
func awaitQuiet(t *testing.T) {
	const moment = 500 * time.Millisecond
	for range 10 {
		watch := startStallWatch(t)
		time.Sleep(moment)
		if !watch.stop().loud(moment) {
			return
		}
	}
}

// fairly fails the test with the error of measure. When the machine was loud
// meanwhile it measures again, twice at most: a defect fails each time.
func fairly(t *testing.T, measure func() (stallReport, error)) {
	t.Helper()
	for again := 2; ; again-- {
		start := time.Now()
		report, err := measure()
		if err == nil {
			return
		}
		if again == 0 || !report.loud(time.Since(start)) {
			t.Error(err)
			return
		}
		t.Logf("once more, because the machine had %v: %v", report, err)
		awaitQuiet(t)
	}
}

func (r stallReport) String() string {
	if len(r) == 0 {
		return fmt.Sprintf("no stall of %v or more", stallLeast)
	}
	late := make([]time.Duration, len(r))
	for i, s := range r {
		late[i] = s.late
	}
	slices.Sort(late)
	return fmt.Sprintf("%d stalls of %v or more (median %v, longest %v), %.1f ms in those of 1 ms or more",
		len(r), stallLeast, lab.Percentile(late, 50).Round(time.Microsecond),
		r.longest().Round(time.Microsecond), 1000*r.sum())
}

// A stallWatch records how late the machine wakes a sleeper on each processor.
type stallWatch struct {
	t     testing.TB
	cmd   *exec.Cmd
	stdin io.Closer
	out   io.Reader
	done  bool
}

func startStallWatch(t testing.TB) *stallWatch {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	w := &stallWatch{t: t, cmd: exec.Command(self)}
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
		t.Fatalf("start stall watch: %v", err)
	}
	return w
}

// stop ends the watch and returns what it saw.
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
	w.stdin.Close()
	var report stallReport
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

// watchStalls is the watching process: it watches until stdin ends, and then
// prints the stalls.
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
	runtime.LockOSThread() // for good: the thread is bound to one processor
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
		if late := woke.Sub(due); late >= stallLeast {
			list = append(list, stall{cpu, due, late})
			due = woke
		}
	}
	return list
}

// sleepUntil has the thread sleep, which wakes up sooner than a goroutine may.
func sleepUntil(due time.Time) {
	for left := time.Until(due); left > 0; left = time.Until(due) {
		ts := unix.NsecToTimespec(int64(left))
		_ = unix.Nanosleep(&ts, nil) // a signal may end it
	}
}
