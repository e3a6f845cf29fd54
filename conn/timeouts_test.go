package conn

import (
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// ended waits for a connection to end, and returns the reason.
func (r *proxyRig) ended(c *net.TCPConn) (how shaper.Ending, err error) {
	r.t.Helper()
	if _, err = io.Copy(io.Discard, c); err == nil {
		err = io.EOF
	}
	counts := r.shaper.Listener("l")
	var all []shaper.Ending
	testutil.WaitFor(r.t, "an end", func() bool {
		for e := range counts.Ended {
			for range counts.Ended[e].Swap(0) {
				all = append(all, shaper.Ending(e))
			}
		}
		return len(all) > 0
	})
	r.settle()
	if len(all) != 1 {
		r.t.Fatalf("ended: %v, want one", all)
	}
	return all[0], err
}

// A drip writes a byte at a time, and records the longest pause that a busy machine made between two.
type drip struct {
	every         time.Duration
	last, longest atomic.Int64 // ns
}

func (d *drip) write(c *net.TCPConn) {
	for range 60 {
		d.next()
		if _, err := c.Write([]byte("x")); err != nil {
			return
		}
		time.Sleep(d.every)
	}
}

// next ends a pause, and begins the next one.
func (d *drip) next() {
	d.longest.Store(int64(d.pause()))
	d.last.Store(time.Now().UnixNano())
}

// end ends the last pause.
func (d *drip) end() {
	d.longest.Store(int64(d.pause()))
	d.last.Store(0)
}

// pause returns the longest pause so far, with the one that goes on.
func (d *drip) pause() time.Duration {
	if d.last.Load() == 0 {
		return time.Duration(d.longest.Load())
	}
	return max(time.Duration(d.longest.Load()), time.Duration(time.Now().UnixNano()-d.last.Load()))
}

func TestTimeouts(t *testing.T) {
	const d = 2 * time.Second
	first := func(l *shaper.Listener) { l.FirstByteTimeout = d }
	idle := func(l *shaper.Listener) { l.TCPIdleTimeout = d }
	half := func(l *shaper.Listener) { l.HalfCloseTimeout = d }
	life := func(l *shaper.Listener) { l.MaxLifetime = d }
	none := func(*shaper.Listener) {}
	notIdle, notSilent, forTooLong := drip{every: d / 20}, drip{every: d / 20}, drip{every: d / 20}
	var says, ends drip // until it does
	discard := func(c *net.TCPConn) { io.Copy(io.Discard, c); time.Sleep(2 * d) }
	for _, tt := range []struct {
		name   string
		set    func(*shaper.Listener)
		client func(*net.TCPConn)
		server func(*net.TCPConn)
		how    shaper.Ending
		least  time.Duration
		drip   *drip
	}{
		{"a client that says nothing", first, nil, testutil.Echo, shaper.FirstByteTimeout, d, nil},
		{"a client for whom only its header speaks", first, nil, testutil.Echo, shaper.FirstByteTimeout, d, nil},
		{"one that says something", first, func(c *net.TCPConn) { c.Write([]byte("x")); says.end(); time.Sleep(2 * d); c.CloseWrite() }, testutil.Echo, shaper.Closed, 0, &says},
		{"one that only ends", first, func(c *net.TCPConn) { c.CloseWrite(); ends.end() }, testutil.Echo, shaper.Closed, 0, &ends},
		{"idle", idle, func(c *net.TCPConn) { c.Write([]byte("x")) }, testutil.Echo, shaper.IdleTimeout, d, nil},
		{"not idle", idle, func(c *net.TCPConn) { notIdle.write(c); c.CloseWrite() }, testutil.Echo, shaper.Closed, 3 * d, &notIdle},
		{"half closed and silent", half, func(c *net.TCPConn) { c.CloseWrite() }, discard, shaper.HalfCloseTimeout, d, nil},
		{"half closed and not silent", half, func(c *net.TCPConn) { c.CloseWrite() }, notSilent.write, shaper.Closed, 3 * d, &notSilent},
		{"open and silent", half, func(c *net.TCPConn) { time.Sleep(3 * d); c.CloseWrite() }, testutil.Echo, shaper.Closed, 2 * d, nil},
		{"for too long", life, forTooLong.write, testutil.Echo, shaper.LifetimeOver, d, nil},
		{"reset by the client", none, func(c *net.TCPConn) { c.Write([]byte("x")); c.SetLinger(0); c.Close() }, testutil.Echo, shaper.ResetByClient, 0, nil},
		{
			"reset by the downstream", none, func(c *net.TCPConn) { c.Write([]byte("x")) },
			func(c *net.TCPConn) { c.Read(make([]byte, 1)); c.SetLinger(0) }, shaper.ResetByServer, 0, nil,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := start(t, shaper.TCP, testutil.ServeTCP(t, tt.server))
			tt.set(&r.listen)
			if strings.Contains(tt.name, "header") {
				r.listen.SendProxy = shaper.ProxyV2
			}
			r.apply()
			begun := time.Now()
			if tt.drip != nil {
				tt.drip.last.Store(begun.UnixNano())
			}
			c := dial(t, r.addr())
			if tt.client != nil {
				go tt.client(c)
			}
			how, _ := r.ended(c)
			after := time.Since(begun)
			if tt.drip != nil && how != shaper.Closed && tt.drip.pause() >= d*9/10 {
				return // it was silent for so long
			}
			if how != tt.how || after < tt.least*9/10 || how != shaper.Closed && after > 10*d {
				t.Errorf("%v after %v, want %v after %v", how, after, tt.how, tt.least)
			}
		})
	}
}

