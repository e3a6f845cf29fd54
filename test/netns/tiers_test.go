package netns

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// TestTiers floods from a source of each of three tiers, one of them in a file: they get 1:5:20, and none costs another anything.
func TestTiers(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "gold.txt")
			if err := os.WriteFile(file, fmt.Appendln(nil, f.sources[2]), 0o644); err != nil {
				t.Fatal(err)
			}
			groups := fmt.Sprintf("\n[[group]]\nname = \"silver\"\nsource = [%q]\n[[group]]\nname = \"gold\"\nfile = %q\n", f.sources[1], file)
			retryOnStall(t, func() (stallReport, error) {
				n := newNetwork(t)
				s := n.downstream.newSink(t, f.tcp())
				n.shaper.shaperd(t, config(f, limit("tiers", onTCP, `key = ["source"]`, "ipv6_prefix = 128", `rate = "200kB/s"`,
					`for.silver = { rate = "1MB/s" }`, `for.gold = { rate = "4MB/s" }`))+groups)
				stalls := startStallWatch(t)
				c := n.downstream.capture(t, lab.DownstreamLink, tcpPort, 1<<16)
				stop := make(chan struct{})
				var all sync.WaitGroup
				for i, source := range f.sources {
					b := n.client.newBulk(t, source, f.listenAddr(), 2, byte('a'+i))
					all.Go(func() { _ = b.floodUntil(stop) })
				}
				defer func() { close(stop); all.Wait() }()
				time.Sleep(500 * time.Millisecond)
				begin := c.Elapsed()
				time.Sleep(3 * time.Second)
				end := c.Elapsed()
				list, report := c.stop(), stalls.stop()
				var errs []error
				for i, rate := range []float64{200e3, 1e6, 4e6} {
					events := lab.Between(lab.Bytes(s.arrivals(byte('a'+i), list)), begin, end)
					t.Logf("%.0f B/s, %+.2f %%", lab.MeanRate(events), 100*(lab.MeanRate(events)/rate-1))
					if err := (envelope{rate: rate, unit: "bytes"}).checkMean(events, 0.01, report); err != nil {
						errs = append(errs, fmt.Errorf("%s: %w", f.sources[i], err))
					}
				}
				return report, errors.Join(errs...)
			})
		})
	}
}
