package shaper

import (
	"time"

	"shaperd.dev/shaperd/shaper/quota"
)

// MaxQuotaKeys is the maximum number of keys of a limit whose quotas are counted apart. Later ones share one quota, so that
// sources, which may be many, neither take memory without bound nor get more than it allows.
const MaxQuotaKeys = 50_000

// QuotaStatus is the state of the quota of one key of a limit.
type QuotaStatus struct {
	Limit, Key string
	Quota      quota.Quota
	Slow       uint64        // bit/s when it is used up; 0 if nothing passes then
	Used       uint64        // may be more than the amount, if that was changed
	Claimed    uint64        // of what is left, in the file: lost in a crash
	Ends       time.Duration // until the present slot is over: then all of it is free again, or, of a rolling period, a part
	Others     bool          // of all keys that are not counted apart
	Waiting    bool          // for a claim that is being written
}

// validateQuota reports what keeps l from having the quota that it has.
func (l *Limit) validateQuota(bad func(key, format string, args ...any)) {
	q := &l.Quota
	if q.Amount == 0 {
		if *q != (quota.Quota{}) {
			bad("quota", "has no amount")
		}
		if l.QuotaSlow != 0 {
			bad("quota_over", "needs quota")
		}
		return
	}
	if err := q.Period.Validate(); err != nil {
		bad("quota", "%v", err)
	}
	switch {
	case q.Amount > quota.MaxAmount:
		bad("quota", "%d: must be at most 1e18", q.Amount)
	case q.Unit > quota.Connections:
		bad("quota", "invalid unit %d", q.Unit)
	case l.InPacketPlane():
		bad("quota", "unsupported for attachments")
	case l.Shared:
		bad("quota", "unsupported with shared")
	case l.Block || l.Shed.Any():
		bad("quota", "cannot be combined with block or shed")
	case l.Key&KeyConnection != 0:
		bad("quota", "unsupported with connection in key")
	case q.Unit == quota.Connections && l.SlotFor.InTurns():
		bad("quota", "connections: unsupported for turns")
	case q.Unit == quota.Connections && l.QueueTimeout == 0:
		bad("queue_timeout", "must not be 0 with a quota of connections: the first one waits until a part of it is claimed")
	case l.QuotaSlow != 0 && q.Unit == quota.Connections:
		bad("quota_over", "slow: unsupported for connections")
	case l.QuotaSlow != 0 && (l.QuotaSlow < MinRate || l.QuotaSlow > MaxRate):
		bad("quota_over", "%d bit/s: must be from %d to 1e12", l.QuotaSlow, MinRate)
	}
}
