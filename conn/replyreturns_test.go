package conn

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// toldLimit is a limit of new connections that tells those whom it refuses when to come back.
func toldLimit(n uint64, per time.Duration) shaper.Limit {
	return shaper.Limit{Name: "l", NewConnections: shaper.Frequency{N: n, Per: per}, RefuseWith: shaper.RefuseReply, Reply: "http-429"}
}

// A thousand clients are refused at once, and come back when they were told to. At no time come more of them than 1.2 times
// what the limit lets in, and all get in.
func TestReturns_ObedientClients(t *testing.T) {
	for _, tt := range []struct {
		name    string
		clients int
		arrive  time.Duration // within which they come at first
		jitter  time.Duration // by which they come late
		change  func(*shaper.Limit)
		n       uint64
		per     time.Duration
		within  time.Duration // they get in
	}{
		{"one instant", 1000, 0, 0, nil, 20, time.Second, 1010 * time.Second}, // one gets in each second, when 20 come at once
		{"a second", 1000, time.Second, 100 * time.Millisecond, nil, 20, time.Second, 10 * time.Minute},
		{"a queue", 1000, 0, 0, func(l *shaper.Limit) { l.QueueTimeout, l.MaxQueue = 2*time.Second, 100 }, 20, time.Second, 60 * time.Second},
		{"a burst", 1000, 0, 0, func(l *shaper.Limit) { l.BurstConnections = 20 }, 20, time.Second, 60 * time.Second},
		{"fast", 1000, time.Second, 100 * time.Millisecond, nil, 200, time.Second, 200 * time.Second},
		{"slow", 1000, time.Second, 100 * time.Millisecond, nil, 2, time.Second, 20 * time.Minute},
		{"very slow", 100, time.Second, 0, nil, 12, time.Minute, 10 * time.Minute},
		{"windows", 200, 0, 0, func(l *shaper.Limit) { l.Algorithm = shaper.FixedWindow }, 60, time.Minute, 10 * time.Minute},
		{"long windows", 60, 0, 0, func(l *shaper.Limit) { l.Algorithm = shaper.FixedWindow }, 20, 5 * time.Minute, 20 * time.Minute},
		{"a log", 200, 0, 0, func(l *shaper.Limit) { l.Algorithm = shaper.SlidingLog }, 60, time.Minute, 10 * time.Minute},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rnd := testutil.Rand(t)
			limit := toldLimit(tt.n, tt.per)
			if tt.change != nil {
				tt.change(&limit)
			}
			r := newAdmissionRig(t, limit)
			var came []leaky.Time // of those who were told to
			in, last := 0, leaky.Time(0)
			random := func(most time.Duration) time.Duration { return time.Duration(rnd.Int64N(int64(most) + 1)) }
			var visit func(source string)
			visit = func(source string) {
				r.visit(source, func(v *visitor) {
					if v.granted {
						in, last = in+1, r.now
						v.finish()
						return
					}
					n := v.refusal.notice()
					r.after(time.Duration(n.seconds())*time.Second+random(tt.jitter), func() {
						came = append(came, r.now)
						visit(source)
					})
				})
			}
			for i := range tt.clients {
				r.after(random(tt.arrive), func() { visit(fmt.Sprintf("10.0.%d.%d", i/200, i%200)) })
			}
			r.sleep(tt.within)
			if in != tt.clients {
				t.Errorf("%d of %d clients got in within %v", in, tt.clients, tt.within)
			}
			const window = 10 * time.Second
			most, worst := max(1, int(1.2*window.Seconds()*limit.NewConnections.PerSecond())), 0
			for i, from := range came {
				end, _ := slices.BinarySearch(came, from+leaky.FromDuration(window))
				worst = max(worst, end-i)
			}
			if worst > most || worst == 0 {
				t.Errorf("%d came back within %v, want some, and %d at most", worst, window, most)
			}
			t.Logf("%d came back, up to %d in %v, %.2f times the rate; all were in after %.0f s", len(came), worst, window,
				float64(worst)/window.Seconds()/limit.NewConnections.PerSecond(), (last - leaky.Second).Duration().Seconds())
		})
	}
}

