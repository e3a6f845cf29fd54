package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/cluster/member"
	"shaperd.dev/shaperd/control"
	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/internal/sharing"
	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// ledgerInMemory is a store for several hosts.
type ledgerInMemory struct {
	mu        sync.Mutex
	ledger    cluster.Ledger
	start     time.Time
	err       error // of everything
	snapshots int
}

func (s *ledgerInMemory) now() cluster.Time {
	return cluster.FromDuration(time.Since(s.start)) + cluster.Second
}

func (s *ledgerInMemory) Call(_ context.Context, q *cluster.Request) (*cluster.Reply, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return nil, s.err
	}
	return s.ledger.Call(s.now(), q), nil
}

func (s *ledgerInMemory) Snapshot(_ context.Context, keys ...string) (cluster.Snapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.snapshots++
	return s.ledger.Snapshot(s.now(), keys...), s.err
}

func (s *ledgerInMemory) Forget(_ context.Context, host string) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ledger.Forget(s.now(), host), s.err
}

func (s *ledgerInMemory) Server() string { return "memory" }

func (s *ledgerInMemory) Close() {}

func (s *ledgerInMemory) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// busyPlane is a plane where sources wait for the buckets of some limits, and connections use slots.
type busyPlane struct {
	mu    sync.Mutex
	keys  []shaper.Key
	slots []shaper.Demand
}

func (p *busyPlane) SetShares(shaper.Shares) {}

func (p *busyPlane) Demands(all []shaper.Demand) []shaper.Demand {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range p.keys {
		all = append(all, shaper.Demand{Key: k, Used: leaky.Second / 100, Waiting: 1})
	}
	return append(all, p.slots...)
}

// groupHost is a daemon without planes, in a group.
type groupHost struct {
	*server
	plane *busyPlane
	log   *testutil.Buffer
	stop  func() // it crashes
}

const sharedLimits = `
[[listen]]
name       = "db"
address    = ["tcp://127.0.0.1:5432"]
downstream = ["127.0.0.1:5433"]
[[limit]]
name            = "total"
rate            = "80Mbit/s"
max_connections = 100
shared          = true
[[limit]]
name            = "per-source"
key             = ["source"]
rate            = "8Mbit/s"
new_connections = "40/s"
shared          = true
[shared]
hosts = 3
`

// newServer returns a server that has a configuration and nothing else.
func newServer(t *testing.T, text string) *groupHost {
	t.Helper()
	path := filepath.Join(t.TempDir(), "shaperd.toml")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	l, err := plan.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	h := &groupHost{plane: &busyPlane{}, log: new(testutil.Buffer)}
	h.server = &server{controller: newController(), shaper: shaper.New(1000), log: slog.New(slog.NewTextHandler(h.log, nil))}
	h.group = h.newGroup()
	p, err := l.Compile(h.shaper)
	if err != nil {
		t.Fatal(err)
	}
	h.shaper.Swap(p, leaky.Second)
	h.setCurrent(l, &overrides{})
	return h
}

// join adds a host with sharedLimits, in which replace has old and new texts, to the group at store.
func (s *ledgerInMemory) join(t *testing.T, name string, replace ...string) *groupHost {
	t.Helper()
	text := strings.NewReplacer(replace...).Replace(sharedLimits + fmt.Sprintf("name = %q\nstore = \"redis://10.0.0.9:6379\"\n", name))
	h := newServer(t, text)
	l, _ := h.current()
	c := &l.Config.Shared
	ctx, cancel := context.WithCancel(t.Context())
	m := member.Start(ctx, member.Options{
		Host: cluster.HostOptions{
			Params: sharing.Params(c), Name: name, Start: int64(s.now()), Alone: cluster.Alone(c.Alone), Digest: l.Config.SharedDigest(), Info: sharing.NewInfo("1.0", l.Config).Text(nil),
		},
		Interval: c.Interval, Store: s, Planes: []member.Plane{h.plane, &busyPlane{}}, Names: sharedNames{h.shaper, sharing.Params(c)},
		Clock: s.now, Now: func() leaky.Time { return leaky.FromDuration(time.Since(s.start)) }, Log: h.server.log,
	})
	h.group.current.Store(m)
	h.stop = func() { cancel(); m.Wait() }
	t.Cleanup(h.stop)
	return h
}

