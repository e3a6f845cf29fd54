// Owner: the loop's thread, except for the methods of Proxy.

package conn

import (
	"fmt"
	"strings"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// stuckAfter is how long a write may take before the file counts as failing.
const stuckAfter = 5 * leaky.Second

// QuotaError returns why the file of quotas cannot be written, or nil.
func (p *Proxy) QuotaError() (failing error) {
	p.home.loop.call(func(now leaky.Time) {
		qs := p.home.loop.quotas
		if failing = qs.failing; qs.writing && now > qs.writingSince+stuckAfter {
			failing = fmt.Errorf("no answer for %v", (now - qs.writingSince).Duration().Round(time.Second))
		}
	})
	return failing
}

// Quotas calls f for the quota of every key of which something was used, on the caller's goroutine. It looks at them in batches, so
// as not to delay traffic: some may be in it twice.
func (p *Proxy) Quotas(f func(*shaper.QuotaStatus)) {
	var buffer [inspectBatch]shaper.QuotaStatus
	for at := -1; at != 0; {
		n, ran := 0, false
		p.home.loop.call(func(now leaky.Time) {
			ran = true
			qs, policy := p.home.loop.quotas, p.shaper.Policy()
			if at < 0 || at > len(qs.list) {
				at = len(qs.list)
			}
			for ; at > 0 && n < len(buffer); at-- {
				b := qs.list[at-1]
				i := policy.Find(b.limit)
				if i < 0 || policy.Limit(i).Quota.Amount == 0 {
					continue
				}
				if qs.follow(b, policy.Limit(i), now); !b.Empty() || len(b.queues)+len(b.gates) > 0 {
					buffer[n] = b.status(policy.Limit(i))
					n++
				}
			}
		})
		if !ran {
			break
		}
		for i := range n {
			f(&buffer[i])
		}
	}
}

// status returns the state of b, of limit l.
func (b *budget) status(l *shaper.Limit) shaper.QuotaStatus {
	_, key, _ := strings.Cut(b.name, "|")
	q := b.Quota()
	return shaper.QuotaStatus{
		Limit: b.limit, Key: strings.ReplaceAll(key, "|", ", "), Quota: q, Slow: l.QuotaSlow, Used: b.Used(), Claimed: b.Ready(), Ends: b.End().Sub(b.quotas.now(&q.Period)),
		Others: b.name == b.limit+othersSuffix, Waiting: len(b.queues)+len(b.gates) > 0 && b.Left() > 0,
	}
}

// ResetQuota forgets what was used of the quota of a key of limit i of the current policy, in the file too, before long. It reports
// whether anything was, and was counted apart.
func (p *Proxy) ResetQuota(i int, k shaper.Key) (found bool) {
	p.home.loop.call(func(now leaky.Time) {
		policy := p.shaper.Policy()
		if i >= policy.Len() {
			return
		}
		if b := p.home.loop.quotas.find(policy, i, k, now); b != nil && b.name != b.limit+othersSuffix {
			found = true
			p.home.loop.quotas.reset(b)
		}
	})
	return found
}

// reset forgets what was used of b. What its limit refuses for it now passes as soon as that is in the file.
func (qs *quotas) reset(b *budget) {
	period := b.Quota().Period
	b.Reset(qs.now(&period))
	b.valid, b.reset = 0, true
	qs.enlist(b)
}
