package from

import (
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"
)

func TestFromTC(t *testing.T) {
	p := readPage(t, "tc.md")
	// 2 Mbit/s of datagrams with 1200 bytes of payload and 42 of headers: few, for a guest of package vm is slow.
	const size = 1200
	const rate = 2e6 / 8 / (size + 42.0)
	for _, tt := range []struct {
		name    string
		start   func(*site)
		unnamed float64 // rate of two sources together that the commands do not name
	}{
		{"tc", func(s *site) { s.script(p.theirs) }, rate},
		{"shaperd", func(s *site) { s.startOurs(s.shapeOrPolice(p.ours)) }, 2 * rate},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSite(t)
			s.forward()
			tt.start(s)
			const span = 3 * time.Second
			var mu sync.Mutex
			var paused time.Duration
			list := s.datagrams(func() {
				var all sync.WaitGroup
				for _, from := range clients {
					all.Go(func() {
						_, pause := s.flood(from, 2*rate, size, span)
						mu.Lock()
						defer mu.Unlock()
						paused = max(paused, pause)
					})
				}
				all.Wait()
			})
			sent := func(sources ...netip.Addr) float64 {
				n := 0
				for _, a := range list {
					if slices.Contains(sources, a.From.Addr()) && a.At > time.Second && a.At < span {
						n++
					}
				}
				return float64(n) / (span - time.Second).Seconds()
			}
			for _, c := range []struct {
				of   string
				mean float64
				want float64
			}{
				{"the first source", sent(clients[0]), rate},
				{"the second source", sent(clients[1]), rate},
				{"two that the commands do not name", sent(clients[2], clients[3]), tt.unnamed},
			} {
				// Nothing passes while nothing is sent.
				if lost := paused.Seconds() / (span - time.Second).Seconds(); c.mean < (0.8-lost)*c.want || c.mean > 1.1*c.want {
					t.Errorf("%s: %.1f datagrams a second, want %.1f; senders paused for %v", c.of, c.mean, c.want, paused)
				}
			}
		})
	}
}

// shapeOrPolice returns a configuration that this kernel supports: without sch_fq, packets can be dropped, not delayed. The
// rates are the same.
func (s *site) shapeOrPolice(config string) string {
	if err := s.Middle.Run("tc", "qdisc", "add", "dev", "lo", "root", "fq"); err == nil {
		return config
	}
	s.t.Log("this kernel has no sch_fq: mode = \"police\" in place of \"shape\"")
	return replaceOnce(s.t, config, `mode      = "shape"`, `mode      = "police"`)
}
