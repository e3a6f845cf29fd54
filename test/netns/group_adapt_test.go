package netns

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
)

const (
	adaptPort    = 5434
	adaptMost    = 90 // connections in flight that the operator allows
	adaptWorkers = 8  // of the server: more in flight get no more answers
	adaptTakes   = 20 * time.Millisecond
	adaptClients = 40 // of each gateway, that always ask
)

// A workersLoad asks a server with few workers through all gateways, and counts what is in flight there.
type workersLoad struct {
	g        *group
	group    sync.WaitGroup
	inFlight atomic.Int64
	most     atomic.Int64
	answers  atomic.Int64
	area     atomic.Int64 // in flight, sampled each 10 ms
	samples  atomic.Int64
}

func (g *group) startWorkers() *workersLoad {
	l := &workersLoad{g: g}
	g.more = fmt.Sprintf(`[[listen]]
name = "adapted"
address = ["tcp://0.0.0.0:%d"]
downstream = ["%v"]

[[limit]]
name = "bears"
match = { listen = ["adapted"] }
max_connections = %d
adapt = "on"
min_connections = 3
max_queue = 1000
queue_timeout = "60s"
shared = true
`, adaptPort, groupDownstream, adaptMost)
	workers := make(chan bool, adaptWorkers)
	g.downstream.serveTCP(g.t, netip.AddrPortFrom(groupDownstream, adaptPort), func(c *net.TCPConn) {
		n := l.inFlight.Add(1)
		for m := l.most.Load(); n > m && !l.most.CompareAndSwap(m, n); m = l.most.Load() {
		}
		_, err := io.ReadFull(c, make([]byte, 1))
		if workers <- true; err == nil {
			time.Sleep(adaptTakes)
		}
		<-workers
		l.inFlight.Add(-1) // before a gateway can know
		if _, err := c.Write([]byte{1}); err == nil {
			l.answers.Add(1)
		}
		_, _ = io.Copy(io.Discard, c)
	})
	ctx, end := context.WithCancel(context.Background())
	for _, gw := range g.gateways {
		for n := range adaptClients {
			l.group.Go(func() {
				for ctx.Err() == nil {
					if l.ask(ctx, gw, n) != nil { // its gateway is away
						time.Sleep(50 * time.Millisecond)
					}
				}
			})
		}
	}
	l.group.Go(func() {
		for tick := time.NewTicker(10 * time.Millisecond); ctx.Err() == nil; <-tick.C {
			l.area.Add(l.inFlight.Load())
			l.samples.Add(1)
		}
	})
	g.t.Cleanup(func() { end(); l.group.Wait() })
	return l
}

func (l *workersLoad) ask(ctx context.Context, gw *gateway, n int) error {
	c, err := l.g.sources.Dial(ctx, groupSources[n%2], netip.AddrPortFrom(gw.addr, adaptPort), time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := c.Write([]byte{1}); err != nil {
		return err
	}
	_, err = io.ReadFull(c, make([]byte, 1))
	return err
}

// over waits for some time, and returns the answers in it as a part of what the server can give, and how many were in flight in
// the mean.
func (l *workersLoad) over(d time.Duration) (good, inFlight float64) {
	answers, area, samples := l.answers.Load(), l.area.Load(), l.samples.Load()
	begun := time.Now()
	time.Sleep(d)
	took := time.Since(begun).Seconds()
	best := adaptWorkers / adaptTakes.Seconds()
	return float64(l.answers.Load()-answers) / took / best, float64(l.area.Load()-area) / float64(l.samples.Load()-samples)
}

// adapted returns what a gateway says of the limit.
func (g *group) adapted(gw *gateway) *api.Adaptive {
	g.t.Helper()
	text, err := gw.Output(os.Getenv("SHAPERD_BIN"), "limits", "--json", "--control", gw.daemon.Control)
	must(g.t, err)
	var limits []api.Limit
	must(g.t, json.Unmarshal([]byte(text), &limits))
	for _, l := range limits {
		if l.Name == "bears" && l.Adaptive != nil {
			return l.Adaptive
		}
	}
	return &api.Adaptive{}
}

// TestGroup_Adapt has gateways that find out together what a server bears.
func TestGroup_Adapt(t *testing.T) {
	t.Parallel()
	g := newGroup(t)
	g.useRedis()
	l := g.startWorkers()
	g.start(g.all()...)
	measure := func(what, leader string, gateways ...*gateway) error {
		good, inFlight := l.over(5 * time.Second)
		t.Logf("%-30s %3.0f %% of what the server can answer, %.1f in flight, at most %d", what, 100*good, inFlight, l.most.Load())
		var errs []error
		// Those that a busy machine has not yet brought to the server are not in flight there.
		if inFlight < adaptWorkers*0.5 || inFlight > adaptWorkers*3 {
			errs = append(errs, fmt.Errorf("%s: %.1f are in flight, %d are right", what, inFlight, adaptWorkers))
		}
		if good < 0.5 {
			errs = append(errs, fmt.Errorf("%s: %.0f %% of what the server can answer", what, 100*good))
		}
		for _, gw := range gateways {
			if a := g.adapted(gw); a.Leader != leader || a.Connections < adaptWorkers*7/10 || a.Connections > adaptWorkers*3 {
				errs = append(errs, fmt.Errorf("%s: %s says %+v", what, gw.name, a))
			}
		}
		return errors.Join(errs...)
	}
	check := func(what, leader string, gateways ...*gateway) {
		t.Helper()
		retryOnStall(t, func() (stallReport, error) {
			stalls := startStallWatch(t)
			err := measure(what, leader, gateways...)
			return stalls.stop(), err
		})
	}
	time.Sleep(12 * time.Second) // 4 until slots are lent
	check("found out", "gw1", g.all()...)
	g.kill(g.gateways[0])
	time.Sleep(6 * time.Second)
	check("without the one that leads", "gw2", g.gateways[1:]...)
	g.start(g.gateways[0])
	time.Sleep(6 * time.Second)
	check("and with it again", "gw1", g.all()...)
	if most := l.most.Load(); most > adaptMost {
		t.Errorf("%d were in flight at once, more than %d", most, adaptMost)
	}
}
