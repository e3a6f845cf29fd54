package adaptive

import (
	"math/rand/v2"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
)

// crowdOf is a server with any number of workers, and clients that ask on and on: the more in flight the better. Of what
// keeps a controller from seeing that, nothing may do so for long.
type crowdOf struct {
	*Controller
	rnd    *rand.Rand
	now    float64
	ends   []float64
	starts []float64
	next   float64 // step

	clients int
	silent  int                      // connections that ask nothing
	took    func(c *crowdOf) float64 // an answer that is asked for now
	answers func(c *crowdOf)         // called at each, or nil
}

const crowdMost = 200 // maximum of the limit

func newCrowd(t *testing.T, clients int, mean float64) *crowdOf {
	return &crowdOf{Controller: New(1, crowdMost, 0, leaky.Second), rnd: testutil.Rand(t), clients: clients, took: about(mean)}
}

func about(mean float64) func(*crowdOf) float64 {
	return func(c *crowdOf) float64 { return mean * (0.5 + c.rnd.ExpFloat64()*0.5) }
}

func (c *crowdOf) instant() leaky.Time { return at(c.now) + leaky.Second }

func (c *crowdOf) run(until float64) {
	for c.now < until {
		first := -1
		for i, e := range c.ends {
			if first < 0 || e < c.ends[first] {
				first = i
			}
		}
		if first >= 0 && c.ends[first] <= c.next {
			c.now = c.ends[first]
			c.Answer(at(c.now-c.starts[first]), c.instant())
			if c.answers != nil {
				c.answers(c)
			}
			last := len(c.ends) - 1
			c.ends[first], c.starts[first] = c.ends[last], c.starts[last]
			c.ends, c.starts = c.ends[:last], c.starts[:last]
		} else {
			c.now, c.next = c.next, c.next+0.05
			c.Step(c.instant())
		}
		for len(c.ends)+c.silent < c.Limit() && len(c.ends) < c.clients {
			c.ends, c.starts = append(c.ends, c.now+c.took(c)), append(c.starts, c.now)
		}
		waiting := 0
		if inFlight := len(c.ends) + c.silent; inFlight >= c.Limit() {
			waiting = max(0, c.clients-len(c.ends))
		}
		c.Set(len(c.ends)+c.silent, waiting, c.instant())
	}
}

// wantHigh checks that the limit is near the most within seconds from now.
func (c *crowdOf) wantHigh(t *testing.T, what string, within float64) {
	t.Helper()
	begun := c.now
	for c.now < begun+within {
		if c.run(c.now + 1); c.Limit() > 3*crowdMost/4 {
			t.Logf("%s: limit %d after %.0f s", what, c.Limit(), c.now-begun)
			return
		}
	}
	t.Errorf("%s: limit %d after %.0f s: %v", what, c.Limit(), within, c.History())
}

// Failures that have another cause than the limit do not lower it for good.
func TestAdversary_Failures(t *testing.T) {
	for _, every := range []int{3, 4, 8, 9} {
		c := newCrowd(t, 300, 0.02)
		c.wantHigh(t, "no failures", 20)
		n := 0
		c.answers = func(c *crowdOf) {
			if n++; n%every == 0 {
				c.Fail(c.instant())
			}
		}
		c.wantHigh(t, "failures", 60)
		low := 0
		for range 600 {
			if c.run(c.now + 1); c.Limit() < crowdMost/2 {
				low++
			}
		}
		if low > 60 {
			t.Errorf("1 in %d fails: the limit was low in %d of 600 s", every, low)
		}
	}
}

// Cheap answers do not bound the limit when answers take longer.
func TestAdversary_CheapAnswers(t *testing.T) {
	c := newCrowd(t, 1, 0.0005)
	c.run(10)
	c.clients, c.took = 300, about(0.02)
	c.wantHigh(t, "after one cheap client", 30)
	c = newCrowd(t, 300, 0.0005)
	c.run(10)
	c.took = about(0.02)
	c.wantHigh(t, "after many cheap answers", 1300)
}

