package redis

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"

	"shaperd.dev/shaperd/cluster"
)

// Forget makes a host one that is gone. It returns false if the host has called recently.
func (s *Store) Forget(ctx context.Context, host string) (bool, error) {
	return s.forgetAt(ctx, "", host)
}

func (s *Store) forgetAt(ctx context.Context, now, host string) (bool, error) {
	if host == "" || len(host) > cluster.MaxName {
		return false, nil
	}
	v, err := s.run(ctx, s.target.keys(), []string{"forget", now, host})
	return v == int64(1), err
}

// Snapshot returns what the ledger knows. Only buckets with one of these keys are in it, or if there are
// none all, but at most cluster.MaxSnapshot: those that have been hot for the longest time.
func (s *Store) Snapshot(ctx context.Context, keys ...string) (cluster.Snapshot, error) {
	return s.snapshotAt(ctx, "", keys)
}

func (s *Store) snapshotAt(ctx context.Context, now string, keys []string) (cluster.Snapshot, error) {
	keys = keys[:min(len(keys), cluster.MaxSnapshot)]
	args := append([]string{"snapshot", now, strconv.Itoa(len(keys))}, keys...)
	reply, err := s.run(ctx, s.target.keys(), args)
	if err != nil {
		return cluster.Snapshot{}, err
	}
	return parseSnapshot(reply)
}

// parseSnapshot returns a snapshot from the script's reply, which is empty if the server has no ledger.
func parseSnapshot(reply any) (cluster.Snapshot, error) {
	all, ok := reply.([]any)
	v := values{left: all, failed: !ok}
	if ok && len(all) == 0 {
		return cluster.Snapshot{}, nil
	}
	shot := cluster.Snapshot{Params: v.params(), Epoch: v.number(maxNumber), Age: v.span(), Settled: v.flag(), Hot: int(v.number(maxNumber))}
	v.lists(func(h *values) {
		host := cluster.HostStatus{Name: h.text(), Age: h.span(), Counted: h.flag(), Lease: h.span(), Digest: h.digest(), Info: h.text()}
		shot.Hosts = append(shot.Hosts, host)
	})
	shot.Gone = slices.DeleteFunc(v.gone(), cluster.Gone.Replaced)
	v.lists(func(b *values) {
		bucket := cluster.BucketStatus{Key: b.text()}
		b.lists(func(h *values) {
			bucket.Holders = append(bucket.Holders, cluster.HolderStatus{
				Host: h.text(), Parts: h.number(cluster.Whole), Want: h.number(cluster.Whole), Weight: h.number(cluster.MaxWeight),
			})
		})
		slices.SortFunc(bucket.Holders, func(a, b cluster.HolderStatus) int { return cmp.Compare(a.Host, b.Host) })
		shot.Buckets = append(shot.Buckets, bucket)
	})
	if !v.done() {
		return cluster.Snapshot{}, fmt.Errorf("ask the store: %w: not a snapshot", errProtocol)
	}
	slices.SortFunc(shot.Hosts, func(a, b cluster.HostStatus) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(shot.Buckets, func(a, b cluster.BucketStatus) int { return cmp.Compare(a.Key, b.Key) })
	return shot, nil
}
