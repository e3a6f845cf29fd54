// Owner: the loop's thread.

package conn

import (
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// ForgetBucket forgets what the buckets of k, a key of limit i of the current policy, owe, also for new connections: its units may leave as
// those of a new key, and places of refused clients are forgotten too. Hosts must not share the limit.
func (p *Proxy) ForgetBucket(i int, k shaper.Key) {
	p.eachWorker(func(w *worker, now leaky.Time) { // one has its queue, and perhaps another its gate
		policy := p.shaper.Policy()
		if i >= policy.Len() {
			return
		}
		p.shaper.CheckOut(k, now)
		sc := w.loop.scheduler
		if q := sc.byKey[k]; q != nil {
			sc.refresh(q, now)
			q.bucket = leaky.Bucket{}
			sc.reshaped(q, now)
			sc.run(now)
		}
		k.Limit++
		owed := p.shaper.CheckOut(k, now)
		p.shaper.CheckOutHistory(policy, i, k, &owed, policy.NewConnectionsOf(i, &k), now)
		a := w.admission
		delete(a.returns, k)
		if gt := a.byKey[k]; gt != nil {
			a.refresh(gt)
			gt.bucket = leaky.Bucket{}
			gt.history = gt.limit.ContinueHistory(nil, &gt.bucket, gt.shape, now)
			a.dispatch([]*gate{gt}, now)
			a.run(now)
		}
	})
}
