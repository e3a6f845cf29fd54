package netns

import (
	"bufio"
	"fmt"
	"io"
	"maps"
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
			sum := 0.0
			for _, name := range slices.Sorted(maps.Keys(callsPerConnection)) {
				got, want := float64(counts[name])/connections, float64(callsPerConnection[name])
				sum += got
				if got > want+tt.beyond {
					t.Errorf("%s: %.2f calls a connection, want %v at most", name, got, want)
				}
			}
			if counts["accept4"] < tt.clients*tt.each {
				t.Errorf("counted %d connections of %d", counts["accept4"], tt.clients*tt.each)
			}
			waits := float64(counts["epoll_pwait2"]) / connections
			if waits > tt.waits {
				t.Errorf("%.2f waits a connection, want %v at most", waits, tt.waits)
			}
			t.Logf("%.2f calls a connection, and %.2f waits", sum, waits)
		})
	}
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