func newLedger() *ledgerInMemory {
	return &ledgerInMemory{ledger: cluster.Ledger{Run: "a"}, start: time.Now()}
}

// state returns what h knows, with the ledger.
func (h *groupHost) state() api.Shared {
	s := h.Shared()
	h.AddLedger(&s)
	return s
}

// problems returns the problems that h reports, as lines.
func (h *groupHost) problems() string {
	var lines []string
	for _, p := range h.state().Problems {
		lines = append(lines, p.Severity+" "+p.Title+": "+p.Text)
	}
	return strings.Join(lines, "\n")
}

// wantProblems compares the problems that h reports.
func (h *groupHost) wantProblems(t *testing.T, want ...string) {
	t.Helper()
	got := h.problems()
	for i, line := range strings.Split(got, "\n") {
		if i < len(want) && strings.HasPrefix(line, want[i]) || got == "" && len(want) == 0 {
			continue
		}
		t.Errorf("problems:\n%s\nwant:\n%s", got, strings.Join(want, "\n"))
		return
	}
	if got != "" && len(strings.Split(got, "\n")) != len(want) {
		t.Errorf("problems:\n%s\nwant:\n%s", got, strings.Join(want, "\n"))
	}
}

func TestShared_Joined(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newLedger()
		a, b := store.join(t, "a"), store.join(t, "b")
		c := store.join(t, "c")
		a.wantProblems(t, "warning Joining: the ledger does not know yet what the others use. This host is alone just now, and lets nothing of each shared limit pass.")
		p := b.shaper.Policy()
		total := shaper.Key{Limit: p.State(p.Find("total")).ID}
		source, _, err := p.ParseShareName("per-source/new|source=192.0.2.1/32")
		if err != nil {
			t.Fatal(err)
		}
		b.plane.mu.Lock()
		b.plane.keys = []shaper.Key{total, source}
		pool := shaper.SlotPool{Most: 100, Hosts: 3}
		used, want := pool.Parts(60), pool.Parts(61) // one waits
		b.plane.slots = []shaper.Demand{{Key: total, Slots: true, Held: used, Want: want, Waiting: 1, Fit: used, Next: want}}
		b.plane.mu.Unlock()
		time.Sleep(4 * time.Second)
		for _, h := range []*groupHost{a, b, c} {
			h.wantProblems(t)
		}
		s := b.state()
		if s.State != "joined" || !s.Counted || s.Live != 3 || s.Hosts != 3 || s.Name != "b" || s.For < 2 || s.For > 4 || s.LeaseLeft <= 0 || s.HotBuckets != 3 || s.Alone != "share" {
			t.Errorf("%+v", s)
		}
		if s.Ledger == nil || !s.Ledger.Settled || len(s.Ledger.Hosts) != 3 || s.Ledger.Unknown != 0 {
			t.Fatalf("ledger: %+v, %s", s.Ledger, s.LedgerError)
		}
		for i, h := range s.Ledger.Hosts {
			if h.Name != string(rune('a'+i)) || h.State != "counted" || h.Age > 0.2 || h.LeaseLeft <= 0 || h.Differs || h.Version != "1.0" {
				t.Errorf("%+v", h)
			}
		}
		perSource, ofTotal := s.Limits[0], s.Limits[1]
		slots := ofTotal.Buckets[1]
		if !slots.Slots || !slots.Hot || slots.Key != "all" || slots.Share != 0.61 || slots.Want < 0.6 || len(slots.Holders) != 1 || slots.Holders[0].Host != "b" || slots.Holders[0].Share != slots.Share {
			t.Errorf("slots: %+v", slots)
		}
		if len(s.Limits) != 2 || ofTotal.Limit != "total" || ofTotal.Key != "all" || ofTotal.Rate != 1e7 || ofTotal.HostConnections != 33 || ofTotal.MaxConnections != 100 ||
			perSource.Key != "source" || perSource.ColdShare < 0.333 || perSource.ColdShare > 0.334 || perSource.HotBuckets != 1 {
			t.Errorf("%+v", s.Limits)
		}
		bucket, hot := ofTotal.Buckets[0], perSource.Buckets[0]
		if bucket.Share < 0.9 || bucket.Want != 1 || !bucket.Hot || bucket.Key != "all" || bucket.NewConnections || len(bucket.Holders) == 0 {
			t.Errorf("%+v", bucket)
		}
		if hot.Key != "source 192.0.2.1/32" || !hot.NewConnections || hot.Share < 0.9 {
			t.Errorf("%+v", hot)
		}
		if held := bucket.Holders[len(bucket.Holders)-1]; held.Host == "a" || held.Share < 0 {
			t.Errorf("%+v", held)
		}
	})
}