// Clients that never come back keep nobody away: what a newcomer is told stays bounded, and is forgotten when it has passed.
func TestReturns_ClientsThatNeverCome(t *testing.T) {
	r := newAdmissionRig(t, toldLimit(1, time.Second))
	longest := longestLine.Duration() + 2*time.Second
	var told time.Duration
	for range 20 * 60 * 50 {
		r.sleep(20 * time.Millisecond)
		v := r.visit("10.0.0.1", nil)
		if v.granted {
			v.finish()
			continue
		}
		if told = v.refusal.retryAfter; told > longest {
			t.Fatalf("told to come back after %v", told)
		}
	}
	r.sleep(longest)
	r.must("10.0.0.2").finish()
	if told = r.visit("10.0.0.3", nil).refusal.retryAfter; told > 2*time.Second {
		t.Errorf("a newcomer is told %v when all have had their turn", told)
	}
}

// A thousand clients that never come, like scanners, are soon noticed: a few newcomers do not wait until all their places
// have passed.
func TestReturns_NoShows(t *testing.T) {
	for _, tt := range []struct {
		n   uint64
		per time.Duration
	}{{20, time.Second}, {2, time.Second}, {12, time.Minute}} {
		t.Run(fmt.Sprintf("%d in %v", tt.n, tt.per), func(t *testing.T) {
			r := newAdmissionRig(t, toldLimit(tt.n, tt.per))
			for range 1000 {
				if v := r.visit("10.0.0.1", nil); v.granted {
					v.finish()
				}
			}
			left := func() (end time.Duration) { // of the line, after a newcomer was refused
				for {
					v := r.visit("10.0.0.2", nil)
					if !v.granted {
						break
					}
					v.finish()
				}
				for _, l := range r.admission.returns {
					end = l.end.Sub(r.now).Duration()
				}
				return end
			}
			cost := tt.per / time.Duration(tt.n)
			first, last := left(), time.Duration(0)
			for range 6 {
				r.sleep(max(lineCheck.Duration(), fewPlaces*cost))
				last = left()
			}
			if first < 49*time.Second || last > max(5*time.Second, 5*cost) {
				t.Errorf("the line takes %v at first, and %v after a while", first, last)
			}
		})
	}
}

// Who is told nothing has no place in the line.
func TestReturns_OnlyWhoIsTold(t *testing.T) {
	for _, tt := range []struct {
		with  shaper.RefuseWith
		reply string
		tells bool
	}{
		{shaper.RefuseReset, "", false},
		{shaper.RefuseClose, "", false},
		{shaper.RefuseReply, "too many\n", false},
		{shaper.RefuseReply, "smpp", false},
		{shaper.RefuseReply, "modbus", false},
		{shaper.RefuseReply, "in {retry_after} s\n", true},
		{shaper.RefuseReply, "postgres", true},
	} {
		t.Run(fmt.Sprintf("%v %q", tt.with, tt.reply), func(t *testing.T) {
			limit := toldLimit(1, 10*time.Second)
			limit.RefuseWith, limit.Reply = tt.with, tt.reply
			r := newAdmissionRig(t, limit)
			r.must("10.0.0.1").finish()
			for range 3 {
				r.visit("10.0.0.1", nil)
			}
			if tells := len(r.admission.returns) > 0; tells != tt.tells {
				t.Errorf("has a line: %v", tells)
			}
		})
	}
}

// A block does not end, as far as is known: no time is told.
func TestReturns_BlockTellsNoTime(t *testing.T) {
	r := newAdmissionRig(t, shaper.Limit{Name: "b", Block: true, RefuseWith: shaper.RefuseReply, Reply: "{reason} by {limit} for {retry_after}", QueueTimeout: 2 * time.Second})
	n := r.visit("10.0.0.1", nil).refusal.notice()
	if n.after != 0 || string(n.fill()) != "blocked by b for 60" || n.sentence() != "connections are blocked" {
		t.Errorf("%v, %q, %q", n.after, n.fill(), n.sentence())
	}
}

