package netns

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
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
				var all sync.WaitGroup
				for i, source := range f.sources {
					b := n.client.newBulk(t, source, f.listenAddr(), 2, byte('a'+i))
					all.Go(func() { _ = b.flood(4 * time.Second) })
				}
				defer all.Wait()
				time.Sleep(500 * time.Millisecond)
				begin, before := time.Now(), [3]int64{s.got('a'), s.got('b'), s.got('c')}
				time.Sleep(3 * time.Second)
				var errs []error
				seconds := time.Since(begin).Seconds()
				for i, rate := range []float64{200e3, 1e6, 4e6} {
					got := float64(s.got(byte('a'+i))-before[i]) / seconds
					t.Logf("%.0f B/s, %+.2f %%", got, 100*(got/rate-1))
					if math.Abs(got/rate-1) > 0.01 {
						errs = append(errs, fmt.Errorf("%s has %.0f B/s, want %.0f", f.sources[i], got, rate))
					}
				}
				return stalls.stop(), errors.Join(errs...)
			})
		})
	}
}
