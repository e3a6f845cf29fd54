// Owner: the loop's thread.

package conn

import (
	"math/rand/v2"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// returns has for each gate the line of the clients that were told when to come back: each has a place of its own, as
// far from the one before as its limit keeps new connections apart. Gates end when no connection needs them, but those who
// were refused there come nevertheless.
type returns map[shaper.Key]line

// line is where a line ends, and how many come. Its places are not kept: once one has passed, whoever has not come leaves no
// trace.
type line struct {
	end   leaky.Time // the next place
	cost  leaky.Time // from one place to the next
	since leaky.Time // when counting began, or the first place
	came  uint64     // connections since then, let in or not
}

const (
	// maxLines is how many lines are kept.
	maxLines = 4096

	// longestLine is how far the last place may be from the first, unless a few places take longer. Those for whom there is
	// no place come at random within that time.
	longestLine = 600 * leaky.Second

	// lineCheck is after how long, or after a few places, a line is compared with those who come.
	lineCheck = 10 * leaky.Second
	fewPlaces = 10
)

// next returns after how many whole seconds a client is to come back to the gate of key, where it would be admitted from
// first on if nobody else came. Places are cost apart.
func (r *returns) next(key shaper.Key, first, cost, now leaky.Time) time.Duration {
	l, ok := (*r)[key]
	if !ok || l.end <= now {
		l = line{since: first, cost: cost}
	}
	if l.cost != cost { // the limit has another rate now
		l.end = now.Add(min(l.end.Sub(now)/l.cost, leaky.Never/cost) * cost)
		l.cost, l.since, l.came = cost, now, 0
	}
	l.came++
	l.shorten(cost, now)
	at, longest := max(first, l.end), max(longestLine, fewCosts(cost))
	var after time.Duration
	if at.Sub(first) > longest {
		after = wholeSeconds(first.Add(rand.N(longest)).Sub(now))
	} else {
		after = wholeSeconds(at.Sub(now))
		if cost > 2*leaky.Second { // the second by which the client comes later may make it two in a short time
			at = now.Add(leaky.FromDuration(after))
		}
		l.end = at.Add(cost)
	}
	r.set(key, l, now)
	return after
}

// shorten ends l earlier if, of those who had places since it was last looked at, fewer than half can have come: some
// clients never do, and those who come now need not wait for them.
func (l *line) shorten(cost, now leaky.Time) {
	if now < l.since.Add(max(lineCheck, fewCosts(cost))) {
		return
	}
	if due := uint64(now.Sub(l.since) / cost); l.came < due/2 {
		l.end = now.Add(l.end.Sub(now) / leaky.Time(due) * leaky.Time(l.came))
	}
	l.since, l.came = now, 0
}

// fewCosts is how long a few places take.
func fewCosts(cost leaky.Time) leaky.Time { return min(cost, leaky.Forever/fewPlaces) * fewPlaces }

// admitted notes that a connection has passed the gate of key.
func (r returns) admitted(key shaper.Key) {
	if l, ok := r[key]; ok {
		l.came++
		r[key] = l
	}
}

// wholeSeconds rounds up to seconds, in which clients are told a time, and to one at least.
func wholeSeconds(t leaky.Time) time.Duration {
	return max((t.Duration() + time.Second - 1).Truncate(time.Second), time.Second)
}

// set keeps l. If there are too many lines, it drops one that is over or, of a few, the one that is over first.
func (r *returns) set(key shaper.Key, l line, now leaky.Time) {
	if *r == nil {
		*r = returns{}
	}
	if _, ok := (*r)[key]; !ok && len(*r) >= maxLines {
		victim, earliest, looked := key, leaky.Never, 0
		for k, o := range *r {
			if o.end < earliest {
				victim, earliest = k, o.end
			}
			if looked++; looked == 8 || o.end <= now {
				break
			}
		}
		delete(*r, victim)
	}
	(*r)[key] = l
}