// Time during which the proxy delays bytes does not count.
func TestTimeouts_PausedWhileThrottled(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	// One segment takes 1.4 s.
	slow := shaper.Limit{Name: "slow", Rate: 8 * 1000, Direction: shaper.ToDownstream}
	r.apply(slow)
	c := dial(t, r.addr())
	sent := randomBytes(3 * 1448)
	c.Write(sent)
	testutil.WaitFor(t, "the first of it", func() bool { return r.shaper.Listener("l").ToDownstream.Load() > 0 })
	r.listen.TCPIdleTimeout = time.Second
	r.apply(slow)
	if _, err := io.ReadFull(c, sent); err != nil {
		t.Fatal(err)
	}
	if how, err := r.ended(c); how != shaper.IdleTimeout || !errors.Is(err, io.EOF) {
		t.Errorf("ended: %v, %v", how, err)
	}
}

// An end that loses bytes is a reset.
func TestTimeouts_LostBytesMeanReset(t *testing.T) {
	t.Parallel()
	hold := make(chan struct{})
	r := start(t, shaper.TCP, testutil.ServeTCP(t, func(*net.TCPConn) { <-hold }))
	t.Cleanup(func() { close(hold) })
	c := dial(t, r.addr())
	wrote := make(chan error, 1)
	go func() {
		_, err := c.Write(make([]byte, 64<<20))
		wrote <- err
	}()
	var moved uint64
	var since time.Time
	testutil.WaitFor(t, "more than the downstream reads", func() bool {
		if n := r.shaper.Listener("l").ToDownstream.Load(); n != moved {
			moved, since = n, time.Now()
		}
		return moved > 0 && time.Since(since) > 200*time.Millisecond
	})
	r.listen.MaxLifetime = 300 * time.Millisecond
	r.apply()
	how, err := r.ended(c)
	// The reset is reported to the reader or the writer, whichever comes first.
	if err = errors.Join(err, <-wrote); how != shaper.LifetimeOver || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("ended: %v, %v", how, err)
	}
}

func TestMinThroughput(t *testing.T) {
	for name, tt := range map[string]struct {
		moved uint64
		held  bool
		ends  bool
	}{
		"enough":              {10_000, false, false},
		"too little":          {9_999, false, true},
		"held back meanwhile": {0, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
			r.listen.MinThroughput = 8000
			r.apply()
			c := dial(t, r.addr())
			testutil.WaitFor(t, "a downstream", func() bool { return r.shaper.Listener("l").Open.Load() == 1 })
			r.proxy.home.loop.call(func(leaky.Time) {
				for _, s := range r.proxy.home.sessions.all {
					s.activity.moved, s.activity.throttled = tt.moved, tt.held
					end := s.activity.windowStart + leaky.FromDuration(SlowWindow)
					r.proxy.home.loop.hearing.until = end
					s.armTimeouts(end - leaky.Second)
					if s.stage != stageRelaying {
						t.Error("ended before the end of the window")
					}
					s.armTimeouts(end)
					if (s.stage == stageEnded) != tt.ends {
						t.Errorf("stage %d", s.stage)
					}
				}
			})
			c.Close()
			r.settle()
		})
	}
}

// A reload changes the timeouts of existing connections.
func TestTimeouts_Reload(t *testing.T) {
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	c := dial(t, r.addr())
	testutil.WaitFor(t, "a downstream", func() bool { return r.shaper.Listener("l").Open.Load() == 1 })
	r.listen.TCPIdleTimeout = 100 * time.Millisecond
	r.apply()
	if how, _ := r.ended(c); how != shaper.IdleTimeout {
		t.Errorf("ended: %v", how)
	}
}
