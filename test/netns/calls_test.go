package netns

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// callsPerConnection are the system calls of a connection of one request and one answer, which its client ends. None is
// in vain: the end of a stream, after its bytes, has an event of its own, and so a read.
var callsPerConnection = map[string]int{
	"accept4": 1, "socket": 1, "connect": 1, "epoll_ctl": 2, "recvfrom": 4, "sendto": 2, "shutdown": 1, "close": 2,
	"setsockopt": 2, // the first bytes acknowledge the downstream's SYN, and its own are acknowledged at once
}

// TestCalls counts the daemon's system calls for each connection: of one client, and of many.
func TestCalls(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name          string
		clients, each int
		waits, beyond float64 // per connection, at most
	}{
		// A wait may end with the event of one connection, and many connections at once share it.
		{"one client", 1, 300, 7, 0.1},
		{"32 clients", 32, 20, 1, 0.3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n, f := newNetwork(t), families[0]
			f.any = f.proxy // else the destination of each connection is asked for
			n.downstream.serveTCP(t, f.tcp(), func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
			d := n.shaper.shaperd(t, config(f))
			exchange := func() {
				c, err := n.client.Dial(t.Context(), f.sources[0], f.listenAddr(), testTimeout)
				if err != nil {
					t.Error(err)
					return
				}
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(testTimeout))
				_, err = c.Write([]byte("hello"))
				if err == nil {
					_, err = io.ReadFull(c, make([]byte, 5))
				}
				if err != nil {
					t.Error(err)
				}
			}
			exchange()
			stop := countCalls(t, d)
			var group sync.WaitGroup
			for range tt.clients {
				group.Go(func() {
					for range tt.each {
						exchange()
					}
				})
			}
			group.Wait()
			counts := stop()
			connections := float64(tt.clients * tt.each)
			waits := float64(counts["epoll_pwait2"]) / connections
			sum := 0.0
			for _, name := range slices.Sorted(maps.Keys(callsPerConnection)) {
				got, want := float64(counts[name])/connections, float64(callsPerConnection[name])
				sum += got
				if name == "epoll_ctl" {
					want += 2 * waits // those of an idle loop
				}
				if got > want+tt.beyond {
					t.Errorf("%s: %.2f calls a connection, want %v at most", name, got, want)
				}
			}
			if counts["accept4"] < tt.clients*tt.each {
				t.Errorf("counted %d connections of %d", counts["accept4"], tt.clients*tt.each)
			}
			if waits > tt.waits {
				t.Errorf("%.2f waits a connection, want %v at most", waits, tt.waits)
			}
			t.Logf("%.2f calls a connection, and %.2f waits", sum, waits)
		})
	}
}

// TestWakeUps counts how often each thread of the daemon falls asleep for each of few connections: that of the loop 4 to 9 times. The runtime's
// monitor must not watch it: it woke up 27 times.
func TestWakeUps(t *testing.T) {
	t.Parallel()
	n, f := newNetwork(t), families[0]
	n.downstream.serveTCP(t, f.tcp(), func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
	d := n.shaper.shaperd(t, config(f))
	exchange := func() {
		c, err := n.client.Dial(t.Context(), f.sources[0], f.listenAddr(), testTimeout)
		must(t, err)
		defer c.Close()
		must(t, c.SetDeadline(time.Now().Add(testTimeout)))
		_, err = c.Write([]byte("hello"))
		must(t, err)
		_, err = io.ReadFull(c, make([]byte, 5))
		must(t, err)
	}
	exchange()
	// A busy machine adds to some parts, and a thread that wakes up in vain does so in each.
	const parts, connections = 5, 30
	most := math.Inf(1)
	for range parts {
		before := sleeps(t, d.PID())
		for range connections {
			exchange()
			time.Sleep(10 * time.Millisecond)
		}
		part := 0.0
		for thread, n := range sleeps(t, d.PID()) {
			part = max(part, float64(n-before[thread])/connections)
		}
		most = min(most, part)
	}
	if most > 15 {
		t.Errorf("a thread fell asleep %.1f times a connection, want 15 at most", most)
	}
	t.Logf("no thread fell asleep more than %.1f times a connection", most)

	// Without connections only what is looked at once a second wakes up, and the runtime's monitor for a while after each.
	got := math.Inf(1)
	for range parts {
		before, begun := sleeps(t, d.PID()), time.Now()
		time.Sleep(1500 * time.Millisecond)
		took := time.Since(begun)
		all := 0
		for thread, n := range sleeps(t, d.PID()) {
			all += n - before[thread]
		}
		got = min(got, float64(all)/took.Seconds())
	}
	if got > 60 {
		t.Errorf("threads fell asleep %.0f times a second without connections, want 60 at most", got)
	} else {
		t.Logf("threads fell asleep %.0f times a second without connections", got)
	}
}

// sleeps returns how often each thread of a process has fallen asleep so far.
func sleeps(t *testing.T, pid int) map[string]int {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	must(t, err)
	all := map[string]int{}
	for _, thread := range threads {
		text, err := os.ReadFile(thread)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) { // it has exited
			continue
		}
		must(t, err)
		_, after, _ := strings.Cut(string(text), "\nvoluntary_ctxt_switches:")
		var n int
		_, err = fmt.Sscan(after, &n)
		must(t, err)
		all[thread] = n
	}
	return all
}

// countCalls counts the system calls of a daemon until the result is called, which returns how many there were of each.
func countCalls(t *testing.T, d *daemon) func() map[string]int {
	t.Helper()
	tool, err := exec.LookPath("strace")
	if err != nil {
		t.Fatalf("%v: \"make test\" installs it, and so does \"apt-get install strace\"", err)
	}
	table := filepath.Join(t.TempDir(), "calls")
	names := append(slices.Sorted(maps.Keys(callsPerConnection)), "epoll_pwait2")
	trace := exec.Command(tool, "-f", "-c", "-U", "calls,name", "-o", table, "-e", "trace="+strings.Join(names, ","), "-p", strconv.Itoa(d.PID()))
	messages, err := trace.StderrPipe()
	must(t, err)
	must(t, trace.Start())
	lines := bufio.NewScanner(messages)
	attached := lines.Scan() && strings.Contains(lines.Text(), "attached")
	first := lines.Text()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for lines.Scan() {
		}
	}()
	end := func() error {
		_ = trace.Process.Signal(unix.SIGINT)
		<-ended
		return trace.Wait()
	}
	if !attached {
		_ = end()
		t.Fatalf("strace: %s", first)
	}
	return func() map[string]int {
		time.Sleep(100 * time.Millisecond) // until the last connection has ended
		_ = end()                          // by the signal
		text, err := os.ReadFile(table)
		must(t, err)
		counts := map[string]int{}
		for line := range strings.Lines(string(text)) {
			var calls int
			var name string
			if n, _ := fmt.Sscan(line, &calls, &name); n == 2 {
				counts[name] = calls
			}
		}
		return counts
	}
}
