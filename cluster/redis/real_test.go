package redis

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/internal/testutil"
)

// caller makes calls of one host in real time.
type caller struct {
	t     testing.TB
	store *Store
	q     cluster.Request
}

func newCaller(t testing.TB, s *Store) *caller {
	return &caller{t, s, cluster.Request{Params: testParams, Host: "gw1", Start: 1, Over: true}}
}

func (c *caller) call() (*cluster.Reply, error) {
	c.t.Helper()
	c.q.N++
	start := time.Now()
	r, err := c.store.Call(within(c.t, soon), &c.q)
	if took := time.Since(start); took > 4*soon {
		c.t.Errorf("a call that may take %v took %v", soon, took)
	}
	if err == nil {
		c.q.Epoch = r.Epoch
	}
	return r, err
}

func (c *caller) mustCall() *cluster.Reply {
	c.t.Helper()
	r, err := c.call()
	if err != nil {
		c.t.Fatal(err)
	}
	return r
}

// answered calls until there is an answer.
func (c *caller) answered() (r *cluster.Reply) {
	c.t.Helper()
	var err error
	testutil.WaitFor(c.t, "an answer of the store", func() bool { r, err = c.call(); return err == nil })
	return r
}

func TestReal_StandsStill(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		sv := startServer(t, binary)
		c := newCaller(t, openStore(t, Options{URL: "redis://" + sv.address}))
		c.mustCall()
		sv.signal(unix.SIGSTOP)
		for _, what := range []string{"on a connection", "while it connects"} {
			if _, err := c.call(); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), sv.address) {
				t.Errorf("%s: %v", what, err)
			}
		}
		sv.signal(unix.SIGCONT)
		c.answered()
	})
}

func TestReal_DiesAndReturns(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		sv := startServer(t, binary)
		c := newCaller(t, openStore(t, Options{URL: "unix://" + sv.socket}))
		before := c.mustCall()
		sv.kill()
		for range 2 {
			if _, err := c.call(); err == nil || !strings.Contains(err.Error(), sv.socket) {
				t.Errorf("a dead server: %v", err)
			}
		}
		sv.start()
		if after := c.mustCall(); after.Epoch <= before.Epoch {
			t.Errorf("epoch %d after %d", after.Epoch, before.Epoch)
		}
	})
}

// TestReal_LosesThings takes from the server what it has, piece by piece.
func TestReal_LosesThings(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		sv := startServer(t, binary)
		admin := sv.admin(t)
		c := newCaller(t, openStore(t, Options{URL: "unix://" + sv.socket}))
		first := c.mustCall()
		admin("SCRIPT", "FLUSH")
		if r := c.mustCall(); r.Epoch != first.Epoch {
			t.Error("an epoch ended with the script")
		}
		admin("CLIENT", "KILL", "TYPE", "normal")
		if _, err := c.call(); err == nil {
			t.Error("a call on a connection that was closed")
		}
		if r := c.mustCall(); r.Epoch != first.Epoch {
			t.Error("an epoch ended with a connection")
		}
		admin("FLUSHALL")
		if r := c.mustCall(); r.Epoch <= first.Epoch {
			t.Errorf("epoch %d after %d", r.Epoch, first.Epoch)
		}
	})
}

// TestReal_Evicted removes each key of a ledger, and a part of each.
func TestReal_Evicted(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		sv := startServer(t, binary)
		admin := sv.admin(t)
		ctx := within(t, 20*time.Second)
		for i, remove := range [][]string{{"HDEL", "gw1"}, {"HDEL", "db"}, {"ZREM", "db"}, {"ZREM", "old"}, {"ZREMRANGEBYRANK", "0", "0"}} {
			for _, command := range [][]string{{"DEL"}, remove} {
				admin("FLUSHALL")
				g := newGroup(openStore(t, Options{URL: "unix://" + sv.socket}))
				if err := g.fillAll(ctx); err != nil {
					t.Fatal(err)
				}
				epoch, key := g.epoch, g.store.target.keys()[i]
				if n := admin(append([]string{command[0], key}, command[1:]...)...); n != int64(1) {
					t.Fatalf("%s: removed %v", key, n)
				}
				if err := g.round(ctx); err != nil || g.epoch <= epoch {
					t.Errorf("%s after %s: %v, epoch %d after %d", key, command[0], err, g.epoch, epoch)
				}
			}
		}
	})
}

