package shaper

import (
	"math/big"
	"testing"

	"pgregory.net/rapid"

	"shaperd.dev/shaperd/leaky"
)

// Hosts never have more slots together than there are, however the parts are divided, and each that
// holds slots needs no more parts than it was given.
func TestSlotPool_Sum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := SlotPool{Most: rapid.OneOf(rapid.IntRange(1, 100), rapid.IntRange(1, 1<<20)).Draw(t, "most"), Hosts: rapid.OneOf(rapid.IntRange(1, 10), rapid.IntRange(1, 1000)).Draw(t, "hosts")}
		left, sum := int64(Whole+p.Hosts), 0
		for range p.Hosts {
			parts := rapid.OneOf(rapid.Just((Whole+p.Hosts-1)/p.Hosts), rapid.Just(Whole), rapid.IntRange(0, Whole)).Draw(t, "parts")
			parts = int(min(int64(parts), left, Whole))
			left -= int64(parts)
			n := p.Slots(uint32(parts))
			if n < p.Own() {
				t.Fatalf("%d slots, want %d at least", n, p.Own())
			}
			if need := p.Parts(n); int(need) > parts {
				t.Fatalf("%d slots, which were had with %d parts, need %d", n, parts, need)
			}
			sum += n
		}
		if sum > p.Most {
			t.Fatalf("%d hosts have %d of %d slots", p.Hosts, sum, p.Most)
		}
	})
}

// A host has its own slots, and those of the pool in proportion to its parts, rounded down but for the loss
// of fractions of a part.
func TestSlotPool_Proportion(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := SlotPool{Most: rapid.IntRange(1, 10_000).Draw(t, "most"), Hosts: rapid.IntRange(1, 10).Draw(t, "hosts")}
		parts := rapid.Int64Range(0, Whole).Draw(t, "parts")
		own := int64(p.Most / (2 * p.Hosts))
		pool := int64(p.Most) - int64(p.Hosts)*own
		exact := new(big.Rat).SetFrac64(parts*pool, Whole)
		floor := new(big.Int).Quo(exact.Num(), exact.Denom()).Int64()
		if got := int64(p.Slots(uint32(parts))) - own; got != floor && got != floor+1 || got > pool {
			t.Fatalf("%d slots of a pool of %d, want %v", got, pool, exact.FloatString(3))
		}
		if got := p.Slots(uint32((Whole + p.Hosts - 1) / p.Hosts)); got != p.Most/p.Hosts {
			t.Fatalf("an equal share is %d slots, want %d", got, p.Most/p.Hosts)
		}
		if got := p.Slots(Whole); got != int(own+pool) {
			t.Fatalf("the whole pool gives %d slots, want %d", got, own+pool)
		}
		n := rapid.IntRange(0, p.Most).Draw(t, "slots")
		need := p.Parts(n)
		if got := p.Slots(need); got < n && n <= int(own+pool) {
			t.Fatalf("%d parts are for %d slots, and give %d", need, n, got)
		}
		if need > 0 && p.Slots(need-1) >= n {
			t.Fatalf("%d slots need less than %d parts", n, need)
		}
	})
}

func TestLease_Slots(t *testing.T) {
	for _, tt := range []struct {
		name  string
		lease Lease
		now   leaky.Time
		want  int
	}{
		{"none", Lease{}, 0, 0},
		{"no hosts, and open", Lease{Alone: Whole}, 0, 0},
		{"leased", Lease{Hosts: 3, End: 10, AloneAt: 20, Alone: Whole / 3}, 9, 5 + 7},
		{"the lease has ended", Lease{Hosts: 3, End: 10, AloneAt: 20, Alone: Whole / 3}, 10, 5 + 7},
		{"alone", Lease{Hosts: 3, End: 10, AloneAt: 20, Alone: Whole / 3}, 20, 5 + 7},
		{"not closed yet", Lease{Hosts: 3, End: 10, AloneAt: 20}, 19, 5 + 7},
		{"closed", Lease{Hosts: 3, End: 10, AloneAt: 20}, 20, 0},
		{"not open yet", Lease{Hosts: 3, End: 10, AloneAt: 20, Alone: Whole}, 19, 5 + 7},
		{"open", Lease{Hosts: 3, End: 10, AloneAt: 20, Alone: Whole}, 20, 30},
	} {
		if got := tt.lease.Slots(SlotPool{Most: 30, Hosts: tt.lease.Hosts}, Whole/2, tt.now); got != tt.want {
			t.Errorf("%s: %d slots, want %d", tt.name, got, tt.want)
		}
	}
}

// Of slots that are all lent, a host with a lower maximum has no more for its parts, and needs no fewer parts for them: so
// hosts that follow an adaptive maximum at times of their own have no more than the highest together.
func FuzzSlotPool_Lent(f *testing.F) {
	f.Add(uint16(3), uint16(10), uint16(20), uint32(Whole/3), uint16(4))
	f.Add(uint16(16), uint16(1), uint16(1000), uint32(Whole/16), uint16(1))
	f.Fuzz(func(t *testing.T, hosts, a, b uint16, parts uint32, n uint16) {
		parts %= Whole + 1
		low := SlotPool{Most: 1 + int(min(a, b)), Hosts: 1 + int(hosts%1000), Lent: true}
		high := low
		high.Most = 1 + int(max(a, b))
		if l, h := low.Slots(parts), high.Slots(parts); l > h {
			t.Errorf("%d parts: %d slots of %+v, %d of %+v", parts, l, low, h, high)
		}
		if l, h := low.Parts(int(n)), high.Parts(int(n)); l < h {
			t.Errorf("%d slots need %d parts of %+v, %d of %+v", n, l, low, h, high)
		}
		if all, floor := low.Slots(Whole), low.Slots(uint32((Whole+low.Hosts-1)/low.Hosts)); all != low.Most || floor != low.Most/low.Hosts {
			t.Errorf("the whole is %d, and the part that each may use alone %d, of %+v", all, floor, low)
		}
		sum, left := 0, uint32(Whole)
		for i := range low.Hosts { // the worst for rounding: each has just enough for one more
			p := low.Parts(1 + (i+int(n))%3)
			if p = min(p, left); i == low.Hosts-1 {
				p = left
			}
			sum, left = sum+low.Slots(p), left-p
		}
		if sum > low.Most {
			t.Errorf("together %d slots of %+v", sum, low)
		}
	})
}
