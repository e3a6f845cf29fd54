// Owner: Plane.mu.

package bpf

import (
	"iter"
	"maps"
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// sharing is what the plane has told the programs of shared limits.
type sharing struct {
	given  map[shaper.Key]uint32  // parts of hot buckets
	limits map[uint32]sharedLimit // those of the policy, by the ID of their states
	meters map[uint64]sharedMeter // of these limits, by number

	settled    map[shaper.Key]uint64 // when all has left that was enqueued under more parts
	allSettled uint64                // when all has, of any bucket
	short      map[shaper.Key]shortRun
	reportedAt uint64 // the last call of Demands
	told       bool   // by this daemon
}

// settledAt returns when all has left that was enqueued under more parts than the bucket of a key has.
func (sg *sharing) settledAt(k shaper.Key) uint64 { return max(sg.allSettled, sg.settled[k]) }

// sharedLimit is a shared limit as the programs have it.
type sharedLimit struct {
	kernelLimit
	key         shaper.Fields
	attachments map[string]uint32 // their numbers
}

// SetShares changes what packets may use of shared limits. When it returns, no packet passes any more
// that needs more than that. Packets that were enqueued before leave when they would have left: until
// then [Plane.Demands] reports their buckets as unsettled. Before the first call no packet passes that is
// under a shared limit.
func (p *Plane) SetShares(s shaper.Shares) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.kernel == nil {
		return
	}
	p.adoptShares()
	sg := &p.sharing
	c := shareChange{lease: p.kernelLease(&s.Lease), hot: map[uint64]hotParts{}, reset: s.Reset, meters: sg.meters}
	given := sg.given
	if s.Reset {
		sg.given = map[shaper.Key]uint32{}
	}
	for _, k := range s.Cold {
		delete(sg.given, k)
		for tag := range p.tagsOf(k) {
			c.cold = append(c.cold, tag)
		}
	}
	for _, g := range s.Given {
		sg.given[g.Key] = g.Parts
		for tag, hash := range p.tagsOf(g.Key) {
			c.hot[tag] = hotParts{uint64(g.Parts), hash}
		}
	}
	p.setShares(&c)
	if len(c.settled) > 0 {
		p.settle(&c, maps.Keys(given), maps.Keys(sg.given), slices.Values(s.Cold))
	}
}

// adoptShares returns whether this daemon has not told the programs anything yet. Then it does not know of what
// packets wait that were enqueued before.
func (p *Plane) adoptShares() bool {
	sg := &p.sharing
	if sg.told {
		return false
	}
	sg.told = true
	lease := p.kernel.lease()
	sg.allSettled = p.kernel.lastSharedDeparture(&lease, sg.meters, uint64(boottime()))
	return true
}

// settle records when the buckets of keys settle.
func (p *Plane) settle(c *shareChange, keys ...iter.Seq[shaper.Key]) {
	for _, seq := range keys {
		for k := range seq {
			for tag := range p.tagsOf(k) {
				if until := c.settled[tag]; until > p.sharing.settled[k] {
					p.sharing.settled[k] = until
				}
			}
		}
	}
}

func (p *Plane) setShares(c *shareChange) {
	was, boot := p.kernel.lease(), uint64(boottime())
	p.lacking += uint64(p.kernel.setShares(c, monotonic(), boot))
	if is := p.kernel.lease(); is.partsAt(is.Cold.Parts, boot) < was.partsAt(was.Cold.Parts, boot) { // of buckets that nobody lists
		p.sharing.allSettled = max(p.sharing.allSettled, p.kernel.lastSharedDeparture(&was, c.meters, boot))
	}
}

// kernelLease returns l by the clock of the programs.
func (p *Plane) kernelLease(l *shaper.Lease) kernelLease {
	// Read in this order, the lease does not last longer than it should, and what follows does not begin earlier.
	before, clock, after := boottime(), p.clock.Boot(), boottime()
	return kernelLease{
		End: uint64(kernelTime(l.End, clock, before)), AloneAt: uint64(kernelTime(l.AloneAt, clock, after)),
		Between: uint64(l.Between), Alone: uint64(l.Alone), Withheld: uint64(l.Withheld), Hosts: uint64(l.Hosts),
		Cold: kernelShare{Parts: uint64(l.Cold)},
	}
}