// TestReal_Junk puts something else in the place of what a ledger has: it is lost.
func TestReal_Junk(t *testing.T) {
	const state = "local s = cmsgpack.unpack(redis.call('HGET', KEYS[1], '')) "
	onServers(t, func(t *testing.T, binary string) {
		sv := startServer(t, binary)
		admin := sv.admin(t)
		ctx := within(t, 60*time.Second)
		for _, put := range []string{
			"redis.call('HSET', KEYS[1], '', 'junk')",
			"redis.call('HSET', KEYS[1], '', '')",
			"redis.call('HSET', KEYS[1], '', '\xc1')",
			"redis.call('HSET', KEYS[1], '', cmsgpack.pack({1, 2}))",
			"redis.call('HSET', KEYS[1], '', cmsgpack.pack({'a', 'b'}))",
			state + "s[8] = 2^52 redis.call('HSET', KEYS[1], '', cmsgpack.pack(s))",
			state + "s[11] = 1/0 redis.call('HSET', KEYS[1], '', cmsgpack.pack(s))",
			state + "s[17] = {'gw1'} redis.call('HSET', KEYS[1], '', cmsgpack.pack(s))",
			"redis.call('HSET', KEYS[1], 'gw1', 'junk')",
			"redis.call('HSET', KEYS[1], 'gw1', cmsgpack.pack({1, 2}))",
			"redis.call('HSET', KEYS[2], 'db', 'junk')",
			"redis.call('HSET', KEYS[2], 'db', cmsgpack.pack({1, 2, 3, 4, 5, 6}))",
		} {
			admin("FLUSHALL")
			g := newGroup(openStore(t, Options{URL: "unix://" + sv.socket}))
			if err := g.fillAll(ctx); err != nil {
				t.Fatal(err)
			}
			epoch, keys := g.epoch, g.store.target.keys()
			admin("EVAL", put, "2", keys[0], keys[1])
			err := g.rounds(ctx, 6)
			first, second := g.hosts[0].Use("db", g.now), g.hosts[1].Use("db", g.now)
			if sum := first + second; err != nil || g.epoch <= epoch || sum < cluster.Whole/2 || sum > cluster.Whole {
				t.Errorf("%s: %v, epoch %d after %d, hosts use %d and %d parts", put, err, g.epoch, epoch, first, second)
			}
		}
	})
}

// TestReal_DistantClock has a server whose clock is in another century for a while.
func TestReal_DistantClock(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		s := openStore(t, Options{URL: "unix://" + startServer(t, binary).socket})
		g := newGroup(s)
		ctx := within(t, 20*time.Second)
		if err := g.rounds(ctx, 3); err != nil {
			t.Fatal(err)
		}
		epoch := g.epoch
		for _, at := range []cluster.Time{1<<52 - 1<<48, 1<<52 + 1, 1 << 60} {
			if _, err := s.callAt(ctx, timeText(at), g.hosts[0].Request(g.now, nil)); err == nil || !strings.Contains(err.Error(), "SHAPERD the clock of the server is set beyond") {
				t.Errorf("at %d: %v", at, err)
			}
		}
		if err := g.rounds(ctx, 3); err != nil || g.epoch != epoch {
			t.Errorf("when the clock is right again: %v, epoch %d after %d", err, g.epoch, epoch)
		}
	})
}

// TestReal_OutOfMemory has a server that takes no writes for some time.
func TestReal_OutOfMemory(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		sv := startServer(t, binary)
		admin := sv.admin(t)
		s := openStore(t, Options{URL: "unix://" + sv.socket})
		g := newGroup(s)
		ctx := within(t, 20*time.Second)
		if err := g.rounds(ctx, 5); err != nil {
			t.Fatal(err)
		}
		epoch := g.epoch
		admin("CONFIG", "SET", "maxmemory", "1")
		if err := g.round(ctx); err == nil || !strings.Contains(err.Error(), "OOM") {
			t.Errorf("without memory: %v", err)
		}
		admin("CONFIG", "SET", "maxmemory", "0")
		g.now -= 400 * cluster.Millisecond
		if err := g.round(ctx); err != nil || g.epoch != epoch {
			t.Errorf("with memory again: %v, epoch %d after %d", err, g.epoch, epoch)
		}
	})
}