func TestShared_Disagreement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newLedger()
		a, b := store.join(t, "a"), store.join(t, "b", "80Mbit/s", "90Mbit/s")
		store.join(t, "c", "\nshared          = true\n[[limit]]", "\n[[limit]]")
		time.Sleep(3 * time.Second)
		a.wantProblems(
			t, `critical Hosts disagree: about limit "total": here rate 80Mbit/s = 10MB/s; at b rate 90Mbit/s = 11.25MB/s.`,
			`critical Hosts disagree: about limit "total": it is shared here, and not at c.`,
		)
		b.wantProblems(
			t, `critical Hosts disagree: about limit "total": here rate 90Mbit/s = 11.25MB/s; at a rate 80Mbit/s = 10MB/s.`,
			`critical Hosts disagree: about limit "total": it is shared here, and not at c.`,
		)
		if s := a.state(); s.Differing != 2 || !s.Ledger.Hosts[1].Differs || s.Ledger.Hosts[0].Differs {
			t.Errorf("%+v, %+v", s, s.Ledger)
		}
	})
}

func TestShared_HostsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newLedger()
		a, b := store.join(t, "a"), store.join(t, "b")
		time.Sleep(5 * time.Second)
		a.wantProblems(t)
		time.Sleep(6 * time.Second)
		a.wantProblems(t, `warning Hosts away: 1 of 3 hosts has not called since the ledger began 11s ago, and 1/3 of each shared limit is kept for it. If it is gone for good, or`)
		if err := a.ForgetHost(t.Context(), "b"); !errors.Is(err, control.ErrRefused) || !strings.Contains(err.Error(), "b called ") || !strings.Contains(err.Error(), "stop it first") {
			t.Errorf("forget a host that runs: %v", err)
		}
		if err := a.ForgetHost(t.Context(), "a"); !errors.Is(err, control.ErrRefused) || !strings.Contains(err.Error(), "a is this host itself") {
			t.Errorf("forget the host itself: %v", err)
		}
		b.stop()
		time.Sleep(12 * time.Second)
		a.wantProblems(
			t, `warning Host away: b has not called for 12s, and 1/3 of each shared limit is kept for it. If it is gone for good: "shaperd shared forget b"`,
			"warning Hosts away: 1 of 3 hosts",
		)
		if s := a.state(); s.Live != 1 || s.Ledger.Hosts[1].State != "absent" || s.Ledger.Unknown != 1 {
			t.Errorf("%+v, %+v", s, s.Ledger)
		}
		if err := a.ForgetHost(t.Context(), "b"); err != nil || !strings.Contains(a.log.String(), "host of the group forgotten by operator\" host=b") {
			t.Errorf("forget a host that is gone: %v\n%s", err, a.log)
		}
		time.Sleep(2 * time.Second)
		a.wantProblems(t, "warning Hosts away: 1 of 3 hosts")
		if s := a.state(); s.Live != 2 || s.Gone != 1 || s.Failover != "fast" || s.Ledger.Hosts[1].State != "gone" || s.Ledger.Hosts[1].Name != "b" {
			t.Errorf("%+v, %+v", s, s.Ledger)
		}
	})
}

