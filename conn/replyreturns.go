// Owner: the loop's thread.

package conn

import (
	"math/rand/v2"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// returns has for each gate the line of the clients that were told when to come back: each has a place of its own, as
// far from the one before as its limit keeps new connections apart. No more is kept of a line than its last place, and
// nothing once that has passed: whoever does not come leaves no trace. Gates end when no connection needs them, but those
// who were refused there come nevertheless.
type returns map[shaper.Key]leaky.Time

const (
	// maxLines is how many lines are kept.
	maxLines = 4096

	// longestLine is how far the last place may be from the first, unless a few connections take longer. Those for whom
	// there is no place come at random within that time: a line of clients that never come keeps nobody away for longer.
	longestLine = 600 * leaky.Second
	fewReturns  = 10
)

// next returns after how many whole seconds a client is to come back to the gate of key, where it would be admitted from
// first on if nobody else came. Places are cost apart.
func (r *returns) next(key shaper.Key, first, cost, now leaky.Time) time.Duration {
	at, longest := max(first, (*r)[key]), max(longestLine, fewReturns*cost)
	if at.Sub(first) > longest {
		return wholeSeconds(first.Add(rand.N(longest)).Sub(now))
	}
	after := wholeSeconds(at.Sub(now))
	if cost > leaky.Second { // the client comes up to a second after its place
		at = now.Add(leaky.FromDuration(after))
	}
	r.set(key, at.Add(cost), now)
	return after
}

// wholeSeconds rounds up to seconds, in which clients are told a time, and to one at least.
func wholeSeconds(t leaky.Time) time.Duration {
	return max((t.Duration() + time.Second - 1).Truncate(time.Second), time.Second)
}

// set notes the next place of a line. If there are too many lines, it drops one that is over or, of a few, the one that is
// over first.
func (r *returns) set(key shaper.Key, next, now leaky.Time) {
	if *r == nil {
		*r = returns{}
	}
	if _, ok := (*r)[key]; !ok && len(*r) >= maxLines {
		victim, ends, looked := key, leaky.Never, 0
		for k, at := range *r {
			if at < ends {
				victim, ends = k, at
			}
			if looked++; looked == 8 || at <= now {
				break
			}
		}
		delete(*r, victim)
	}
	(*r)[key] = next
}
