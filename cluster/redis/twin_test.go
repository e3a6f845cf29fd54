package redis

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"shaperd.dev/shaperd/cluster"
)

// twin is a ledger on a server and one in Go, which must always say the same. It is a ledger of package world.
type twin struct {
	t      testing.TB
	store  *Store
	admin  func(...string) any
	ledger *cluster.Ledger
	run    string // of the process that the server is said to be
	runs   int    // of ledger

	replication string // ID of the server's

	saves int
	calls int
	epoch int64
	seen  coverage
}

// newTwin returns a twin without state, at a server that has nothing else.
func newTwin(t testing.TB, sv *server) *twin {
	w := &twin{t: t, store: openStore(t, Options{URL: "unix://" + sv.socket}), admin: sv.admin(t), ledger: &cluster.Ledger{}, seen: coverage{}}
	w.admin("FLUSHALL")
	w.Load(nil, "first")
	return w
}

// newEpoch makes the ledger in Go begin an epoch. Its name is that of the process that the script has, but for zeros in
// front, which do not change the numbers of epochs.
func (w *twin) newEpoch() {
	w.runs++
	if w.replication == "" {
		w.replication = regexp.MustCompile("master_replid:([0-9a-f]+)").FindStringSubmatch(fmt.Sprint(w.admin("INFO", "replication")))[1]
	}
	w.ledger.Run = strings.Repeat("\x00", w.runs) + w.run + " " + w.replication
}

// connect makes the store take the server for the process that it is said to be.
func (w *twin) connect() {
	if err := w.store.ensure(within(w.t, 10*time.Second)); err != nil {
		w.t.Fatal(err)
	}
	w.store.conn.run = w.run
}

func timeText(now cluster.Time) string { return strconv.FormatInt(int64(now), 10) }

// Call makes a call to both.
func (w *twin) Call(now cluster.Time, q *cluster.Request) *cluster.Reply {
	w.calls++
	want := w.ledger.Call(now, q)
	w.connect()
	got, err := w.store.callAt(within(w.t, 10*time.Second), timeText(now), q)
	if err != nil {
		w.t.Fatalf("call %d: %v\n%+v", w.calls, err, q)
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		w.t.Errorf("call %d at %d: %+v\n-ledger +script:\n%s", w.calls, now, q, diff)
	}
	w.seen.note(q, want)
	if want.Epoch != w.epoch {
		w.epoch = want.Epoch
		w.seen["epochs"]++
	}
	return got
}

// Forget has both forget a host.
func (w *twin) Forget(now cluster.Time, host string) bool {
	want := w.ledger.Forget(now, host)
	w.connect()
	got, err := w.store.forgetAt(within(w.t, 10*time.Second), timeText(now), host)
	if err != nil || got != want {
		w.t.Errorf("call %d: forget %q: the script %v, %v, the ledger %v", w.calls, host, got, err, want)
	}
	if want {
		w.seen["forgotten"]++
	}
	return got
}

// Save keeps a copy of both states, as a replica does that does not receive newer writes.
func (w *twin) Save() any {
	w.saves++
	suffix := fmt.Sprint(" copy ", w.saves)
	for _, key := range w.store.target.keys() {
		w.admin("COPY", key, key+suffix)
	}
	return savedTwin{w.ledger.Clone(), suffix}
}

type savedTwin struct {
	ledger *cluster.Ledger
	suffix string
}

// Load puts another process with a saved state, or none, in the place of the server.
func (w *twin) Load(state any, run string) {
	saved, _ := state.(savedTwin)
	for _, key := range w.store.target.keys() {
		if saved.ledger == nil || w.admin("COPY", key+saved.suffix, key, "REPLACE") == int64(0) {
			w.admin("DEL", key)
		}
	}
	w.ledger = &cluster.Ledger{}
	if saved.ledger != nil {
		w.ledger = saved.ledger.Clone()
	}
	w.run = run
	w.newEpoch()
}

// compareSnapshots compares what both know.
func (w *twin) compareSnapshots(now cluster.Time, keys ...string) {
	w.connect()
	want := w.ledger.Snapshot(now, slices.Clone(keys)...)
	got, err := w.store.snapshotAt(within(w.t, 10*time.Second), timeText(now), keys)
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); err != nil || diff != "" {
		w.t.Errorf("snapshot after call %d: %v\n-ledger +script:\n%s", w.calls, err, diff)
	}
}

// strayMarks counts the marks that no member will ask for.
const strayMarks = `local of, n = {}, 0
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  if all[i] ~= '' then of[cmsgpack.unpack(all[i + 1])[9]] = true end
end
local marks = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
for i = 2, #marks, 2 do
  if not of[tonumber(marks[i])] then n = n + 1 end
end
return n`

// checkMarks looks for marks that would be kept for ever.
func (w *twin) checkMarks() {
	keys := w.store.target.keys()
	if n := w.admin("EVAL", strayMarks, "2", keys[0], keys[4]); n != int64(0) {
		w.t.Errorf("%d marks of nobody", n)
	}
}

// evict removes one of the keys of the server, or a part of one, if it is not empty.
func (w *twin) evict(i int, all bool, field string) (removed bool) {
	key := w.store.target.keys()[i]
	n := int64(0)
	switch {
	case all:
		n = w.admin("DEL", key).(int64)
	case i < 2:
		n = w.admin("HDEL", key, field).(int64)
	default:
		n = w.admin("ZREMRANGEBYRANK", key, "0", "0").(int64)
	}
	if n == 0 {
		return false
	}
	if w.admin("EXISTS", w.store.target.keys()[0]) == int64(0) {
		w.ledger = &cluster.Ledger{}
	}
	w.newEpoch()
	return true
}

// coverage counts what was seen.
type coverage map[string]int

func (c coverage) add(o coverage) {
	for what, n := range o {
		c[what] += n
	}
}

// missing returns what must be seen, and was not.
func (c coverage) missing() (missing []string) {
	for _, what := range []string{
		"epochs", "claims", "parts of claims", "counted", "refusal 1", "refusal 2", "refusal 3", "refusal 4", "refusal 5", "resync", "full page", "cold", "short",
		"tight", "slots lent", "tickets sold", "gone", "forgotten", "differ", "eviction",
	} {
		if c[what] == 0 {
			missing = append(missing, what)
		}
	}
	return missing
}

func (c coverage) note(q *cluster.Request, r *cluster.Reply) {
	for what, is := range map[string]bool{
		"claims": q.Claim && r.Renew, "parts of claims": q.Claim && q.More && r.Refused == 0, "counted": r.Counted, "resync": r.Resync, "full page": len(r.Events) == 256, "gone": len(r.Gone) > 0, "differ": r.Differ > 0,
		fmt.Sprintf("refusal %d", r.Refused): r.Refused != 0,
	} {
		if is {
			c[what]++
		}
	}
	for _, e := range r.Events {
		if e.Cold {
			c["cold"]++
		}
	}
	for _, sale := range r.Sales {
		if sale.N > 0 {
			c["tickets sold"]++
		}
	}
	for _, g := range r.Grants {
		if cluster.IsSlots(g.Key) && r.AllTold && !g.Short && g.Parts > cluster.Whole/2 {
			c["slots lent"]++
		}
		if g.Short {
			c["short"]++
		}
		if g.Tight {
			c["tight"]++
		}
	}
}
