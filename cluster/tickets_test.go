package cluster

import "testing"

const ticketsKey = TicketsPrefix + "calls/new"

// buy lets time pass in which hosts, in turn, want tickets, each every 50 ms, and returns how many each has bought.
// A host that wants less than 0 says nothing.
func (g *group) buy(d, every Time, wants ...int64) []int64 {
	bought := make([]int64, len(g.hosts))
	for end := g.now + d; g.now < end; g.now += Second / 20 {
		for i, h := range g.hosts {
			if wants[i] >= 0 {
				h.WantTickets(ticketsKey, wants[i], 1, every, 0)
			}
			for range 3 {
				if !h.Reply(g.now, g.ledger.Call(g.now, h.Request(g.now, nil))) {
					break
				}
			}
			bought[i] += int64(len(h.TakeTickets()))
		}
	}
	return bought
}

func TestTickets_InTurn(t *testing.T) {
	g := newGroup(2)
	g.run(5 * Second)
	if n := g.buy(400*Second, Second, 0, 5); n[1] < 380 {
		t.Errorf("the only host that wants tickets got %d of 400", n[1])
	}
	g.buy(Second/20, Second, 0, 0)
	g.buy(Second/20, Second, 5, 0)
	if n := g.buy(100*Second, Second, 5, 5); n[0] < 45 || n[1] < 45 {
		t.Errorf("one after the other has bought for long, hosts that want all got %v of 100", n)
	}
}

// What a host wanted keeps tickets from others only while it asks.
func TestTickets_OldWants(t *testing.T) {
	g := newGroup(2)
	g.run(5 * Second)
	g.buy(20*Second, Second, 5, 5)
	g.buy(Second/20, Second, 64, 64)
	if n := g.buy(60*Second, Second, -1, 5); n[1] < 55 {
		t.Errorf("a host got %d of 60 while the other does not ask", n[1])
	}
}

// A ticket of a slower rate, which a host may have had for a moment, does not delay those of a faster one.
func TestTickets_RateRaised(t *testing.T) {
	g := newGroup(2)
	g.run(5 * Second)
	const slow = 3600 * Second
	g.buy(60*Second, 20*Second, 5, 5)
	g.buy(Second/4, 20*Second, 0, 0)
	g.buy(25*Second, slow, 5, 0)
	if n := g.buy(100*Second, Second, 5, 5); n[0]+n[1] < 90 || n[0]+n[1] > 101 {
		t.Errorf("hosts got %v of 100", n)
	}
}
