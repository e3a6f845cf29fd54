package from

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// startIptables loads the rules of a page.
func (s *site) startIptables(rules string) {
	s.t.Helper()
	path := filepath.Join(s.t.TempDir(), "rules")
	must(s.t, os.WriteFile(path, []byte(strings.ReplaceAll(rules, "-o "+device, "-o "+lab.MiddleRight)), 0o600))
	must(s.t, s.Middle.Run("iptables-restore", path))
}

func TestFromHashlimit(t *testing.T) {
	p := readPage(t, "hashlimit.md")
	for _, tt := range []struct {
		name  string
		start func(*site)
		full  int // datagrams of a new source that pass while 300 others are known
	}{
		{"iptables", func(s *site) { s.startIptables(p.theirs) }, 0},
		{"shaperd", func(s *site) { s.startOurs(p.ours) }, 10},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSite(t)
			s.forward()
			server := s.serve()
			// Any address in here is one of the client.
			must(t, s.Client.Run("ip", "route", "add", "local", "10.1.16.0/20", "dev", "lo"))
			must(t, s.Middle.Run("ip", "route", "add", "10.1.16.0/20", "dev", lab.MiddleLeft))
			tt.start(s)

			// The rate, and the burst before it.
			const rate, burst, span = 500, 50, 2 * time.Second
			var took, paused time.Duration
			list := s.datagrams(func() { took, paused = s.flood(clients[0], 4*rate, 500, span) })
			got := lab.Packets(list)
			least, most := rate*(span-paused).Seconds()*3/4, rate*took.Seconds()+burst+rate/10
			if n := float64(len(got)); n < least || n > most {
				t.Errorf("%.0f datagrams passed in %v, want %.0f to %.0f", n, took, least, most)
			}
			if sigma := lab.Sigma(got, rate); sigma < burst/2 || sigma > burst+5 {
				t.Errorf("a burst of %.1f datagrams passed, want %d", sigma, burst)
			}

			// Connections.
			c := s.open(clients[0], backend, 11, 'a')
			c.await(t, 3)
			other := s.open(clients[1], backend, 2, 'b')
			waitFor(t, "10 connections", func() bool { return len(server.arrived()) == 10 })
			server.answer(100)
			c.all.Wait()
			other.all.Wait()
			if answered, refused := c.ended(); answered != 8 || refused != 3 {
				t.Errorf("%d connections passed and %d were refused, want 8 and 3", answered, refused)
			}
			if _, refused := other.ended(); refused != 0 {
				t.Errorf("%d connections of the other source were refused", refused)
			}

			// A table that is full.
			list = s.datagrams(func() {
				for i := range 300 {
					s.send(netip.AddrFrom4([4]byte{10, 1, byte(16 + i>>8), byte(i)}), 1)
				}
				s.send(netip.MustParseAddr("10.1.20.1"), 10)
			})
			others, late := 0, 0
			for _, a := range list {
				if a.From.Addr() == netip.MustParseAddr("10.1.20.1") {
					late++
				} else {
					others++
				}
			}
			if others < 290 || late != tt.full {
				t.Errorf("%d datagrams of 300 sources passed, and %d of a new one, want %d", others, late, tt.full)
			}
		})
	}
}

// datagrams returns those that arrive at the server while f runs.
func (s *site) datagrams(f func()) []lab.Arrival {
	s.t.Helper()
	// Without a socket, an ICMP message would make each second call fail.
	sink, err := s.Downstream.ListenUDP(netip.AddrPortFrom(backend, udpPort))
	must(s.t, err)
	defer sink.Close()
	c, err := s.Downstream.Capture(lab.DownstreamLink, lab.Filter{Port: udpPort, Incoming: true}, 1<<14)
	must(s.t, err)
	defer c.Close()
	f()
	settle() // the last ones are on their way
	list, err := c.Finish()
	must(s.t, err)
	return list
}

// dialUDP returns a socket at an address of the client, connected to the server.
func (s *site) dialUDP(from netip.Addr) interface {
	Write([]byte) (int, error)
	Close() error
} {
	s.t.Helper()
	c, err := s.Client.DialUDP(from, netip.AddrPortFrom(backend, udpPort))
	must(s.t, err)
	return c
}

// send sends n datagrams from an address.
func (s *site) send(from netip.Addr, n int) {
	s.t.Helper()
	c := s.dialUDP(from)
	defer c.Close()
	for range n {
		_, err := c.Write(make([]byte, 100))
		must(s.t, err)
	}
}

// flood sends datagrams of a size from an address at a rate a second, as evenly as the machine allows. It returns how long
// that took, and for how much of it the machine let it send nothing.
func (s *site) flood(from netip.Addr, rate float64, size int, span time.Duration) (took, paused time.Duration) {
	s.t.Helper()
	c := s.dialUDP(from)
	defer c.Close()
	sent := 0
	start := time.Now()
	last := start
	pause := func(now time.Time) {
		if p := now.Sub(last); p > 20*time.Millisecond {
			paused += p
		}
		last = now
	}
	defer func() { pause(time.Now()) }()
	for now := start; now.Sub(start) < span; now = time.Now() {
		pause(now)
		for due := int(now.Sub(start).Seconds() * rate); sent < due; sent++ {
			if _, err := c.Write(make([]byte, size)); err != nil {
				s.t.Error(fmt.Errorf("send: %w", err))
				return time.Since(start), paused
			}
		}
		time.Sleep(time.Millisecond)
	}
	return time.Since(start), min(paused, span)
}
