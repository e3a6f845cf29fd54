// Owner: Plane.mu.

package bpf

import (
	"errors"
	"fmt"
	"maps"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

const (
	// A bucket is short when reports that are as far apart as shortAfter find that it has refused
	// packets, or delayed them for 5 ms, and no longer ago than shortGap. Some packets come too early
	// at any rate.
	shortAfter = leaky.Second / 50
	shortGap   = leaky.Second / 4
)

// shortRun is a time in which a bucket is short, by CLOCK_BOOTTIME.
type shortRun struct{ since, last uint64 }

// Demands appends to all what packets have used of shared limits since the last call, or would have if
// they had not been refused, and whether they needed more: of buckets that are hot, and of cold ones that
// are short. Of a hot bucket that it leaves out, nothing has left and nothing is needed, unless there are
// too many: see [shaper.HeaviestDemands]. A cold one is taken to have used its parts. While anything is
// unsettled of which the key is not known, each limit has a demand that is Unsettled and has the zero key.
func (p *Plane) Demands(all []shaper.Demand) []shaper.Demand {
	p.mu.Lock()
	defer p.mu.Unlock()
	sg, own := &p.sharing, len(all)
	if p.kernel == nil || len(sg.limits) == 0 {
		return all
	}
	boot := uint64(boottime())
	for k := range sg.given {
		d := shaper.Demand{Key: k, Unsettled: boot < sg.settledAt(k)}
		for tag := range p.tagsOf(k) {
			if i := p.kernel.findHot(tag); i >= 0 {
				b := &p.kernel.hotBuckets[i]
				d.Used = max(d.Used, b.unreported())
				if at := atomic.LoadUint64(&b.ShortAt); at >= sg.reportedAt && sg.isShort(k, at) {
					d.Waiting = 1
				}
			}
		}
		if d.Used > 0 || d.Waiting > 0 || d.Unsettled {
			all = append(all, d)
		}
	}
	for k, until := range sg.settled {
		if _, hot := sg.given[k]; !hot && boot < until {
			all = append(all, shaper.Demand{Key: k, Unsettled: true})
		} else if boot >= until {
			delete(sg.settled, k)
		}
	}
	if boot < sg.allSettled {
		all = p.anyUnsettled(all)
	}
	all, err := p.coldDemands(all, boot)
	maps.DeleteFunc(sg.short, func(_ shaper.Key, run shortRun) bool { return boot >= run.last+uint64(shortGap) })
	p.report("demands", err)
	sg.reportedAt = boot
	all = all[:own+len(shaper.HeaviestDemands(all[own:]))]
	for i := range all[own:] {
		p.reported(&all[own+i])
	}
	return all
}

// unreported returns what b was charged since it was last reported.
func (b *kernelHotBucket) unreported() leaky.Time {
	return leaky.Time(max(0, int64(atomic.LoadUint64(&b.Used)-b.Reported))) // less than 0 after a refund
}

// reported takes from hot buckets what d reports of them. Others will report theirs later.
func (p *Plane) reported(d *shaper.Demand) {
	if _, hot := p.sharing.given[d.Key]; !hot {
		return
	}
	for tag := range p.tagsOf(d.Key) {
		if i := p.kernel.findHot(tag); i >= 0 {
			b := &p.kernel.hotBuckets[i]
			used := b.unreported()
			d.Used, b.Reported = max(d.Used, used), b.Reported+uint64(used)
		}
	}
}

// anyUnsettled appends a demand for each limit, as packets of any key may wait.
func (p *Plane) anyUnsettled(all []shaper.Demand) []shaper.Demand {
	for id, l := range p.sharing.limits {
		for j := range l.Meter {
			k := shaper.Key{Limit: id}
			if j == int(meterNew) {
				k.Limit++
			}
			_, hot := p.sharing.given[k]
			if l.Meter[j].Rate.Mult != 0 && !hot && (j != int(meterPackets) || l.Meter[meterBytes].Rate.Mult == 0) {
				all = append(all, shaper.Demand{Key: k, Unsettled: true})
			}
		}
	}
	return all
}

// isShort records that packets found the bucket of k short at an instant, and reports whether they have for
// long.
func (sg *sharing) isShort(k shaper.Key, at uint64) bool {
	run, ok := sg.short[k]
	if !ok || at >= run.last+uint64(shortGap) {
		run.since = at
	}
	run.last = max(run.last, at)
	sg.short[k] = run
	return at >= run.since+uint64(shortAfter)
}

// coldDemands appends the cold buckets that were short.
func (p *Plane) coldDemands(all []shaper.Demand, boot uint64) ([]shaper.Demand, error) {
	sg, l := &p.sharing, p.kernel.lease()
	used := leaky.Time(shareScale(boot-sg.reportedAt, l.partsAt(l.Cold.Parts, boot)))
	var (
		cursor ebpf.MapBatchCursor
		tags   [512]uint64
		shorts [len(tags)]kernelShortKey
	)
	for {
		n, err := p.kernel.ShortKeys.BatchLookupAndDelete(&cursor, tags[:], shorts[:], nil)
		for i := range shorts[:n] {
			k, ok := p.shortKey(&shorts[i])
			if _, hot := sg.given[k]; ok && !hot && sg.isShort(k, shorts[i].At) {
				all = append(all, shaper.Demand{Key: k, Used: used, Waiting: 1, Unsettled: boot < sg.settledAt(k)})
			}
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return all, nil
		}
		if err != nil {
			return all, fmt.Errorf("read %s: %w", kernelMapShortKeys, err)
		}
	}
}

// shortKey returns the key of a bucket that was short, unless its limit has gone.
func (p *Plane) shortKey(s *kernelShortKey) (k shaper.Key, ok bool) {
	for i := range p.policy.Shared().All {
		if n, ok := p.numbers.limits[p.policy.Limit(i).Name]; !ok || n != s.Limit {
			continue
		}
		address := addressOf(&s.Address)
		f := shaper.Flow{Source: address, Destination: address, Port: s.Port}
		for name, number := range p.numbers.attachments {
			if number == uint32(s.AttachId) {
				f.Origin = p.policy.AttachmentIndex(name)
			}
		}
		k = p.policy.Key(i, &f, shaper.Route{ASN: s.Asn, Country: shaper.Country(s.Country)})
		k.Limit += uint32(s.NewConns)
		return k, true
	}
	return k, false
}
