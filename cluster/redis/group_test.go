package redis

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"shaperd.dev/shaperd/cluster"
)

var testParams = cluster.Params{Hosts: 3, Lease: cluster.Second, Step: cluster.Second / 2}

// group is hosts that call a store, at times of the test's choice.
type group struct {
	store *Store
	now   cluster.Time
	hosts []*cluster.Host
	epoch int64
}

func newGroup(s *Store) *group {
	g := &group{store: s, now: cluster.FromDuration(time.Duration(time.Now().UnixNano()))}
	for i := range testParams.Hosts {
		g.hosts = append(g.hosts, cluster.NewHost(cluster.HostOptions{Params: testParams, Name: fmt.Sprint("gw", i), Start: 1}, g.now))
	}
	return g
}

// round has all hosts call, until none wants to call again.
func (g *group) round(ctx context.Context) error {
	g.now += 400 * cluster.Millisecond
	for _, h := range g.hosts {
		for again := true; again; {
			r, err := g.store.callAt(ctx, timeText(g.now), h.Request(g.now, nil))
			if err != nil {
				return err
			}
			g.epoch = r.Epoch
			again = h.Reply(g.now, r)
		}
	}
	return nil
}

func (g *group) rounds(ctx context.Context, n int) error {
	for range n {
		if err := g.round(ctx); err != nil {
			return err
		}
	}
	return nil
}

// fillAll makes hosts join, share a bucket of which one is to give something back, and another one that is cold again.
func (g *group) fillAll(ctx context.Context) error {
	if err := g.rounds(ctx, 5); err != nil {
		return err
	}
	g.hosts[0].Want("old", 1, 1)
	if err := g.rounds(ctx, 3); err != nil {
		return err
	}
	if err := g.waitCold(ctx, "old"); err != nil {
		return err
	}
	g.hosts[0].Want("db", cluster.Whole, 1)
	if err := g.rounds(ctx, 3); err != nil {
		return err
	}
	g.hosts[1].Want("db", cluster.Whole, 1)
	g.now += 10 * cluster.Millisecond
	_, err := g.store.callAt(ctx, timeText(g.now), g.hosts[1].Request(g.now, nil))
	return err
}

// waitCold has all hosts want nothing of the bucket until it is cold.
func (g *group) waitCold(ctx context.Context, key string) error {
	for range 100 {
		for _, h := range g.hosts {
			h.Want(key, 0, 1)
		}
		if err := g.round(ctx); err != nil {
			return err
		}
		if _, hot := g.hosts[0].Parts(key); !hot {
			return nil
		}
	}
	return errors.New("the bucket stays hot")
}

// useEverything makes the script use every command that it has: hosts join, share a bucket and let it become cold,
// leave and are forgotten.
func useEverything(t *testing.T, s *Store) error {
	ctx := within(t, 20*time.Second)
	if _, err := s.Call(ctx, &cluster.Request{Params: testParams, Host: "gw0", Start: 1, N: 1}); err != nil {
		return err
	}
	g := newGroup(s)
	if err := g.rounds(ctx, 5); err != nil {
		return err
	}
	for _, want := range []int64{cluster.Whole, cluster.Whole, 0, cluster.Whole} {
		for _, h := range g.hosts {
			h.Want("db", want, 1)
			if err := g.rounds(ctx, 2); err != nil {
				return err
			}
		}
		if want > 0 && g.hosts[0].Use("db", g.now)+g.hosts[1].Use("db", g.now) == 0 {
			t.Error("nobody was given anything")
		}
		if want > 0 {
			continue
		}
		if err := g.waitCold(ctx, "db"); err != nil {
			return err
		}
	}
	if _, err := s.callAt(ctx, timeText(g.now), g.hosts[0].Leave(g.now)); err != nil {
		return err
	}
	g.hosts = g.hosts[2:]
	if err := g.rounds(ctx, 10); err != nil {
		return err
	}
	if ok, err := s.forgetAt(ctx, timeText(g.now), "gw1"); err != nil || !ok {
		return fmt.Errorf("forget: %v, %w", ok, err)
	}
	_, err := s.Snapshot(ctx)
	return err
}
