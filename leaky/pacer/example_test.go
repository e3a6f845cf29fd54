package pacer_test

import (
	"fmt"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
)

// An event fires at its own instant, whatever the order in which events were scheduled.
func ExampleWheel() {
	var w pacer.Wheel
	start := leaky.Second
	w.Skip(start)
	for _, after := range []time.Duration{20 * time.Millisecond, 10 * time.Millisecond} {
		w.Schedule(&pacer.Event{Fire: func(now leaky.Time) {
			fmt.Printf("event of %v at %v\n", after, now.Sub(start).Duration())
		}}, start.Add(leaky.FromDuration(after)))
	}
	for {
		next, ok := w.Next()
		if !ok {
			break
		}
		w.Advance(next)
	}
	// Output:
	// event of 10ms at 10ms
	// event of 20ms at 20ms
}
