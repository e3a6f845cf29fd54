package conn

import (
	"fmt"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// hotRig has buckets by source that become hot and cold, with and without flows, beside a model that
// has a bucket of its own for each of them, whose share changes at once.
type hotRig struct {
	*rig
	limit  shaper.Limit
	id     uint32 // of limit
	shared bool
	cold   uint32
	idle   uint32         // parts of buckets in the table: while no policy has the limit they stay
	shape  leaky.Shape    // in the last policy with the limit
	given  map[int]uint32 // by source
	want   []*modelBucket
	paths  [][]hop
}

type modelBucket struct {
	bucket leaky.Bucket
	share  leaky.Share
	past   []string
}

func (r *hotRig) flow(i int) *shaper.Flow { return flowFrom(fmt.Sprint("10.0.0.", i), 1) }

func (r *hotRig) keyOf(i int) shaper.Key {
	return shaper.Key{Limit: r.id, Address: r.flow(i).Source.As16()}
}

func (r *hotRig) partsOf(i int) uint32 {
	if !r.shared {
		return shaper.Whole
	}
	parts, hot := r.given[i]
	switch {
	case r.scheduler.byKey[r.keyOf(i)] == nil:
		return r.idle
	case hot:
		return parts
	}
	return r.cold
}

// update changes the shares of the model.
func (r *hotRig) update() {
	if i := r.policy.Find("l"); i >= 0 {
		r.idle, r.shape = r.cold, *r.policy.Shape(i)
	}
	for n, b := range r.want {
		to := leaky.NewShare(&r.shape, r.partsOf(n), shaper.Whole, r.now)
		if b.share.Parts == to.Parts && b.share.Shape == to.Shape {
			continue
		}
		if b.share.Parts == shaper.Whole && to.Parts == shaper.Whole && !r.shared {
			b.bucket.Rescale(&b.share.Shape, &to.Shape, r.now)
		} else {
			b.bucket.Reshare(&b.share, &to, r.now)
		}
		b.share = to
		b.past = append(b.past, fmt.Sprintf("%v: %d parts of %+v", r.now.Duration(), to.Parts, r.limit.Rate))
	}
}

// apply changes the policy.
func (r *hotRig) apply(limits ...shaper.Limit) {
	r.policy = policy(r.t, r.shaper, limits...)
	r.shaper.Swap(r.policy, r.now)
	r.scheduler.sharing.reload(r.now)
	for i := range r.paths {
		if r.paths[i] != nil {
			spec := r.spec(r.flow(i), false)
			if !r.scheduler.keepsPath(r.paths[i], spec, r.now) {
				path := r.scheduler.newPath(spec)
				r.paths[i] = r.scheduler.replacePath(&account{}, r.paths[i], path, false, nil, r.now)
			}
		}
	}
}

// Whatever happens to keys, limits and policies: each bucket of a shared limit is what it would be if it
// had been in use all the time, but for a tick that is rounded up when it changes its parts on the way to the
// table or back. Only one that has drained while it was hot, and is not needed any more, is forgotten: it has
// as much credit as a cold one then, which may be less.
func TestHotKeys_AgainstModel(t *testing.T) {
	rnd := testutil.Rand(t)
	const sources = 6
	var hot, reloads, charged, compared, equal int
	for round := range 60 {
		r := &hotRig{
			limit:  shaper.Limit{Name: "l", Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Shared: true, Rate: 8e6, Burst: uint64(rnd.IntN(2) * 20_000), MaxDelay: time.Second},
			shared: true, given: map[int]uint32{}, paths: make([][]hop, sources),
		}
		other := shaper.Limit{Name: "other", Rate: 1e12}
		r.rig = newRig(t, r.limit, other)
		r.id = r.policy.State(r.policy.Find("l")).ID
		for range sources {
			b := &modelBucket{share: leaky.NewShare(r.policy.Shape(r.policy.Find("l")), 0, shaper.Whole, 0)}
			all := leaky.NewShare(r.policy.Shape(r.policy.Find("l")), shaper.Whole, shaper.Whole, 0)
			b.bucket.Reshare(&all, &b.share, 0)
			r.want = append(r.want, b)
		}
		present := true
		for range 200 {
			r.now += leaky.Time(rnd.Uint64N(uint64(leaky.Second / 200)))
			i := rnd.IntN(sources)
			switch op := rnd.IntN(20); {
			case op < 4: // shares
				s := shaper.Shares{Lease: steady(r.cold), Reset: rnd.IntN(8) == 0}
				if rnd.IntN(3) == 0 {
					r.cold = uint32(rnd.IntN(4)) * shaper.Whole / 8
					s.Lease = steady(r.cold)
				}
				if s.Reset {
					clear(r.given)
				}
				for n := range sources {
					switch rnd.IntN(6) {
					case 0:
						r.given[n] = uint32(rnd.IntN(3)) * rnd.Uint32N(shaper.Whole/2)
						s.Given = append(s.Given, shaper.KeyParts{Key: r.keyOf(n), Parts: r.given[n]})
						hot++
					case 1:
						delete(r.given, n)
						s.Cold = append(s.Cold, r.keyOf(n))
					}
				}
				r.scheduler.sharing.set(&s)
				r.update()
			case op < 6 && present: // a flow comes or goes
				if r.paths[i] == nil {
					r.paths[i] = r.path(r.flow(i))
				} else {
					r.scheduler.releasePath(r.paths[i], r.now)
					r.paths[i] = nil
				}
			case op < 7:
				reloads++
				switch rnd.IntN(4) {
				case 0:
					r.limit.Rate = 8e5 + rnd.Uint64N(1e7)
				case 1:
					r.limit.Shared = !r.limit.Shared
				}
				if present = rnd.IntN(4) > 0; present {
					r.shared = r.limit.Shared
					r.apply(r.limit, other)
				} else {
					r.apply(other)
				}
				r.update()
			case op < 8:
				r.demands()
				r.update() // what is not needed any more is in the table again
			case r.paths[i] != nil && present && r.partsOf(i) > 0:
				charged++
				n := 1 + rnd.Uint64N(3000)
				q := r.scheduler.byKey[r.keyOf(i)]
				q.bucket.Charge(q.shape, n, 1, r.now)
				r.want[i].bucket.Charge(&r.want[i].share.Shape, n, 1, r.now)
				if q.share != nil {
					r.scheduler.sharing.use(q.share, n, 1)
				}
			}
			if !present {
				continue
			}
			for n, want := range r.want {
				bucket, share := r.shaper.Peek(r.keyOf(n), r.now)
				where := "the table"
				if q := r.scheduler.byKey[r.keyOf(n)]; q != nil {
					bucket, share = q.current(r.now)
					where = "its queue"
				}
				all := leaky.NewShare(r.policy.Shape(r.policy.Find("l")), shaper.Whole, shaper.Whole, r.now)
				exact := want.bucket
				bucket.Reshare(&share, &all, r.now)
				exact.Reshare(&want.share, &all, r.now)
				got, _ := bucket.DrainTimes(r.now)
				level, _ := exact.DrainTimes(r.now)
				if compared++; got == level {
					equal++
				}
				if got < level || got > level+r.shape.BytesBurst+leaky.Nanosecond || share.Parts != want.share.Parts || share.Shape != want.share.Shape {
					t.Fatalf("round %d: bucket %d in %s has %d parts and a backlog of %d ticks, want %d and %d; it had\n%q", round, n, where, share.Parts, got, want.share.Parts, level, want.past)
				}
			}
		}
		r.apply(r.limit, other)
		for i := range r.paths {
			if r.paths[i] != nil {
				r.scheduler.releasePath(r.paths[i], r.now)
			}
		}
		r.scheduler.sharing.set(&shaper.Shares{Lease: steady(1), Reset: true})
		r.demands()
		if n, m := len(r.scheduler.byKey), len(r.scheduler.sharing.shares); n+m > 0 {
			t.Fatalf("round %d: %d queues and %d shares are left", round, n, m)
		}
	}
	if hot == 0 || reloads == 0 || charged == 0 || equal < compared*9/10 {
		t.Errorf("the test exercised nothing: %d hot, %d reloads, %d charges, %d of %d equal", hot, reloads, charged, equal, compared)
	}
}
