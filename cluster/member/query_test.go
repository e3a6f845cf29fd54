package member

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/shaper"
)

func TestMember_AsksTheStoreForOperators(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		store, planes, members := startSome(ctx, 3, 4)
		planes[1].setBusy(true)
		time.Sleep(5 * time.Second)
		shot, err := members[0].Snapshot(ctx, "db")
		if err != nil || len(shot.Hosts) != 3 || len(shot.Buckets) != 1 || shot.Buckets[0].Holders[1].Parts < cluster.Whole*9/10 {
			t.Errorf("snapshot: %+v, %v", shot, err)
		}
		shares, ok := members[1].Shares(ctx, "db", "other")
		if want := (cluster.ShareStatus{Key: "other", Parts: shaper.Whole / 4}); !ok || len(shares) != 2 || !shares[0].Hot || shares[1] != want {
			t.Errorf("shares: %+v, %t", shares, ok)
		}
		if ok, err := members[0].Forget(ctx, "b"); ok || err != nil {
			t.Errorf("a host that calls is forgotten: %t, %v", ok, err)
		}
		if ok, err := members[0].Forget(ctx, "d"); !ok || err != nil {
			t.Errorf("a host that does not exist is not forgotten: %t, %v", ok, err)
		}
		if ok, err := members[0].Forget(ctx, "e"); ok || err != nil {
			t.Errorf("one host too many is forgotten: %t, %v", ok, err)
		}
		if shot, _ := members[2].Snapshot(ctx); !cmp.Equal(shot.Gone, []cluster.Gone{{Host: "d"}}) {
			t.Errorf("gone: %v", shot.Gone)
		}

		store.setAway(true)
		begin := time.Now()
		_, err = members[0].Snapshot(ctx)
		if took := time.Since(begin); !errors.Is(err, context.DeadlineExceeded) || took > 500*time.Millisecond {
			t.Errorf("a snapshot without a store: %v after %v", err, took)
		}
		short, stop := context.WithTimeout(ctx, time.Millisecond)
		defer stop()
		if _, err := members[0].Snapshot(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a snapshot that is given up: %v", err)
		}
		store.setAway(false)
		cancel()
		for _, m := range members {
			m.Wait()
		}
		if _, err := members[0].Snapshot(t.Context()); !errors.Is(err, errEnded) {
			t.Errorf("a snapshot of a member that has ended: %v", err)
		}
		if _, ok := members[0].Shares(t.Context(), "db"); ok {
			t.Error("a member that has ended has shares")
		}
	})
}

// Operators ask all the time, and the store takes calls but answers no query: the lease goes on.
func TestMember_QueriesDoNotCostTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		store, planes, members := startMembers(ctx, 3)
		time.Sleep(3 * time.Second)
		store.mu.Lock()
		store.hangs = true
		store.mu.Unlock()
		planes[1].setBusy(true)
		gaveUp := make(chan int)
		for range 10 {
			go func() {
				n := 0
				for ctx.Err() == nil {
					if _, err := members[1].Snapshot(ctx); errors.Is(err, context.DeadlineExceeded) {
						n++
					}
				}
				gaveUp <- n
			}()
		}
		time.Sleep(2 * time.Second)
		for range 100 {
			time.Sleep(100 * time.Millisecond)
			if s, _ := members[1].Status(ctx); !s.Joined || s.Left == 0 || s.For < cluster.Second {
				t.Fatalf("not joined: %+v", s)
			}
			if use := planes[1].use(); use < shaper.Whole*9/10 {
				t.Fatalf("the only member with traffic uses %d of %d parts", use, shaper.Whole)
			}
		}
		cancel()
		for _, m := range members {
			m.Wait()
		}
		n := 0
		for range 10 {
			n += <-gaveUp
		}
		if n < 10 {
			t.Errorf("only %d queries hung", n)
		}
	})
}

func TestMember_CountsTheTimeAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		store, _, members := startMembers(ctx, 2)
		time.Sleep(3 * time.Second)
		joined, _ := members[0].Status(ctx)
		if joined.Counters.Alone > 2*time.Second || joined.For < cluster.Second || joined.Cold != cluster.Whole/2 {
			t.Errorf("3 s after the start: %+v", joined)
		}
		store.setAway(true)
		time.Sleep(10 * time.Second)
		alone, _ := members[0].Status(ctx)
		// The lease of a second has 980 ms left at most, and 250 ms less if a reply was lost.
		if d := (alone.Counters.Alone - joined.Counters.Alone); d < 9*time.Second || d > 9500*time.Millisecond {
			t.Errorf("alone for %v of 10 s without a store", d)
		}
		if alone.Left != 0 || alone.For < 9*cluster.Second || alone.For > 9500*cluster.Millisecond {
			t.Errorf("10 s without a store: %+v", alone)
		}
		store.setAway(false)
		time.Sleep(3 * time.Second)
		if s, _ := members[0].Status(ctx); !s.Joined || s.For > 3*cluster.Second {
			t.Errorf("3 s after the store is back: %+v", s)
		}
		cancel()
		for _, m := range members {
			m.Wait()
		}
	})
}
