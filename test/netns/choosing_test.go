package netns

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// TestChoosing runs each configuration of docs/choosing.md, as it is there, under a rush of connections.
func TestChoosing(t *testing.T) {
	page, err := os.ReadFile("../../docs/choosing.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)### ([A-Za-z]+).*?```toml\n(.*?)```").FindAllStringSubmatch(string(page), -1)
	configs := map[string]string{}
	for _, b := range blocks {
		configs[b[1]] = b[2]
	}
	for _, tt := range []struct {
		heading string
		run     func(t *testing.T, r *rush)
	}{
		{"Calls", func(t *testing.T, r *rush) {
			r.open(0, 50)
			r.expect(40, 40)
			r.restart()
			r.open(0, 10)
			r.open(1, 5)
			r.expect(45, 45)
		}},
		{"Export", func(t *testing.T, r *rush) {
			stalls := startStallWatch(t)
			r.open(0, 12)
			r.expect(12, 12)
			passed := openings(lab.Levels(r.capture.stop()))
			late := stalls.stop().longest() // the first one of six
			if len(passed) != 12 {
				t.Errorf("captured %d connections", len(passed))
			}
			for i := 5; i < len(passed); i++ { // 6 in less than a second, but for a late wake-up
				if took := passed[i].At - passed[i-5].At; took < 790*time.Millisecond-late {
					t.Errorf("six connections within %v, with a stall of %v", took, late)
				}
			}
		}},
		{"Logins", func(t *testing.T, r *rush) {
			r.open(0, 15)
			r.expect(10, 10)
			r.open(1, 3)
			r.expect(13, 13)
		}},
		{"An", func(t *testing.T, r *rush) {
			// Ten at once, and one more in each second from then on.
			begun := time.Now()
			another := func() int { return int(time.Since(begun) / time.Second) }
			r.open(0, 14)
			r.expect(10, 11+another())
			time.Sleep(2500 * time.Millisecond)
			r.open(0, 14)
			r.expect(12, 13+another())
		}},
		{"A", func(t *testing.T, r *rush) {
			r.open(0, 50)
			r.expect(20, 40) // the end of a window may be in between
		}},
	} {
		t.Run(tt.heading, func(t *testing.T) {
			config := configs[tt.heading]
			if config == "" {
				t.Fatalf("no such configuration; there are %d", len(configs))
			}
			n := newNetwork(t)
			r := &rush{t: t, client: n.client, capture: n.downstream.captureFiltered(t, lab.DownstreamLink, lab.Filter{Port: tcpPort}, 1<<12)}
			n.downstream.serveTCP(t, ipv4.tcp(), func(c *net.TCPConn) {
				r.mu.Lock()
				r.passed++
				r.mu.Unlock()
				_, _ = c.Write([]byte{1})
			})
			config = fmt.Sprintf("[daemon]\npin_path = %q\n", unusedPinPath) + config
			state := filepath.Join(t.TempDir(), "state")
			d := n.shaper.shaperd(t, config, "--state", state)
			r.restart = func() {
				d.Kill()
				n.shaper.shaperdWith(t, d.Notify.Stored, config, "--state", state)
			}
			tt.run(t, r)
		})
	}
	if len(configs) != 5 {
		t.Errorf("%d configurations", len(configs))
	}
}

// rush opens connections, all at once.
type rush struct {
	t      *testing.T
	client *host

	restart func() // kills the daemon, and starts another one

	capture *capture // of all connections, at the downstream

	mu     sync.Mutex
	passed int // those that the downstream has accepted
}

// open opens n connections of a source, and waits until each has been answered or refused.
func (r *rush) open(source, n int) {
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			c, err := r.client.dialTCP(ipv4.sources[source], ipv4.listenAddr())
			if err != nil {
				return
			}
			defer c.Close()
			_ = c.SetReadDeadline(time.Now().Add(patience))
			_, _ = c.Read(make([]byte, 1))
		})
	}
	all.Wait()
}

// expect checks how many connections the downstream has accepted so far.
func (r *rush) expect(least, most int) {
	r.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.passed; n < least || n > most {
		r.t.Errorf("%d connections have passed, want %d to %d", n, least, most)
	}
}
