package daemon

import (
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

// TestSchedules turns the clock of a daemon: limits have the values that hold, across a step of a day in both directions and a reload, and
// an operator's override stays above them.
func TestSchedules(t *testing.T) {
	t.Parallel()
	const limits = `
[[limit]]
name = "l"
rate = "10MB/s"
max_connections = 10
[[override]]
limit = "l"
rate = "8MB/s"
[[override]]
limit = "l"
when = "Mon-Fri 08:00-18:00 Europe/Berlin"
rate = "2MB/s"
max_connections = 5
[[override]]
limit = "l"
when = "12:00-13:00 Europe/Berlin"
rate = "1MB/s"
[[limit]]
name = "slow-at-noon"
rate = "10MB/s"
[[override]]
limit = "slow-at-noon"
when = "12:00-13:00 Europe/Berlin"
rate = "1kB/s"
`
	var now atomic.Int64 // Unix
	setClock := func(text string) {
		t.Helper()
		at, err := time.Parse(time.RFC3339, text)
		if err != nil {
			t.Fatal(err)
		}
		now.Store(at.Unix())
	}
	setClock("2026-11-27T07:59:59+01:00") // a Friday
	c := startDaemon(t, limits, Options{Now: func() time.Time { return time.Unix(now.Load(), 0) }})
	expect := func(what string, rate float64, connections int) {
		t.Helper()
		var l api.Limit
		var err error
		end := time.Now().Add(30 * time.Second)
		for time.Now().Before(end) {
			if l, err = c.Limit(t.Context(), "l"); err == nil && l.Rate == rate && l.MaxConnections == connections {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
		t.Fatalf("%s: %.0f B/s and %d connections, want %.0f and %d; %v", what, l.Rate, l.MaxConnections, rate, connections, err)
	}
	expect("at night", 8e6, 10)
	setClock("2026-11-27T08:00:00+01:00")
	expect("in the morning", 2e6, 5)
	setClock("2026-11-27T12:30:00+01:00")
	expect("at noon", 1e6, 5)
	testutil.WaitFor(t, "the schedules in the answer", func() bool {
		l, err := c.Limit(t.Context(), "l")
		return err == nil && len(l.Scheduled) == 2 && l.Scheduled[1].Holds && l.Scheduled[1].Changes.Unix() == now.Load()+1800 && l.Scheduled[0].Set["max_connections"] == "5"
	})
	if _, err := c.SetLimit(t.Context(), "l", api.SetLimit{Set: map[string]string{"rate": "3MB/s"}}); err != nil {
		t.Fatal(err)
	}
	expect("set by an operator", 3e6, 5)
	setClock("2026-11-28T12:59:59+01:00") // a Saturday
	expect("the next day, and the operator's", 3e6, 10)
	if _, err := c.UnsetLimit(t.Context(), "l", ""); err != nil {
		t.Fatal(err)
	}
	expect("on Saturday at noon", 1e6, 10)
	setClock("2026-11-27T17:00:00+01:00")
	expect("a day back", 2e6, 5)
	c.write(t, limits+"[[override]]\nlimit = \"l\"\nwhen = \"Fri 16:00-18:00 Europe/Berlin\"\nmax_connections = 7\n")
	c.reload <- os.Interrupt
	expect("after a reload", 2e6, 7)
	setClock("2026-11-27T18:00:00+01:00")
	expect("in the evening", 8e6, 10)
	_, err := c.SetLimit(t.Context(), "slow-at-noon", api.SetLimit{Set: map[string]string{"burst": "4GB"}}) // at noon, that takes too long
	if err == nil || !strings.Contains(err.Error(), `(while "12:00-13:00 Europe/Berlin" holds)`) {
		t.Errorf("an override that a schedule would end: %v", err)
	}
	if text := c.log.String(); strings.Contains(text, "level=ERROR") || !strings.Contains(text, `when="Mon-Fri 08:00-18:00 Europe/Berlin"`) {
		t.Error(text)
	}
}