// TestReal_Replica has a server that is a replica, and one that is but takes writes.
func TestReal_Replica(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		sv := startServer(t, binary)
		admin := sv.admin(t)
		c := newCaller(t, openStore(t, Options{URL: "unix://" + sv.socket}))
		c.mustCall()
		admin("REPLICAOF", "127.0.0.1", "1")
		if _, err := c.call(); err == nil || !strings.Contains(err.Error(), "READONLY") {
			t.Errorf("a master that became a replica: %v", err)
		}
		admin("CONFIG", "SET", "replica-read-only", "no")
		if _, err := c.call(); !errors.Is(err, errNotMaster) {
			t.Errorf("a replica that takes writes: %v", err)
		}
		admin("REPLICAOF", "NO", "ONE")
		c.mustCall()
	})
}

// TestReal_ReplicaInBetween has a master be a replica between two calls: it may have lost what was written last.
func TestReal_ReplicaInBetween(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		sv := startServer(t, binary)
		admin := sv.admin(t)
		s := openStore(t, Options{URL: "unix://" + sv.socket})
		c := newCaller(t, s)
		before := c.mustCall()
		run := s.conn.run
		admin("REPLICAOF", "127.0.0.1", "1")
		admin("REPLICAOF", "NO", "ONE")
		if after := c.mustCall(); after.Epoch <= before.Epoch || s.conn.run != run {
			t.Errorf("epoch %d after %d, of processes %q and %q", after.Epoch, before.Epoch, s.conn.run, run)
		}
		again := c.mustCall()
		admin("CONFIG", "SET", "replica-read-only", "no")
		admin("REPLICAOF", "127.0.0.1", "1")
		if _, err := c.call(); err == nil || !strings.Contains(err.Error(), "READONLY") {
			t.Errorf("a replica that takes writes: %v, epoch %d", err, again.Epoch)
		}
	})
}

// TestReal_AnotherVersion has a ledger that was left by another version of shaperd.
func TestReal_AnotherVersion(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		sv := startServer(t, binary)
		admin := sv.admin(t)
		s := openStore(t, Options{URL: "unix://" + sv.socket})
		const put = "redis.call('HSET', KEYS[1], '', cmsgpack.pack({2, tonumber(ARGV[1])}))"
		q := cluster.Request{Params: testParams, Host: "gw1", Start: 1, N: 1}
		for last, ok := range map[cluster.Time]bool{10 * cluster.Second: false, 7 * cluster.Second: true} {
			admin("EVAL", put, "1", s.target.keys()[0], timeText(last))
			_, err := s.callAt(within(t, 20*time.Second), timeText(10*cluster.Second), &q)
			if (err == nil) != ok || err != nil && !strings.Contains(err.Error(), "another version") {
				t.Errorf("used %v ago: %v", (10*cluster.Second - last).Duration(), err)
			}
		}
	})
}

// TestReal_Forget has an operator remove a host that is away.
func TestReal_Forget(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		s := openStore(t, Options{URL: "unix://" + startServer(t, binary).socket})
		if err := useEverything(t, s); err != nil {
			t.Fatal(err)
		}
		shot, err := s.Snapshot(within(t, soon))
		if err != nil || len(shot.Gone) != 2 || len(shot.Hosts) != 1 || shot.Params != testParams {
			t.Errorf("%+v, %v", shot, err)
		}
		if shot, err := openStore(t, s.target.Options).Snapshot(within(t, soon), "db"); err != nil || len(shot.Buckets) != 1 {
			t.Errorf("%+v, %v", shot, err)
		}
		if ok, err := s.Forget(within(t, soon), ""); ok || err != nil {
			t.Errorf("no name: %v, %v", ok, err)
		}
	})
}
