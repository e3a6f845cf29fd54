// Owner: the loop's thread.

package conn

import "shaperd.dev/shaperd/leaky"

// moderation lets the loop rest between rounds while many datagrams arrive, so that a round receives several of them: a wake-up costs
// more than the datagram for which it is. Network cards moderate their interrupts in the same way.
type moderation struct {
	on       bool
	received int        // datagrams since
	since    leaky.Time // less than moderationSpan ago, or the loop was idle
}

const (
	moderationSpan = leaky.Second / 1000

	// moderationLeast is how many datagrams must arrive in moderationSpan, in the mean: then two or more arrive while the loop rests.
	moderationLeast = 20

	// moderationPeriod is the least time from the start of a round to that of the next one. Datagrams wait for that time at most.
	moderationPeriod = leaky.Second / 1e6 * 100
)

// rest returns until when a loop that has handled what was ready at now should rest. It may be past.
func (m *moderation) rest(now leaky.Time) leaky.Time {
	if span := now.Sub(m.since); span >= moderationSpan {
		m.on = leaky.Time(m.received) >= span/(moderationSpan/moderationLeast)
		m.received, m.since = 0, now
	}
	if !m.on {
		return 0
	}
	return now.Add(moderationPeriod)
}
