package cluster

import (
	"cmp"
	"slices"
)

// MemberStatus is what a host knows of its group and of its own shares.
type MemberStatus struct {
	Joined  bool // in the group; otherwise alone
	Counted bool // the others count on it
	Leaving bool
	Refused Refusal // of the last call
	Ledger  Params  // of the ledger, if Refused is RefusedParams
	Live    int     // hosts that are counted, and those that are gone
	Gone    []Gone
	Differ  int // hosts with another configuration
	Epoch   int64
	Age     Time // since the call was sent that renewed the lease
	Left    Time // until the lease ends
	Hot     int  // number of hot buckets
	Shares  []ShareStatus
}

// ShareStatus is what a host has of one hot bucket.
type ShareStatus struct {
	Key   string
	Parts int64 // that it may use now
	Want  int64 // of those that the ledger gives, before they are scaled by the hosts that are counted
	Short bool  // it should get more when others have given it back
	Tight bool  // all hosts together want more than there is
}

// maxShares is the maximum number of shares in a status.
const maxShares = 1000

// Status returns what h knows at now: of hot buckets those of which it has most.
func (h *Host) Status(now Time) MemberStatus {
	l := h.Lease()
	s := MemberStatus{
		Joined: h.leased, Counted: h.leased && h.counted && now < l.End, Leaving: h.leaving, Refused: h.problem, Ledger: h.others,
		Live: h.live, Gone: h.gone, Differ: h.differ, Epoch: h.epoch, Age: now - h.renewedAt, Left: max(0, l.End-now), Hot: len(h.hot),
	}
	for key, b := range h.hot {
		s.Shares = append(s.Shares, ShareStatus{key, h.Use(key, now), b.want, b.short, b.tight})
	}
	slices.SortFunc(s.Shares, func(a, b ShareStatus) int {
		return cmp.Or(cmp.Compare(b.Parts, a.Parts), cmp.Compare(a.Key, b.Key))
	})
	s.Shares = s.Shares[:min(len(s.Shares), maxShares)]
	return s
}
