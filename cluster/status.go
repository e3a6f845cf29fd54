package cluster

import (
	"cmp"
	"slices"
)

// MemberStatus is what a host knows of its group and of its own shares.
type MemberStatus struct {
	Joined  bool // in the group; otherwise alone
	Counted bool // the others count on it
	For     Time // since it joined and its lease has not ended, or since it is alone
	Leaving bool
	Rival   Time    // since another host with its name was last seen in the group; 0 if that was never
	Refused Refusal // of the last call
	Ledger  Params  // of the ledger, if Refused is RefusedParams
	Live    int     // hosts that are counted, and those that are gone
	Gone    []Gone
	Differ  int // hosts with another configuration
	Epoch   int64
	Age     Time          // since the call was sent that renewed the lease
	Left    Time          // until the lease ends
	Cold    int64         // parts that it may use now of buckets that are not hot
	Hot     int           // number of hot buckets
	Shares  []ShareStatus // of hot buckets, those with the most parts first; at most 1,000
}

// ShareStatus is what a host has of one bucket.
type ShareStatus struct {
	Key   string
	Hot   bool
	Parts int64 // that it may use now
	Want  int64 // of those that the ledger gives, before they are scaled by the hosts that are counted; 0 if it is cold
	Short bool  // it should get more when others have given it back
	Tight bool  // all hosts together want more than there is
}

// maxShares is the maximum number of shares in a status.
const maxShares = 1000

// Status returns what h knows at now.
func (h *Host) Status(now Time) MemberStatus {
	l := h.Lease()
	s := MemberStatus{
		Joined: h.leased, Counted: h.leased && h.counted && now < l.End, For: h.lasts(now), Leaving: h.leaving, Refused: h.problem,
		Ledger: h.others, Live: h.live, Gone: withPlace(h.gone), Differ: h.differ, Epoch: h.epoch, Age: now - h.renewedAt, Left: max(0, l.End-now),
		Cold: l.use(l.Cold, false, now), Hot: len(h.hot),
	}
	if h.rivalAt != 0 {
		s.Rival = max(1, now-h.rivalAt)
	}
	for key := range h.hot {
		s.Shares = append(s.Shares, h.Share(key, now))
	}
	slices.SortFunc(s.Shares, func(a, b ShareStatus) int {
		return cmp.Or(cmp.Compare(b.Parts, a.Parts), cmp.Compare(a.Key, b.Key))
	})
	s.Shares = s.Shares[:min(len(s.Shares), maxShares)]
	if !s.Joined && now >= l.End {
		s.Live = 0
	}
	return s
}

// lasts is for how long h has been in the group with a lease that has not ended, or alone.
func (h *Host) lasts(now Time) Time {
	end := h.leaseEnd
	if h.leased {
		end = h.renewedAt + h.lease()
		if now < end {
			return now - h.joinedAt
		}
	}
	return max(0, now-end)
}

// Share returns what h has of a bucket at now.
func (h *Host) Share(key string, now Time) ShareStatus {
	s := ShareStatus{Key: key, Parts: h.Use(key, now)}
	if b := h.hot[key]; b != nil {
		s.Hot, s.Want, s.Short, s.Tight = true, b.want, b.short, b.tight
	}
	return s
}
