package cluster

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// gateway is a host with fluid demand for one bucket.
type gateway struct {
	*Host
	estimator *Estimator
	arrives   float64 // of the whole rate
	queued    float64 // microseconds at the whole rate
	used      float64 // since the last sample
	sampledAt Time
	windowAt  Time
	callAt    Time
	arrival   func() // of the message on its way
	arrivesAt Time
	again     bool
	waited    bool
}

const useStep = Millisecond

// simulate runs gateways whose demand set changes, and returns what passed, as a part of what the
// whole rate allows while there is demand for it, and how long it took until a host that a hot spot
// moved to passed 90 %.
func simulate(t *testing.T, hosts int, d Time, set func(now Time, gateways []*gateway)) (use float64, moves []Time) {
	random := rand.New(rand.NewPCG(1, 2))
	ledger := Ledger{Run: "a"}
	p := testParams(hosts)
	interval := Second / 10
	var gateways []*gateway
	for i := range hosts {
		g := &gateway{}
		g.Host = NewHost(HostOptions{Params: p, Name: string(rune('a' + i)), Start: 1, InUse: func(key string) bool { return g.estimator.InUse(key) }}, 0)
		g.estimator = NewEstimator(g.Host, interval, 0)
		g.callAt = Time(random.Int64N(int64(interval)))
		gateways = append(gateways, g)
	}
	var ideal, passed, queue float64
	var hot *gateway
	var movedAt Time
	warm := 5 * Second
	for now := Time(0); now < d; now += useStep {
		set(now, gateways)
		var sum, use float64
		for _, g := range gateways {
			if g.arrives > 0.8 && g != hot {
				hot, movedAt = g, now
			}
			part := float64(g.Use("db", now)) / float64(Whole)
			use += part
			g.queued += g.arrives * float64(useStep)
			out := min(g.queued, part*float64(useStep))
			g.queued -= out
			g.used += out
			sum += g.arrives
			if now > warm {
				passed += out
			}
			if g == hot && movedAt > warm && part > 0.9 {
				moves = append(moves, now-movedAt)
				movedAt = 0
			}
			g.queued = min(g.queued, float64(50*Millisecond)*max(part, 0.01)) // what waits longer is dropped
			g.step(now, &ledger, interval, random)
		}
		if use > 1.0001 {
			t.Fatalf("at %v hosts use %.4f of the whole", now.Duration(), use)
		}
		if now > warm {
			queue = min(queue+sum*float64(useStep), float64(50*Millisecond))
			out := min(queue, float64(useStep))
			queue -= out
			ideal += out
		}
	}
	slices.Sort(moves)
	return passed / ideal, moves
}

func (g *gateway) step(now Time, ledger *Ledger, interval Time, random *rand.Rand) {
	if g.arrival != nil && now >= g.arrivesAt {
		f := g.arrival
		g.arrival = nil
		f()
	}
	waits := g.queued > 0.002*float64(Second)*0.01
	if now-g.sampledAt >= interval/4 || waits && !g.waited {
		waiting := int64(0)
		if waits {
			waiting = 1
		}
		g.estimator.Sample(now, "db", Time(g.used), waiting)
		g.used, g.sampledAt = 0, now
	}
	g.waited = waits
	if now-g.windowAt >= interval {
		g.estimator.EndWindow(now)
		g.windowAt = now
	}
	if g.arrival != nil {
		return
	}
	if !g.estimator.Urgent(now) && !g.again && now < g.callAt {
		return
	}
	g.callAt = now + interval/2 + Time(random.Int64N(int64(interval)))
	q := g.Request(now, nil)
	g.arrivesAt = now + useStep
	g.arrival = func() {
		r := ledger.Call(now+useStep, q)
		g.arrival = func() { g.again = g.Reply(g.arrivesAt, r) }
		g.arrivesAt += useStep
	}
}

func TestEstimator_FollowsHotSpot(t *testing.T) {
	for _, hosts := range []int{3, 4, 10} {
		use, moves := simulate(t, hosts, 60*Second, func(now Time, gateways []*gateway) {
			for i, g := range gateways {
				g.arrives = 0.002
				if int(now/(2*Second))%hosts == i {
					g.arrives = 1.2
				}
			}
		})
		median := moves[len(moves)/2]
		t.Logf("%d hosts: use %.3f, followed in %v (median), %v (worst), %d moves", hosts, use, median.Duration(), moves[len(moves)-1].Duration(), len(moves))
		if use < 0.95 || median > 300*Millisecond || len(moves) < 15 {
			t.Errorf("%d hosts: use %.3f, followed in %v in %d moves", hosts, use, median.Duration(), len(moves))
		}
	}
}

func TestEstimator_OnOff(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	until := make([]Time, 10)
	use, _ := simulate(t, 10, 60*Second, func(now Time, gateways []*gateway) {
		for i, g := range gateways {
			if now >= until[i] {
				until[i] = now + Time(random.Int64N(int64(2*Second)))
				g.arrives = 0.4 - min(g.arrives, 0.4)
			}
		}
	})
	t.Logf("use %.3f", use)
	if use < 0.85 {
		t.Errorf("use %.3f of what one host would pass", use)
	}
}