// Connections that ask nothing do not stop the limit, as many as they are.
func TestAdversary_Silent(t *testing.T) {
	// One in a few hundred stays low: with few answers between silent connections, one step looks like a loss by the one before.
	low := 0
	for i := range 10 {
		c := newCrowd(t, 300, 0.02)
		c.rnd, c.silent = rand.New(rand.NewPCG(*testutil.Seed, uint64(i))), 4
		if c.run(60); c.Limit() <= 3*crowdMost/4 {
			low++
		}
	}
	if low > 2 {
		t.Errorf("silent from the start: %d of 10 have a low limit", low)
	}
	c := newCrowd(t, 10, 0.02)
	c.run(60)
	c.silent, c.clients = c.Limit()+10, 300
	c.wantHigh(t, "silent later", 120)
}

// After an outage the limit does not stay for as long as that was.
func TestAdversary_Outage(t *testing.T) {
	c := newCrowd(t, 300, 0)
	c.took = func(c *crowdOf) float64 { return max(0, 3600-c.now) + 0.02*(0.5+c.rnd.Float64()) }
	c.run(3600)
	c.wantHigh(t, "after an outage", 60)
}

// A server that answers in bursts does not stand still between them.
func TestAdversary_Bursts(t *testing.T) {
	for _, jitter := range []float64{0, 0.0005, 0.002} {
		c := newCrowd(t, 300, 0)
		c.took = func(c *crowdOf) float64 { // group commits each 10 ms
			return float64(int(c.now/0.01+0.001)+1)*0.01 - c.now + jitter*c.rnd.Float64() + 1e-6
		}
		c.wantHigh(t, "group commits", 60)
	}
}

// A source whose cheap answers come and go does not keep the limit low.
func TestAdversary_OnOff(t *testing.T) {
	for _, period := range []float64{3, 5, 10} {
		c := newCrowd(t, 300, 0.02)
		c.run(60)
		sum, n := 0, 0
		for i := range int(300 / period) {
			for end := c.now + period; c.now < end; n++ {
				c.run(c.now + 0.01)
				for range 90 * (i % 2) { // as many again as the others get
					c.Answer(at(0.0001), c.instant())
				}
				sum += c.Limit()
			}
		}
		t.Logf("each %.0f s: mean limit %d", period, sum/n)
		if sum/n < crowdMost/3 {
			t.Errorf("each %.0f s: mean limit %d", period, sum/n)
		}
	}
}

// Answers that take no time give a limit nevertheless.
func TestAdversary_NoTime(t *testing.T) {
	c := New(1, crowdMost, 0, leaky.Second)
	for i := range 60_000 {
		now := leaky.Second + at(float64(i)/1000)
		c.Set(c.Limit(), 10, now)
		c.Answer(0, now)
		if i%50 == 0 {
			c.Step(now)
		}
		if l := c.Limit(); l < 1 || l > crowdMost {
			t.Fatalf("limit %d", l)
		}
	}
}

// A controller that begins when all clients are in a server that bears fewer finds that out, also when a few wait now and
// then and it climbs first.
func TestAdversary_AllInside(t *testing.T) {
	for _, clients := range []int{58, 60, 61, 63} {
		c := newCrowd(t, clients, 0)
		c.Controller = New(1, crowdMost, 60, leaky.Second)
		c.took = func(c *crowdOf) float64 { // at most ten at once are of use
			n := float64(len(c.ends)) / 10
			if c.now < 1 { // they were all there before
				n = float64(c.clients) / 10
			}
			return 0.02 * (0.5 + c.rnd.ExpFloat64()*0.5) * (1 + n*n)
		}
		c.run(45)
		if l := c.Limit(); l > 20 {
			t.Errorf("%d clients: limit %d, 10 is right: %v", clients, l, c.History())
		}
	}
}
