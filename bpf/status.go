package bpf

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
)

// Status is what a plane does.
type Status struct {
	Points  []PointStatus // by attachment and interface
	Buckets BucketStatus

	LostSamples uint64 // of packets, since the maps were made
}

// PointStatus is an attachment at an interface, or one that is not at all that it names.
type PointStatus struct {
	Attachment string
	Interface  string // "" for none
	Ingress    bool
	Mode       Mode
	Err        string   // why it is not attached; "" when it is
	Waits      string   // the patterns of an attachment for which there is no interface
	Bypass     string   // why packets there do not meet the limits, though it is attached; "" where they do
	Before     []string // programs and filters that packets meet before it
	Queue      QueueStatus
}

// BucketStatus tells how full the table of buckets is.
type BucketStatus struct {
	Live, Capacity                        int
	EvictedDrained, EvictedIndebted, Lost uint64
}

// Status returns what the plane does, and adds to the counts of the limits what the
// programs have counted so far.
func (p *Plane) Status() (Status, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.kernel == nil {
		return Status{}, errors.New("the packet plane has ended")
	}
	if err := p.sync(); err != nil {
		return Status{}, err
	}
	counts, err := p.kernel.tableCounts()
	if err != nil {
		return Status{}, err
	}
	s := Status{LostSamples: p.sampler.lost.Samples[0] + p.sampler.lost.Samples[1], Buckets: BucketStatus{
		Live: p.kernel.live(), Capacity: len(p.kernel.buckets) * len(kernelBucketLine{}.Tag),
		EvictedDrained: counts.EvictedDrained, EvictedIndebted: counts.EvictedIndebted, Lost: counts.Lost,
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
		none := PointStatus{Attachment: a.Name, Ingress: a.Ingress, Mode: a.Mode}
		if err := noInterface(a.missing(present)); err != nil {
			none.Err = err.Error()
			s.Points = append(s.Points, none)
		} else if len(present) == 0 {
			none.Waits = strings.Join(a.Interfaces, ", ")
			s.Points = append(s.Points, none)
		}
	}
	slices.SortFunc(s.Points, func(a, b PointStatus) int {
		return cmp.Or(cmp.Compare(a.Attachment, b.Attachment), cmp.Compare(a.Interface, b.Interface))
	})
	return s, nil
}

func (p *Plane) statusOf(pt *point) PointStatus {
	s := PointStatus{Attachment: pt.Name, Interface: pt.ifname, Ingress: pt.Ingress, Mode: pt.Mode, Err: cmp.Or(p.faults[pt.String()], p.faults[pt.detour()]), Before: slices.Clone(pt.before)}
	if err := cmp.Or(pt.bypass[limiting], pt.bypass[noting]); err != nil {
		s.Bypass = err.Error()
	}
	if pt.Mode == Shape {
		var err error
		if s.Queue, err = pt.queueStatus(); err != nil && s.Err == "" {
			s.Err = err.Error()
		}
	}
	return s
}

// live counts the buckets that have not drained.
func (k *kernel) live() int {
	n, now := 0, uint64(monotonic())
	for i := range k.buckets {
		for j := range k.buckets[i].Tag {
			if atomic.LoadUint64(&k.buckets[i].Until[j]) > now {
				n++
			}
		}
	}
	return n
}