// With failover = "strict" the part of a host that is gone is kept, and everything says so.
func TestShared_HostsAwayStrict(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newLedger()
		strict := []string{"hosts = 3", "hosts = 3\nfailover = \"strict\""}
		a, b := store.join(t, "a", strict...), store.join(t, "b", strict...)
		time.Sleep(3 * time.Second)
		b.stop()
		time.Sleep(12 * time.Second)
		const kept = `: another host may take its place then. With failover = "strict" its part is kept until one does, or hosts is lowered on all hosts.`
		a.wantProblems(
			t, `warning Host away: b has not called for 12s, and 1/3 of each shared limit is kept for it. If it is gone for good: "shaperd shared forget b"`+kept,
			`warning Hosts away: 1 of 3 hosts has not called since the ledger began 15s ago, and 1/3 of each shared limit is kept for it. If it is gone for good, or was never there: "shaperd shared forget HOST"`+kept,
		)
		if err := a.ForgetHost(t.Context(), "b"); err != nil {
			t.Error(err)
		}
		time.Sleep(2 * time.Second)
		if s := a.state(); s.Failover != "strict" || s.Live != 1 || s.Gone != 1 {
			t.Errorf("%+v", s)
		}
	})
}

func TestWhyKept(t *testing.T) {
	params := cluster.Params{Hosts: 2, Lease: cluster.Second, Step: cluster.Second / 2}
	hosts := []cluster.HostStatus{{Name: "a", Age: cluster.Second / 10}, {Name: "b", Age: 9 * cluster.Second}}
	for _, test := range []struct {
		shot cluster.Snapshot
		host string
		want string
	}{
		{cluster.Snapshot{Params: params, Epoch: 1, Settled: true, Hosts: hosts}, "a", "a called 100ms ago: stop it first, and try again after 2.5s"},
		{cluster.Snapshot{Params: params, Epoch: 1, Hosts: hosts, Age: cluster.Second}, "c", "the ledger began 1s ago and does not know yet what all hosts use: try again after 2.5s"},
		{cluster.Snapshot{Params: params, Epoch: 1, Settled: true, Hosts: hosts[:1], Gone: []cluster.Gone{{Host: "b"}}}, "c", `there is no host "c" in this group: known are a, b`},
		{cluster.Snapshot{Params: params, Epoch: 1, Settled: true, Hosts: hosts}, "b", `the ledger keeps the part of "b": it has called lately,`},
		{cluster.Snapshot{}, "b", `the ledger keeps the part of "b": it has called lately,`},
	} {
		if got := whyKept(&test.shot, test.host); !strings.HasPrefix(got, test.want) {
			t.Errorf("%s, want %s", got, test.want)
		}
	}
}

func TestShared_Alone(t *testing.T) {
	for alone, want := range map[string]string{
		"share":  "critical Alone: no ledger answers: connection refused. This host has been alone for 9s, and lets 1/3 of each shared limit pass.",
		"closed": "critical Alone: no ledger answers: connection refused. This host has been alone for 9s, and lets nothing of each shared limit pass.",
		"open": `critical Not limited together: no ledger answers: connection refused. This host has been alone for 9s, and with alone = "open" lets the whole of each shared limit pass: ` +
			"all hosts together may exceed it.",
	} {
		t.Run(alone, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := newLedger()
				a := store.join(t, "a", "hosts = 3", "hosts = 3\nalone = \""+alone+"\"")
				time.Sleep(3 * time.Second)
				store.fail(errors.New("connection refused"))
				time.Sleep(9980 * time.Millisecond)
				asked := store.snapshots
				got := a.problems()
				if regexp.MustCompile(`for 9(\.[01])?s`).ReplaceAllString(got, "for 9s") != want {
					t.Errorf("problems:\n%s\nwant:\n%s", got, want)
				}
				if s := a.state(); s.State != "alone" || s.Withdrawn != (alone == "open") || s.Alone != alone || s.StoreError != "connection refused" || s.LedgerError != "connection refused" || s.Why == "" {
					t.Errorf("%+v", s)
				}
				if store.snapshots != asked {
					t.Error("a store that does not answer calls is asked for a snapshot")
				}
				if err := a.ForgetHost(t.Context(), "b"); err == nil || errors.Is(err, control.ErrRefused) || !strings.Contains(err.Error(), "connection refused") {
					t.Errorf("forget without a ledger: %v", err)
				}
			})
		})
	}
}

