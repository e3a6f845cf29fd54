package peer

import "time"

// choice decides which of several servers is called. Hosts that call different ones share nothing, and
// a host that changes is nobody's for some seconds. So all prefer the first that works, and change rarely:
// a server is left for the next one when it has not answered for a lease, as nothing is lost by then, and for
// one before it in the list when that has answered pings for a long time.
type choice struct {
	current  int
	since    time.Time // when it was chosen
	answered time.Time // when it last answered a call; since if it has not
	returned bool      // it was chosen because it answered pings
	lease    time.Duration
	minimum  time.Duration // minReturn, but in tests
	leases   int           // returnLeases, but in tests
	servers  []candidate
}

// candidate is one of the servers.
type candidate struct {
	up       time.Time // since when it answers pings; zero if it does not
	patience int       // it must answer pings for so many times the usual time
}

const (
	minReturn    = 30 * time.Second // how long a server must answer pings, usually; at least
	returnLeases = 10               // in leases
	maxPatience  = 16
	goodStay     = 4 // a server that was used for so many times that time had not come back too early
)

func newChoice(servers int, now time.Time) choice {
	c := choice{since: now, answered: now, minimum: minReturn, leases: returnLeases, servers: make([]candidate, servers)}
	for i := range c.servers {
		c.servers[i].patience = 1
	}
	return c
}

// called takes the outcome of a call of a host with a lease.
func (c *choice) called(now time.Time, server int, lease time.Duration, answered bool) {
	c.lease = lease
	if server != c.current { // any more
		return
	}
	switch {
	case answered:
		c.answered = now
	case now.Sub(c.answered) >= lease && len(c.servers) > 1:
		s := &c.servers[c.current]
		if c.returned && now.Sub(c.since) < goodStay*c.returnAfter(c.current) {
			s.patience = min(2*s.patience, maxPatience)
		} else {
			s.patience = 1
		}
		c.choose(now, (c.current+1)%len(c.servers), false)
	}
}

// pinged takes the outcome of a ping of a server that is preferred to the current one.
func (c *choice) pinged(now time.Time, server int, answered bool) {
	s := &c.servers[server]
	switch {
	case server >= c.current: // any more
	case !answered:
		s.up = time.Time{}
	default:
		if s.up.IsZero() {
			s.up = now
		}
		if now.Sub(s.up) >= c.returnAfter(server) {
			c.choose(now, server, true)
		}
	}
}

// returnAfter is how long a server must answer pings before it is called again.
func (c *choice) returnAfter(server int) time.Duration {
	return time.Duration(c.servers[server].patience) * max(c.minimum, time.Duration(c.leases)*c.lease)
}

func (c *choice) choose(now time.Time, server int, returned bool) {
	c.current, c.since, c.answered, c.returned = server, now, now, returned
	for i := range c.servers {
		c.servers[i].up = time.Time{}
	}
}
