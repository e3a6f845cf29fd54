package cluster

import (
	"cmp"
	"maps"
	"slices"
)

// Snapshot is what a ledger knows, for operators.
type Snapshot struct {
	Params  Params
	Epoch   int64
	Age     Time // of the epoch
	Settled bool
	Hot     int            // number of hot buckets
	Hosts   []HostStatus   // by name: all that have called in this epoch
	Gone    []Gone         // by name
	Buckets []BucketStatus // hot ones, by key; at most MaxSnapshot
}

// MaxSnapshot is the maximum number of buckets in a snapshot.
const MaxSnapshot = 1000

// HostStatus is what a ledger knows of a host.
type HostStatus struct {
	Name    string
	Age     Time // since its last call
	Counted bool
	Lease   Time // what is left of its lease at least; 0 if it is not counted
	Digest  uint64
	Info    string
}

// BucketStatus is what a ledger knows of a bucket.
type BucketStatus struct {
	Key     string
	Holders []HolderStatus // by host
}

// HolderStatus is what a host has of a bucket, before it is scaled by the hosts that are counted.
type HolderStatus struct {
	Host                string
	Parts, Want, Weight int64
}

// Snapshot returns what l knows at now. Only buckets with one of these keys are in it, or all if there
// are none.
func (l *Ledger) Snapshot(now Time, keys ...string) Snapshot {
	s := l.state
	if s == nil || s.run != l.Run {
		return Snapshot{}
	}
	shot := Snapshot{
		Params: s.params, Epoch: s.epoch, Age: now - s.born, Settled: now >= s.settleAt, Hot: len(s.buckets), Gone: withPlace(s.goneList()),
	}
	for _, name := range slices.Sorted(maps.Keys(s.members)) {
		m := s.members[name]
		h := HostStatus{Name: name, Age: now - m.at, Counted: s.live(m, now), Digest: m.digest, Info: m.info}
		if h.Counted {
			h.Lease = m.good + s.params.Lease - now
		}
		shot.Hosts = append(shot.Hosts, h)
	}
	if len(keys) == 0 {
		keys = slices.Collect(maps.Keys(s.buckets))
	}
	slices.Sort(keys)
	for _, key := range keys[:min(len(keys), MaxSnapshot)] {
		if b := s.buckets[key]; b != nil {
			shot.Buckets = append(shot.Buckets, BucketStatus{key, s.holderStatus(b, now)})
		}
	}
	return shot
}

func (s *state) holderStatus(b *bucket, now Time) (list []HolderStatus) {
	for host, h := range b.holders {
		if m := s.members[host]; m != nil && h.generation == m.generation && (b.slots || !s.expired(m, now)) {
			list = append(list, HolderStatus{host, h.parts, h.want, h.weight})
		}
	}
	slices.SortFunc(list, func(a, b HolderStatus) int { return cmp.Compare(a.Host, b.Host) })
	return list
}

// withPlace returns those of hosts that are not replaced.
func withPlace(gone []Gone) []Gone {
	return slices.DeleteFunc(slices.Clone(gone), Gone.Replaced)
}
