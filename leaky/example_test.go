package leaky_test

import (
	"fmt"
	"time"

	"shaperd.dev/shaperd/leaky"
)

// A bucket spreads units that arrive at once over time, and refuses those that would wait for
// too long.
func ExampleBucket() {
	shape := leaky.Shape{
		Bytes:    leaky.NewRate(1_000_000, time.Second),
		MaxDelay: leaky.FromDuration(5 * time.Millisecond),
	}
	var bucket leaky.Bucket
	now := leaky.Second
	for i := range 5 {
		depart, ok := bucket.Offer(&shape, 1500, 1, now)
		if !ok {
			fmt.Printf("unit %d is refused\n", i)
			continue
		}
		fmt.Printf("unit %d leaves after %v\n", i, depart.Sub(now).Duration())
	}
	// Output:
	// unit 0 leaves after 0s
	// unit 1 leaves after 1.5ms
	// unit 2 leaves after 3ms
	// unit 3 leaves after 4.5ms
	// unit 4 is refused
}

// A burst tolerance lets units leave at once after a pause.
func ExampleShape_burst() {
	rate := leaky.NewRate(1_000_000, time.Second)
	shape := leaky.Shape{Bytes: rate, BytesBurst: rate.Cost(3000), MaxDelay: leaky.Second}
	var bucket leaky.Bucket
	now := leaky.Second
	for i := range 4 {
		depart, _ := bucket.Offer(&shape, 1500, 1, now)
		fmt.Printf("unit %d leaves after %v\n", i, depart.Sub(now).Duration())
	}
	// Output:
	// unit 0 leaves after 0s
	// unit 1 leaves after 0s
	// unit 2 leaves after 0s
	// unit 3 leaves after 1.5ms
}
