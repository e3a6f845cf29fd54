package conn

import (
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// crowdedServer answers one question a connection, the more slowly the more it has: with n at once after
// base*(1+(n/10)^2). So it answers most often with 10, and its throughput collapses beyond.
type crowdedServer struct {
	addr   string
	inside atomic.Int64
	most   atomic.Int64 // inside since it was last asked
}

func newCrowdedServer(t *testing.T, base time.Duration) *crowdedServer {
	sv := &crowdedServer{}
	sv.addr = server(t, func(c *net.TCPConn) {
		b := make([]byte, 1)
		if _, err := io.ReadFull(c, b); err != nil {
			return
		}
		n := sv.inside.Add(1)
		for m := sv.most.Load(); n > m && !sv.most.CompareAndSwap(m, n); m = sv.most.Load() {
		}
		x := float64(n) / 10
		time.Sleep(time.Duration(float64(base) * (1 + x*x)))
		sv.inside.Add(-1)
		c.Write(b)
	})
	return sv
}

// askAlways has n clients ask one question after the other until the test ends.
func (r *proxyRig) askAlways(t *testing.T, n int) {
	stop := make(chan bool)
	done := make(chan bool, n)
	for range n {
		go func() {
			defer func() { done <- true }()
			for {
				select {
				case <-stop:
					return
				default:
				}
				c, err := net.Dial("tcp4", r.addr())
				if err != nil {
					time.Sleep(10 * time.Millisecond)
					continue
				}
				c.SetDeadline(time.Now().Add(testTimeout))
				c.Write([]byte("q"))
				io.ReadFull(c, make([]byte, 1))
				c.Close()
			}
		}()
	}
	t.Cleanup(func() {
		close(stop)
		for range n {
			<-done
		}
	})
}

// An adaptive limit finds how many a server bears whose throughput collapses, and none that waits is lost on the way.
func TestAdapt(t *testing.T) {
	t.Parallel()
	sv := newCrowdedServer(t, 20*time.Millisecond)
	r := start(t, shaper.TCP, sv.addr)
	limit := shaper.Limit{Name: "bears", Match: shaper.Match{Protocol: shaper.TCP}, MaxConnections: 100, MinConnections: 2, Adapt: shaper.AdaptOn, QueueTimeout: time.Minute, MaxQueue: 1000}
	r.apply(limit)
	r.askAlways(t, 60)
	state := r.shaper.Policy().State(0)
	right := func() bool {
		st := state.Adaptive.Load()
		return st != nil && st.Throughput > 0 && st.Limit >= 5 && st.Limit <= 15
	}
	testutil.WaitFor(t, "the limit that the server bears", right)
	// To the controller, a busy machine is a server that has slowed down: the best of some tries counts.
	good, tries := 0, 0
	for ; tries < 20 && (good < 40 || sv.most.Load() > 30); tries++ {
		sv.most.Store(0)
		good = 0
		for range 50 {
			time.Sleep(100 * time.Millisecond)
			if right() {
				good++
			}
		}
	}
	st := state.Adaptive.Load()
	t.Logf("try %d: limit %d, %.0f answers a second, at most %d in the server; %+v", tries, st.Limit, st.Throughput, sv.most.Load(), st.Changes)
	if good < 40 || sv.most.Load() > 30 {
		t.Errorf("the limit was 5 to 15 in %d of 50 samples, and at most %d were in the server, which bears 10", good, sv.most.Load())
	}

	// Without it all 60 get in.
	limit.Adapt, limit.MinConnections = shaper.AdaptOff, 0
	r.apply(limit)
	testutil.WaitFor(t, "all to get in", func() bool { return sv.inside.Load() > 50 })
	if state.Adaptive.Load() != nil {
		t.Error("there is a status without adaptation")
	}

	// And from there it goes back.
	limit.Adapt, limit.MinConnections = shaper.AdaptOn, 2
	r.apply(limit)
	testutil.WaitFor(t, "the limit that the server bears", right)
	t.Logf("%+v", state.Adaptive.Load())
}