// kernelTime returns t by the clock of the programs, which shows boot when that of the plane shows clock. Either may be ahead.
func kernelTime(t, clock, boot leaky.Time) leaky.Time {
	if t < clock {
		return boot.Sub(clock - t)
	}
	return boot.Add(t - clock)
}

// tagsOf yields the tags of the buckets of a key, with the hashes of their meters and keys; none if the
// policy does not have its limit here.
func (p *Plane) tagsOf(k shaper.Key) func(yield func(tag, hash uint64) bool) {
	l, ok := p.sharing.limits[k.Limit&^1]
	if !ok {
		return func(func(tag, hash uint64) bool) {}
	}
	return l.tags(p.kernel.hashKey(l.key, &k, p.attachmentNumber(l.attachments, k.Origin)), k.Limit&1 != 0)
}

// tags yields the tags of the buckets of a key that has a hash, and the hashes with those of the meters.
func (l *sharedLimit) tags(key [2]uint64, newConns bool) func(yield func(tag, hash uint64) bool) {
	return func(yield func(tag, hash uint64) bool) {
		for j := range l.Meter {
			m := &l.Meter[j]
			if m.Rate.Mult == 0 || (j == int(meterNew)) != newConns {
				continue
			}
			if hash := join(m, key); !yield(m.Tag|hash&tagHash, hash) {
				return
			}
		}
	}
}

// followPolicy gives the buckets of a policy that is about to take effect what they may use. Those of the
// one before keep what they have.
func (p *Plane) followPolicy(policy *shaper.Policy, n numbers, attachments []shaper.Attachment) {
	sg, before := &p.sharing, p.sharing.meters
	sg.limits, sg.meters = map[uint32]sharedLimit{}, map[uint64]sharedMeter{}
	for i := range policy.Shared().All {
		l := policy.Limit(i)
		if !l.InPacketPlane() {
			continue
		}
		k := encodeLimit(policy, i, n.limits[l.Name], p.kernel.Hashes)
		sg.limits[policy.State(i).ID] = sharedLimit{k, l.Key, n.attachments}
		for j := range k.Meter {
			m := sharedMeter{rate: [2]uint64{k.Meter[j].Rate.Mult, k.Meter[j].Rate.Shift}, burst: k.Meter[j].Burst, inheritable: uint64(k.Meter[j].inheritable())}
			switch {
			case !shapes(policy, i, attachments):
			case j == int(meterNew):
				m.maxDelay, m.hold = k.QueueTimeout, k.LongestDelay
			case policy.ChargedOnArrival()&(1<<i) != 0:
				m.maxDelay, m.hold = k.MaxDelay, k.LongestDelay
			default: // charged for when they leave, by all limits
				m.maxDelay = k.LongestDelay
			}
			number := meterOf(k.Meter[j].Tag)
			if sg.meters[number] = m; before[number] != m {
				p.kernel.withdrawCredit(number, uint64(boottime()))
			}
		}
	}
	p.reshare(p.kernel.lease(), false)
}

// shapes reports whether packets wait under limit i of a policy.
func shapes(policy *shaper.Policy, i int, attachments []shaper.Attachment) bool {
	return slices.ContainsFunc(attachments, func(a shaper.Attachment) bool {
		return a.Shapes() && policy.OriginSet(policy.AttachmentIndex(a.Name))&(1<<i) != 0
	})
}

// reshare tells the programs again what was given, under a lease. If it is all, other buckets are cold again.
func (p *Plane) reshare(lease kernelLease, all bool) {
	c := shareChange{lease: lease, hot: map[uint64]hotParts{}, reset: all, meters: p.sharing.meters}
	for k, parts := range p.sharing.given {
		for tag, hash := range p.tagsOf(k) {
			c.hot[tag] = hotParts{uint64(parts), hash}
		}
	}
	p.setShares(&c)
}
