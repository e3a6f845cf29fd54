package redis

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/cluster/internal/world"
	"shaperd.dev/shaperd/internal/testutil"
)

var parityCalls = flag.Int("parity.calls", 6000, "number of calls in TestParity and in TestParity_World, for each server")

// TestParity makes the same calls to the script on a real server and to cluster.Ledger, in random schedules with
// faults and with calls that no host would make, and compares all replies, and now and then what both know.
func TestParity(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		sv := startServer(t, binary)
		random := testutil.Rand(t)
		seen, calls := coverage{}, 0
		for calls < *parityCalls || len(seen.missing()) > 0 && calls < 20**parityCalls {
			seed := random.Uint64()
			p := newSchedule(newTwin(t, sv), rand.New(rand.NewPCG(seed, 1)))
			if p.run(100 + random.IntN(900)); t.Failed() {
				t.Fatalf("schedule %d", seed)
			}
			calls += p.calls
			seen.add(p.seen)
		}
		t.Logf("%d calls, with %v", calls, seen)
		if missing := seen.missing(); len(missing) > 0 {
			t.Errorf("the schedules are too tame: no call with %q", missing)
		}
	})
}

// TestParity_World is TestParity with the schedules of package world, in which messages are late and hosts share
// for a longer time.
func TestParity_World(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		sv := startServer(t, binary)
		random := testutil.Rand(t)
		for calls := 0; calls < *parityCalls; {
			seed := random.Uint64()
			w := newTwin(t, sv)
			r := world.Run(world.Options{
				Seed: seed, Length: 60 * cluster.Second, Strict: seed%4 == 0,
				New:   func(run string) world.Ledger { w.Load(nil, run); return w },
				After: func(world.Ledger, cluster.Time) string { return failed(t) },
			})
			if w.checkMarks(); r.Violation != "" || t.Failed() {
				t.Fatalf("schedule %d: %s", seed, r.Violation)
			}
			calls += w.calls
		}
	})
}

func failed(t *testing.T) string {
	if t.Failed() {
		return "the script and the ledger differ"
	}
	return ""
}

// FuzzParity is TestParity with schedules that the fuzzer chooses, by what they reach in the ledger in Go.
func FuzzParity(f *testing.F) {
	random := rand.New(rand.NewPCG(1, 1))
	for range 10 {
		seed := make([]byte, 3000)
		for i := range seed {
			seed[i] = byte(random.Uint32())
		}
		f.Add(seed)
	}
	sv := startServer(f, binaries()[0])
	f.Fuzz(func(t *testing.T, choices []byte) {
		source := &choiceSource{choices}
		p := newSchedule(newTwin(t, sv), rand.New(source))
		for len(source.left) > 0 && p.calls < 2000 && !t.Failed() {
			p.step()
		}
	})
}

// choiceSource is a source of random numbers whose high bits are two bytes each, then zeros.
type choiceSource struct{ left []byte }

func (c *choiceSource) Uint64() uint64 {
	const low = 1<<47 + 1 // package rand would draw zeros again for ever
	if len(c.left) < 2 {
		c.left = nil
		return low
	}
	n := uint64(c.left[0])<<56 | uint64(c.left[1])<<48 | low
	c.left = c.left[2:]
	return n
}

// schedule is hosts that call a twin.
type schedule struct {
	*twin
	random *rand.Rand
	params cluster.Params
	offset cluster.Time // of the ledger's clock
	time   cluster.Time // that passes everywhere
	grid   cluster.Time // all times are multiples of it, so that boundaries are met exactly
	pace   cluster.Time // the most that passes between two calls, as a rule
	stay   int          // of so many calls of a host, one says that it leaves
	many   int          // of so many changes, one is of many buckets
	hosts  []*scheduleHost
	keys   []string
	old    []*cluster.Request
	saved  []any
}

type scheduleHost struct {
	*cluster.Host
	start      int64
	cut        bool
	offset     cluster.Time
	calledAt   cluster.Time // by the ledger's clock
	nextChange cluster.Time
}

func newSchedule(w *twin, random *rand.Rand) *schedule {
	p := &schedule{twin: w, random: random, grid: 1}
	if random.IntN(2) == 0 {
		p.grid = 10 * cluster.Millisecond
	}
	p.params = cluster.Params{
		Hosts: 1 + random.IntN(6), Lease: 100*cluster.Millisecond + 4*p.upTo(600*cluster.Millisecond),
		Step: 20*cluster.Millisecond + p.upTo([]cluster.Time{50, 1500, 1500, 1500}[random.IntN(4)]*cluster.Millisecond), Strict: random.IntN(4) == 0,
	}
	p.offset = p.upTo(1e15)
	p.pace = min([]cluster.Time{10, 30, 200}[random.IntN(3)]*cluster.Millisecond, p.params.Step)
	p.stay, p.many = []int{15, 300}[random.IntN(2)], []int{10, 300}[random.IntN(2)]
	for i := range 4 + random.IntN(4) {
		p.keys = append(p.keys, fmt.Sprintf("%slimit/%d,%c", []string{"", cluster.SlotsPrefix, cluster.TicketsPrefix}[i%3], i, 'A'+i*7))
	}
	for i := range min(p.params.Hosts+random.IntN(4), len(names)) {
		h := &scheduleHost{offset: p.upTo(1e12)}
		p.hosts = append(p.hosts, h)
		p.start(i)
	}
	return p
}