// Many lines take no more memory than some, and those that are over go first.
func TestReturns_ManyLines(t *testing.T) {
	var lines returns
	now, cost := leaky.Second, 10*leaky.Second
	for i := range 3 * maxLines {
		key := shaper.Key{Connection: uint64(i)}
		for n := range 2 {
			if after, want := lines.next(key, now, cost, now), time.Duration(1+10*n)*time.Second; after != want {
				t.Fatalf("told %v, want %v", after, want)
			}
		}
		if len(lines) > maxLines {
			t.Fatalf("%d lines", len(lines))
		}
	}
	now += 15 * leaky.Second
	kept := shaper.Key{Connection: 1 << 30}
	for range 10 {
		lines.next(kept, now, cost, now)
	}
	for i := range 3 * maxLines { // more than there is room for, but only if those that are over stay
		if now += leaky.Second / 1000; i < maxLines-1 {
			lines.next(shaper.Key{Connection: uint64(1<<20 + i)}, now, cost, now)
		}
	}
	if lines[kept].end == 0 {
		t.Error("a line was dropped for others that were over")
	}
}

// Random lines keep their places apart, except for the second to which a time is rounded.
func TestReturns_PlacesAreApart(t *testing.T) {
	rnd := testutil.Rand(t)
	for range 200 {
		var lines returns
		cost := leaky.Time(1 + rnd.Uint64N(uint64(20*leaky.Second)))
		now, key := leaky.Second, shaper.Key{Limit: 1}
		var told []leaky.Time
		for range 300 {
			now += leaky.Time(rnd.ExpFloat64() * float64(cost) / 2)
			first := now + leaky.Time(rnd.Uint64N(uint64(cost)+1))
			after := lines.next(key, first, cost, now)
			if after < time.Second || after%time.Second != 0 || now+leaky.FromDuration(after) < first {
				t.Fatalf("told %v, which is before %v", after, first.Sub(now).Duration())
			}
			if lines[key].end.Sub(now) > max(longestLine, fewPlaces*cost) {
				break // no place is left
			}
			told = append(told, now+leaky.FromDuration(after))
		}
		slices.Sort(told)
		for i := range told {
			for j := i + 1; j < len(told); j++ {
				if between := told[j] - told[i] + leaky.Second; leaky.Time(j-i)*cost > between+cost {
					t.Fatalf("%d clients were told to come within %v, of a limit that lets one in each %v", j-i+1, (told[j] - told[i]).Duration(), cost.Duration())
				}
			}
		}
	}
}

// A line keeps its places when the limit has another rate, that far apart.
func TestReturns_RateChanged(t *testing.T) {
	r := newAdmissionRig(t, toldLimit(1, time.Hour))
	r.must("10.0.0.1").finish()
	for i := range 60 {
		r.visit(fmt.Sprintf("10.0.0.%d", i), nil)
	}
	r.sleep(time.Second)
	r.swap(toldLimit(1000, time.Second))
	refused := 0
	for range 100 {
		r.sleep(time.Second)
		for range 3 {
			v := r.visit("10.0.1.1", nil)
			if v.granted {
				v.finish()
				continue
			}
			if refused++; v.refusal.retryAfter > time.Second {
				t.Fatalf("told %v", v.refusal.retryAfter)
			}
		}
	}
	if refused < 100 {
		t.Errorf("%d were refused", refused)
	}
}

// Refused datagrams, whose sources may be forged, take no places of those who are told a time.
func TestReturns_Datagrams(t *testing.T) {
	l := toldLimit(1, time.Second)
	l.QueueTimeout, l.MaxQueue = time.Second, 10
	r := newAdmissionRig(t, l)
	r.must("10.0.0.1").finish()
	for i := range 2000 {
		v := &visitor{rig: r, waiter: waiter{flow: *flowFrom(fmt.Sprintf("10.1.%d.%d", i/200, i%200), 1), slots: slots{unverified: true}, listen: "l"}}
		v.flow.Protocol, v.owner = shaper.UDP, v
		r.admission.acquire(&v.waiter, r.now)
	}
	r.sleep(5 * time.Second)
	for range 13 {
		if v := r.visit("10.0.0.2", nil); v.refusedFor != shaper.None {
			if v.refusal.retryAfter > 15*time.Second {
				t.Errorf("told %v", v.refusal.retryAfter)
			}
			return
		}
	}
	t.Error("nobody was refused")
}
