// Owner: the loop's thread.

package conn

import (
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// pacing is the bucket of a queue or of a gate.
type pacing struct {
	key     shaper.Key
	bucket  leaky.Bucket
	whole   *leaky.Shape  // of the limit
	shape   *leaky.Shape  // in effect: whole, or that of share
	share   *share        // nil unless hosts share the limit
	history leaky.History // instead of bucket; nil unless the algorithm of a gate's limit has one
}

// depart is when the next unit may leave.
func (b *pacing) depart(now leaky.Time) leaky.Time {
	if b.shut() {
		return leaky.Never
	}
	if b.history != nil {
		return b.history.Depart(now)
	}
	return b.bucket.Depart(b.shape, now)
}

// shut reports whether nothing may leave, for as long as this host has no parts.
func (b *pacing) shut() bool { return b.share != nil && b.share.Parts == 0 }

// grantShape is the shape from which grants are sized: before anything may leave again, there is
// another one.
func (b *pacing) grantShape() *leaky.Shape {
	if b.shut() {
		return b.whole
	}
	return b.shape
}

// share is what this host may use of a bucket whose limit hosts share.
type share struct {
	leaky.Share
	*pacing
	queue   *queue // that has the bucket, or nil
	gate    *gate  // that has it, or nil
	hot     bool   // parts were given
	index   int    // in sharing.shares
	version uint64 // grows with each change

	// For reports.
	bytes, packets uint64     // that have left since the last one
	waitsSince     leaky.Time // since when units have had to wait, or 0
	short          bool       // they waited for long, since the last report or when it was made
	listed         bool       // in sharing.listed or sharing.reporting
}

// versionOf changes whenever a share in path does.
func versionOf(path []hop) (version uint64) {
	for i := range path {
		if sh := path[i].share; sh != nil {
			version += 1 + sh.version
		}
		if path[i].slow != nil {
			version += 1 << (32 + min(i, 31)) // a queue is slow for hours, and its share has not changed as often then
		}
	}
	return version
}

// held reports whether the bucket is kept although no connection needs it: while it is hot, and until
// its use was reported.
func (sh *share) held() bool { return sh != nil && (sh.hot || sh.listed) }

// checkOut takes the bucket of b, of a shared limit, out of the table, for q or gt.
func (sg *sharing) checkOut(b *pacing, q *queue, gt *gate, now leaky.Time) {
	sg.attach(b, q, gt, b.whole, now)
	b.bucket = sg.shaper.CheckOutShared(b.key, &b.share.Share, now)
}

// checkIn returns the bucket of b to the table.
func (sg *sharing) checkIn(b *pacing, now leaky.Time) {
	if b.share == nil {
		sg.shaper.CheckIn(b.key, b.bucket, now)
		return
	}
	sg.shaper.CheckInShared(b.key, b.bucket, &b.share.Share, now)
	sg.detach(b)
}

// attach gives b a share of whole, from now on.
func (sg *sharing) attach(b *pacing, q *queue, gt *gate, whole *leaky.Shape, now leaky.Time) {
	parts, hot := sg.parts(b.key)
	sh := &share{
		Share:  leaky.NewShare(whole, parts, shaper.Whole, now),
		pacing: b, queue: q, gate: gt, hot: hot, index: len(sg.shares),
	}
	sg.shares = append(sg.shares, sh)
	b.whole, b.shape, b.share = whole, &sh.Shape, sh
}

// detach undoes attach.
func (sg *sharing) detach(b *pacing) {
	sh, last := b.share, len(sg.shares)-1
	sg.shares[sh.index] = sg.shares[last]
	sg.shares[sh.index].index = sh.index
	sg.shares[last] = nil
	sg.shares = sg.shares[:last]
	sh.listed = false
	b.shape, b.share = b.whole, nil
}

// reshape changes the limit's shape of b, the bucket of q or gt. Hosts may share it now, or not any
// more. It reports whether the shape in effect has changed.
func (sg *sharing) reshape(b *pacing, q *queue, gt *gate, next *leaky.Shape, shared bool, now leaky.Time) (changed bool) {
	changed = *next != *b.whole
	switch {
	case b.share == nil && !shared:
		if changed {
			b.bucket.Rescale(b.whole, next, now)
		}
		b.whole, b.shape = next, next
		return changed
	case b.share == nil:
		from := leaky.NewShare(b.whole, shaper.Whole, shaper.Whole, now)
		sg.attach(b, q, gt, next, now)
		b.bucket.Reshare(&from, &b.share.Share, now)
		return true
	case !shared:
		to := leaky.NewShare(next, shaper.Whole, shaper.Whole, now)
		b.bucket.Reshare(&b.share.Share, &to, now)
		b.whole = next
		sg.detach(b)
		return true
	case changed:
		b.reshare(next, b.share.Parts, now)
	}
	b.whole = next
	return changed
}

// reshare changes the parts of b, or the shape of which they are.
func (b *pacing) reshare(whole *leaky.Shape, parts uint32, now leaky.Time) {
	to := leaky.NewShare(whole, parts, shaper.Whole, now)
	b.bucket.Reshare(&b.share.Share, &to, now)
	b.share.Share, b.whole = to, whole
	b.share.version++
}
