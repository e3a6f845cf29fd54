package leaky_test

import (
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"

	"shaperd.dev/shaperd/internal/testutil"
)

// For units that arrive in the order in which they may leave, a calendar equals a bucket,
// to the tick.
func TestCalendar_InOrderEqualsBucket(t *testing.T) {
	rnd := testutil.Rand(t)
	refused, waited := 0, 0
	for range 200 {
		rate := leaky.NewRate(1+rnd.Uint64N(1<<(10+rnd.IntN(25))), 8*time.Second)
		shape := leaky.Shape{Bytes: rate, MaxDelay: leaky.FromDuration(time.Duration(rnd.Int64N(int64(time.Second))))}
		if rnd.IntN(2) == 0 {
			shape.BytesBurst = rate.Cost(rnd.Uint64N(10000))
		}
		slots := leaky.NewSlots(rate.Cost(1500), rate.Cost(1100), shape.MaxDelay+shape.BytesBurst)
		var bucket leaky.Bucket
		var calendar leaky.Calendar
		now := leaky.Time(rnd.Uint64N(uint64(leaky.Second)))
		for unit := range 2000 {
			switch rnd.IntN(100) {
			case 0:
				now += leaky.Time(rnd.Uint64N(uint64(100 * leaky.Second)))
			default:
				now += leaky.Time(rnd.Uint64N(uint64(rate.Cost(1500) + 1)))
			}
			n := 1 + rnd.Uint64N(1500)
			if rnd.IntN(20) == 0 {
				n = rnd.Uint64N(1 << (1 + rnd.IntN(20)))
			}
			want, ok := bucket.Offer(&shape, n, 0, now)
			got, gotOK := calendar.Book(&slots, rate.Cost(n), shape.BytesBurst, now, now+shape.MaxDelay, now)
			if ok != gotOK || got.Depart != want {
				t.Fatalf("unit %d of %d bytes at %d: %v %d, want %v %d\n%+v %+v", unit, n, now, gotOK, got.Depart, ok, want, shape, slots)
			}
			if !ok {
				refused++
			} else if want > now {
				waited++
			}
		}
	}
	if refused == 0 || waited == 0 {
		t.Errorf("%d refused, %d waited", refused, waited)
	}
}