func TestShared_Refused(t *testing.T) {
	const alone = "critical Alone: "
	for _, test := range []struct {
		name string
		join func(t *testing.T, store *ledgerInMemory) *groupHost
		want string
	}{
		{
			"other parameters",
			func(t *testing.T, store *ledgerInMemory) *groupHost {
				return store.join(t, "d", "hosts = 3", "hosts = 4")
			},
			`the group has hosts = 3, and this host hosts = 4. This host has been alone for 5s, and lets 1/4 of each shared limit pass.`,
		},
		{
			"too many", func(t *testing.T, store *ledgerInMemory) *groupHost { return store.join(t, "d") },
			`hosts = 3, and there are as many without this one: raise it on all hosts, or "shaperd shared forget HOST" for one that is gone. This host has been alone for 5s, and lets nothing of each shared limit pass.`,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := newLedger()
				for _, name := range []string{"a", "b", "c"} {
					store.join(t, name)
				}
				time.Sleep(3 * time.Second)
				d := test.join(t, store)
				time.Sleep(5 * time.Second)
				if got := d.problems(); !strings.HasPrefix(got, alone) || !strings.HasSuffix(got, test.want) {
					t.Errorf("problems:\n%s\nwant:\n%s", got, test.want)
				}
			})
		})
	}
}

// Two hosts have one name, and are in the group in turns: both say so all the time.
func TestShared_SameName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newLedger()
		first := store.join(t, "a")
		store.join(t, "b")
		time.Sleep(3 * time.Second)
		second := store.join(t, "a")
		time.Sleep(10 * time.Second)
		joined := map[*groupHost]int{}
		for range 30 {
			time.Sleep(time.Second)
			for _, h := range []*groupHost{first, second} {
				if got := h.problems(); !strings.Contains(got, `critical Name used twice: another host was in the group as "a" `) {
					t.Fatalf("problems:\n%s", got)
				}
				if h.Shared().State == "joined" {
					joined[h]++
				}
			}
		}
		if joined[first] == 0 || joined[second] == 0 {
			t.Errorf("they were not in turns in the group: %v", joined)
		}
	})
}

func TestShared_WithoutLedger(t *testing.T) {
	static := newServer(t, sharedLimits)
	s := static.state()
	if s.State != "static" || s.Hosts != 3 || len(s.Problems) != 0 || s.Ledger != nil || s.Alone != "" || len(s.Limits) != 2 || s.Limits[1].Buckets[0].Share != float64(shaper.Whole/3)/shaper.Whole {
		t.Errorf("%+v", s)
	}
	none := newServer(t, strings.NewReplacer("shared          = true\n", "", "[shared]\nhosts = 3\n", "").Replace(sharedLimits))
	if s := none.state(); s.State != "none" || len(s.Limits) != 0 {
		t.Errorf("%+v", s)
	}
	for _, h := range []*groupHost{static, none} {
		if err := h.ForgetHost(t.Context(), "b"); !errors.Is(err, control.ErrRefused) || !strings.Contains(err.Error(), "there is no ledger") {
			t.Errorf("forget: %v", err)
		}
		if _, err := json.Marshal(h.state()); err != nil {
			t.Error(err)
		}
	}
}
