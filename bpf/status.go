package bpf

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"sync/atomic"

	"shaperd.dev/shaperd/bpf/internal/attach"
	"shaperd.dev/shaperd/shaper"
)

// Status is the state of a plane.
type Status struct {
	Points  []PointStatus // by attachment and interface
	Buckets BucketStatus
}

// PointStatus is the state of an attachment at an interface, or of one whose interface is missing.
type PointStatus struct {
	Attachment        string
	Interface         string // "" if missing
	Direction         shaper.AttachDirection
	Mode              shaper.AttachMode
	Err               string   // why it is not attached; "" if it is
	UnmatchedPatterns string   // patterns of an attachment without any interface
	Uncovered         string   // why packets miss the limits although it is attached; "" if they do not
	PrecedingPrograms []string // programs and filters that run before it
	Queue             attach.QueueStatus
}

// BucketStatus is the state of the bucket table.
type BucketStatus struct {
	Live, Capacity                          int
	EvictedDrained, EvictedBacklogged, Lost uint64
}

// Status returns the state of the plane, and brings the counters of the limits up to
// date.
func (p *Plane) Status() (Status, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.kernel == nil {
		return Status{}, errors.New("the packet plane is closed")
	}
	if err := p.syncCounters(); err != nil {
		return Status{}, err
	}
	counts, err := p.kernel.tableCounts()
	if err != nil {
		return Status{}, err
	}
	s := Status{Buckets: BucketStatus{
		Live: p.kernel.liveBuckets(), Capacity: len(p.kernel.buckets) * len(kernelBucketLine{}.Tag),
		EvictedDrained: counts.EvictedDrained, EvictedBacklogged: counts.EvictedBacklogged, Lost: counts.InsertFailed,
	}}
	for i := range p.attachments {
		a := &p.attachments[i]
		present := map[string]bool{}
		for _, pt := range p.points {
			if pt.Name == a.Name {
				s.Points = append(s.Points, p.statusOf(pt))
				present[pt.ifname] = true
			}
		}
		for _, pt := range p.failed {
			if pt.Attachment == a.Name {
				s.Points = append(s.Points, pt)
				present[pt.Interface] = true
			}
		}
		none := PointStatus{Attachment: a.Name, Direction: a.Direction, Mode: a.EffectiveMode()}
		if err := missingError(missingInterfaces(a, present)); err != nil {
			none.Err = err.Error()
			s.Points = append(s.Points, none)
		} else if len(present) == 0 {
			none.UnmatchedPatterns = strings.Join(a.Interfaces, ", ")
			s.Points = append(s.Points, none)
		}
	}
	slices.SortFunc(s.Points, func(a, b PointStatus) int {
		return cmp.Or(cmp.Compare(a.Attachment, b.Attachment), cmp.Compare(a.Interface, b.Interface))
	})
	return s, nil
}

func (p *Plane) statusOf(pt *point) PointStatus {
	s := PointStatus{Attachment: pt.Name, Interface: pt.ifname, Direction: pt.Direction, Mode: pt.EffectiveMode(), Err: cmp.Or(p.faults[pt.String()], p.faults[pt.redirectSubject()]), PrecedingPrograms: slices.Clone(pt.preceding)}
	if err := cmp.Or(pt.uncovered[attach.Limiter], pt.uncovered[attach.ReplyTracker]); err != nil {
		s.Uncovered = err.Error()
	}
	if pt.Shapes() {
		var err error
		if s.Queue, err = pt.queueStatus(); err != nil && s.Err == "" {
			s.Err = err.Error()
		}
	}
	return s
}

// liveBuckets counts the buckets that have not drained.
func (k *kernel) liveBuckets() int {
	n, now := 0, uint64(monotonic())
	for i := range k.buckets {
		for j := range k.buckets[i].Tag {
			if atomic.LoadUint64(&k.buckets[i].DrainedAt[j]) > now {
				n++
			}
		}
	}
	return n
}