// upTo returns a random span of at most d.
func (p *schedule) upTo(d cluster.Time) cluster.Time {
	return p.grid * cluster.Time(p.random.Int64N(int64(d/p.grid)+1))
}

// names sort differently in other locales.
var names = []string{"a", "B", "c-1", "c1", ".x", "_z", "Z"}

func (p *schedule) start(i int) {
	h := p.hosts[i]
	h.start += int64(p.random.IntN(3))
	options := cluster.HostOptions{
		Params: p.params, Name: names[i], Start: h.start, Digest: uint64(p.random.IntN(8)/7) - 1, Info: fmt.Sprint("host ", i),
	}
	if p.random.IntN(10) == 0 {
		options.Params.Hosts++
	}
	h.Host = cluster.NewHost(options, p.time+h.offset)
}

func (p *schedule) run(calls int) {
	for p.calls < calls && !p.t.Failed() {
		p.step()
	}
	p.compare()
	p.checkMarks()
}

// step lets something happen.
func (p *schedule) step() {
	switch r := p.random.IntN(1000); {
	case r < 600:
		p.time += p.upTo(p.pace)
	case r < 603:
		p.time += p.upTo(4 * cluster.Second)
	case r < 610:
		p.time += p.params.Step
	case r < 613:
		p.sleepQuietly()
	case r < 640:
		p.fault()
	case r < 645:
		p.awaitBoundary()
	}
	p.hostCalls(p.random.IntN(len(p.hosts)))
	if p.calls%50 == 0 {
		p.compare()
	}
}

// sleepQuietly lets half a minute pass in which hosts call and want nothing, so that buckets become cold.
func (p *schedule) sleepQuietly() {
	for _, h := range p.hosts {
		for _, key := range p.keys {
			if !cluster.IsTickets(key) {
				h.Want(key, p.random.Int64N(p.params.Floor()+1), 1)
			} else {
				h.WantTickets(key, 0, 1, cluster.Second, 0)
			}
		}
		h.nextChange = p.time + 35*cluster.Second
	}
	for range 80 {
		p.time += min(400*cluster.Millisecond, p.params.Step)
		for i := range p.hosts {
			p.hostCalls(i)
		}
	}
}

// awaitBoundary lets time pass until exactly so long after the last call of a host that what it has changes, while
// the others call.
func (p *schedule) awaitBoundary() {
	i := p.random.IntN(len(p.hosts))
	l, g := p.params.Lease, p.params.Step
	spans := []cluster.Time{l, l + g, 2 * l, 2*l + g, 2*l + 100*cluster.Millisecond}
	at := p.hosts[i].calledAt + spans[p.random.IntN(len(spans))]
	for p.now() < at {
		p.time += min(g, at-p.now())
		if j := p.random.IntN(len(p.hosts)); j != i {
			p.hostCalls(j)
		}
	}
	if p.random.IntN(2) == 0 {
		p.Forget(p.now(), p.hosts[i].Name)
	}
	for range p.hosts {
		p.hostCalls(p.random.IntN(len(p.hosts)))
	}
}

func (p *schedule) now() cluster.Time { return p.time + p.offset }

// hostCalls has a host call, and call again as long as it wants to.
func (p *schedule) hostCalls(i int) {
	h := p.hosts[i]
	if p.time >= h.nextChange {
		p.changeWants(h)
	}
	for range 4 {
		q := h.Request(p.time+h.offset, func(string) int64 { return max(0, p.random.Int64N(4*cluster.Whole)-3*cluster.Whole) })
		if p.random.IntN(p.stay) == 0 {
			q = h.Leave(p.time + h.offset)
		}
		if p.random.IntN(30) == 0 {
			p.mutate(q)
		}
		if h.cut || p.random.IntN(50) == 0 || q.Validate() != nil {
			return // the call is lost, or refused before it is sent
		}
		if len(p.old) > 0 && p.random.IntN(40) == 0 {
			p.Call(p.now(), p.old[p.random.IntN(len(p.old))])
		}
		if p.old = append(p.old, q); len(p.old) > 10 {
			p.old = p.old[1:]
		}
		h.calledAt = p.now()
		r := p.Call(p.now(), q)
		if p.random.IntN(40) == 0 {
			return // the reply is lost
		}
		p.time += p.upTo(5 * cluster.Millisecond)
		if !h.Reply(p.time+h.offset, r) {
			return
		}
	}
}

