package cluster

import (
	"fmt"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestLedger_HostileCalls has hosts send any valid calls, beside one that keeps to the rules. What the ledger
// remembers stays bounded, and others are not given what it has given away.
func TestLedger_HostileCalls(t *testing.T) {
	random := testutil.Rand(t)
	for range 20 {
		l := Ledger{Run: "a"}
		now := Second
		p := testParams(1 + random.IntN(5))
		honest := NewHost(HostOptions{Params: p, Name: "honest", Start: 1}, now)
		last := &Reply{}
		// number returns one that may mean something, or a limit.
		number := func(most int64) int64 {
			return max(0, min(most, []int64{0, 1, most, last.N, last.N + 1, last.Epoch, last.Version, random.Int64N(most + 1), random.Int64N(100), Whole / 2}[random.IntN(10)]))
		}
		flag := func() bool { return random.IntN(2) == 0 }
		calls, refused := 0, 0
		for n := range 2000 {
			now += Time(random.Int64N(int64(Second / 5)))
			if random.IntN(100) == 0 {
				now += Time(random.Int64N(int64(5 * Second)))
			}
			if random.IntN(3) == 0 {
				honest.Want("k0", Whole, 1)
				honest.Reply(now, l.Call(now, honest.Request(now, nil)))
				continue
			}
			q := &Request{
				Params: p, Host: fmt.Sprintf("h%d", random.IntN(p.Hosts+2)), Start: number(3), N: int64(n + 1), Got: number(maxNumber), GotAge: Time(number(maxNumber)),
				Epoch: last.Epoch, Leased: flag(), Claim: flag(), More: flag(), Over: flag(), Left: flag(), Leave: random.IntN(20) == 0,
				Known: number(maxNumber), Digest: random.Uint64(),
			}
			if random.IntN(10) == 0 {
				q.Epoch, q.N, q.Params = number(maxNumber), number(maxNumber), Params{Hosts: 1 + random.IntN(MaxHosts), Lease: p.Lease, Step: p.Step, Strict: flag()}
			}
			for range random.IntN(5) {
				q.Items = append(q.Items, Item{fmt.Sprintf("k%d", random.IntN(10)), number(Whole), number(Whole), number(MaxWeight), 0, 0})
			}
			for range random.IntN(min(3, q.Params.Hosts+1)) {
				q.Gone = append(q.Gone, Gone{fmt.Sprintf("h%d", random.IntN(10)), number(maxNumber), number(maxNumber)})
			}
			if err := q.Validate(); err != nil {
				t.Fatal(err)
			}
			r := l.Call(now, q)
			calls++
			if r.Refused != NotRefused {
				refused++
			}
			last = r
			checkBounds(t, &l, r)
		}
		if refused == 0 || refused == calls {
			t.Errorf("%d of %d calls are refused", refused, calls)
		}
	}
}

func checkBounds(t *testing.T, l *Ledger, r *Reply) {
	t.Helper()
	s := l.state
	if n := len(s.members) + s.countGone(); n > s.params.Hosts || len(s.gone) > 2*s.params.Hosts || r.Live > s.params.Hosts {
		t.Fatalf("%d hosts of %d, %d gone or replaced, %d live", n, s.params.Hosts, len(s.gone), r.Live)
	}
	for _, g := range r.Grants {
		if g.Parts < 0 || g.Parts > Whole {
			t.Fatalf("grant %+v", g)
		}
	}
	for key, b := range s.buckets {
		// Who says to have learned twice that the bucket is hot may have its floor twice.
		if sum := b.others(""); sum > Whole+s.params.Floor()*int64(s.params.Hosts) || len(b.holders) > s.params.Hosts+1 {
			t.Fatalf("bucket %s: %d holders have %d parts", key, len(b.holders), sum)
		}
	}
	if n := len(s.log.hotVersion); n != len(s.buckets) {
		t.Fatalf("%d events of %d hot buckets", n, len(s.buckets))
	}
}

// TestLedger_ManyBuckets has a host want ever more buckets.
func TestLedger_ManyBuckets(t *testing.T) {
	l := Ledger{Run: "a"}
	now := Second
	for n := range maxBuckets/MaxItems + 10 {
		now += Millisecond
		q := &Request{Params: testParams(3), Host: "h", Start: 1, N: int64(n + 1)}
		for i := range MaxItems {
			q.Items = append(q.Items, Item{Key: fmt.Sprintf("%d-%d", n, i), Want: Whole, Weight: 1})
		}
		l.Call(now, q)
	}
	if hot := l.Snapshot(now, "").Hot; hot != maxBuckets {
		t.Errorf("%d buckets are hot; want the maximum, %d", hot, maxBuckets)
	}
	// Another host is told of all, page by page.
	q := &Request{Params: testParams(3), Host: "other", Start: 1}
	told := 0
	for n := 1; n == 1 || told > 0 && told%eventPage == 0; n++ {
		q.N = int64(n)
		r := l.Call(now, q)
		if told += len(r.Events); len(r.Events) == 0 {
			break
		}
		q.Epoch, q.Known = r.Epoch, r.Events[len(r.Events)-1].Version
	}
	if told != maxBuckets {
		t.Errorf("another host is told of %d buckets", told)
	}
}

// A host that is new takes the place of one that is gone, not of one that the ledger has not heard of in its epoch.
func TestLedger_NewHost(t *testing.T) {
	for _, key := range []string{"db", "#db"} {
		g := newGroup(3)
		g.run(2 * Second)
		a, b, c := g.hosts[0], g.hosts[1], g.hosts[2]
		c.Want(key, Whole, 1)
		g.run(Second)
		for a.Reply(g.now, g.ledger.Call(g.now, a.Leave(g.now))) {
		}
		g.hosts = []*Host{b, c}
		g.run(2 * Second)
		// c is cut off, and the ledger restarts empty.
		g.ledger = Ledger{Run: "b"}
		d := NewHost(HostOptions{Params: testParams(3), Name: "d", Start: 1, Left: true}, g.now)
		g.hosts = []*Host{b, d}
		for range 200 {
			b.Want(key, Whole, 1)
			d.Want(key, Whole, 1)
			g.run(Second / 10)
			if sum := b.Use(key, g.now) + c.Use(key, g.now) + d.Use(key, g.now); sum > Whole {
				t.Fatalf("at %v, hosts together may use %.3f of %s", g.now, float64(sum)/float64(Whole), key)
			}
		}
	}
}

// A ledger that is paused with its clock often, and briefly, must notice that before a host that it does not hear of is
// alone.
func TestLedger_PausedOften(t *testing.T) {
	g := newGroup(2)
	g.run(2 * Second)
	a, b := g.hosts[0], g.hosts[1]
	a.Want("db", Whole, 1)
	g.run(Second)
	clock, next := g.now, g.now
	var call *Request
	for i := range 600 { // steps of 10 ms; b is cut off
		g.now += 10 * Millisecond
		runs := i%25 >= 20
		if runs {
			clock += 10 * Millisecond
		}
		if call == nil && g.now >= next {
			a.Want("db", Whole, 1)
			call, next = a.Request(g.now, nil), g.now+Second/10
		}
		if call != nil && runs {
			if a.Reply(g.now, g.ledger.Call(clock, call)) {
				next = g.now
			}
			call = nil
		}
		b.endLease(g.now)
		if sum := a.Use("db", g.now) + b.Use("db", g.now); sum > Whole {
			t.Fatalf("after %v, hosts together may use %.3f", Time(i)*10*Millisecond, float64(sum)/float64(Whole))
		}
	}
}

// A clock of a host that is somewhat fast does not make the ledger forget all.
func TestLedger_FastHost(t *testing.T) {
	g := newGroup(2)
	g.run(2 * Second)
	epoch := g.ledger.state.epoch
	a, now := g.hosts[0], g.now
	for range 2000 {
		for a.Reply(now, g.ledger.Call(g.now, a.Request(now, nil))) {
		}
		g.now += Second / 10
		now += Second / 10 * 105 / 100
	}
	if g.ledger.state.epoch != epoch {
		t.Error("an epoch has begun")
	}
}

func TestHost_KnowsNoOthersWhileAlone(t *testing.T) {
	g := newGroup(3)
	g.run(2 * Second)
	h := g.hosts[0]
	for range 600 {
		g.now += Second / 10
		h.Request(g.now, nil) // no answer
	}
	if s := h.Status(g.now); s.Joined || s.Live != 0 {
		t.Errorf("a host that has been alone for a minute knows of %d hosts", s.Live)
	}
}