func (p *schedule) changeWants(h *scheduleHost) {
	for range 1 + p.random.IntN(2) {
		key := p.keys[p.random.IntN(len(p.keys))]
		want := []int64{0, p.random.Int64N(cluster.Whole), p.random.Int64N(2000), cluster.Whole}[p.random.IntN(4)]
		weight := 1 + p.random.Int64N(5)*p.random.Int64N(5)
		if cluster.IsTickets(key) {
			h.WantTickets(key, p.random.Int64N(80)*p.random.Int64N(2), weight, 1+p.upTo(2*p.params.Lease), p.upTo(cluster.Second)*cluster.Time(p.random.IntN(2)))
			continue
		}
		h.Want(key, want, weight)
		if p.random.IntN(2) == 0 {
			h.Lower(key, want)
		}
	}
	if p.random.IntN(p.many) == 0 {
		for i := range 300 {
			h.Want(fmt.Sprint("many-", i), p.random.Int64N(cluster.Whole), 1)
		}
	}
}

// mutate makes a call one that a host would not make.
func (p *schedule) mutate(q *cluster.Request) {
	anything := []int64{0, 1, 2, q.N, q.N + 1, q.Start, q.Start + 1, q.Epoch, q.Epoch + 1, q.Known, q.Known + 3, int64(p.now()), maxNumber}
	n := anything[p.random.IntN(len(anything))]
	switch p.random.IntN(17) {
	case 0:
		q.N = n
	case 1:
		q.Start = n % 10
	case 2:
		q.Got = n
	case 3:
		q.GotAge = p.upTo(6 * cluster.Second)
	case 4:
		q.Epoch = n
	case 5:
		q.Known = n
	case 6:
		q.Leased = !q.Leased
	case 7:
		q.Claim = !q.Claim
	case 8:
		q.Over = !q.Over
	case 9:
		q.Leave = !q.Leave
	case 10:
		q.More = !q.More
	case 11:
		q.Gone = append(slices.Clone(q.Gone), cluster.Gone{
			Host: names[p.random.IntN(len(names))], Start: int64(p.random.IntN(5)), N: int64(p.random.IntN(50)),
		})
	case 12:
		q.Info = fmt.Sprint("changed ", n)
	case 13:
		q.Left = !q.Left
	case 14:
		q.Start, q.Epoch = q.Start+1, n
	case 15:
		q.Told = !q.Told
	case 16:
		for range 1 + p.random.IntN(5) {
			q.Items = append(q.Items[:len(q.Items):len(q.Items)], cluster.Item{
				Key: p.keys[p.random.IntN(len(p.keys))], Has: p.random.Int64N(cluster.Whole + 1), Want: p.random.Int64N(cluster.Whole + 1),
				Weight: p.random.Int64N(cluster.MaxWeight + 1),
				Every:  1 + p.upTo(cluster.Second), Burst: p.upTo(cluster.Second),
			})
		}
		q.Items = q.Items[:min(len(q.Items), cluster.MaxItems)]
	}
}

// fault makes something happen that is not a call.
func (p *schedule) fault() {
	i := p.random.IntN(len(p.hosts))
	switch p.random.IntN(12) {
	case 0:
		p.start(i)
	case 1, 2:
		p.hosts[i].cut = !p.hosts[i].cut
	case 3: // the clock of the server is set
		p.offset += p.upTo(20*cluster.Second) - 8*cluster.Second
	case 4: // a small step
		p.offset += p.upTo(40*cluster.Millisecond) - 30*cluster.Millisecond
	case 5:
		p.saved = append(p.saved, p.Save())
	case 6:
		var state any
		if len(p.saved) > 0 && p.random.IntN(3) > 0 {
			state = p.saved[p.random.IntN(len(p.saved))]
		}
		p.Load(state, fmt.Sprint("process ", p.calls))
	case 7:
		p.evictSomething()
	case 8, 10, 11:
		for range 4 {
			p.Forget(p.now(), names[p.random.IntN(len(names))])
		}
		p.compare()
	case 9: // the server and its clock stand still
		d := p.upTo(4 * cluster.Second)
		p.time, p.offset = p.time+d, p.offset-d
	}
}

// evictSomething removes one of the keys, or a part of one. The next call begins an epoch.
func (p *schedule) evictSomething() {
	for range 5 {
		if p.evict(p.random.IntN(5), p.random.IntN(2) == 0, []string{names[0], p.keys[0]}[p.random.IntN(2)]) {
			p.seen["eviction"]++
			h := p.hosts[0]
			p.Call(p.now(), h.Request(p.time+h.offset, nil))
			return
		}
	}
}

func (p *schedule) compare() {
	p.compareSnapshots(p.now())
	p.compareSnapshots(p.now(), p.keys[0], "many-7", p.keys[1])
}
