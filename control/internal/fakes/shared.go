package fakes

import (
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control/metrics"
)

// Shared is the state of a host that shares limits "aa" and "ab" with another one.
func Shared() api.Shared {
	return api.Shared{
		State: "joined", For: 3600, Group: "default", Name: "gw1", Hosts: 2, Alone: "share", Counted: true, Live: 2, Differing: 1,
		LeaseAge: 0.1, LeaseLeft: 0.88, Epoch: 7, Stores: []string{"redis://10.0.0.9:6379"}, Problems: []api.Problem{}, Differences: []api.SharedDifference{},
		HotBuckets: 3,
		Limits: []api.SharedLimit{
			{Limit: "aa", Key: "all", Rate: 1e6, MaxConnections: 50, HostConnections: 25, ColdShare: 0.5, HotBuckets: 1, Buckets: []api.SharedBucket{
				{Name: "aa", Key: "all", Hot: true, Share: 0.31, Want: 0.4, Short: true, Holders: []api.SharedHolder{{Host: "gw1", Share: 0.31, Want: 0.4, Weight: 3}}},
				{Name: "#aa", Key: "all", Slots: true, Hot: true, Share: 0.6, Want: 0.6, Holders: []api.SharedHolder{{Host: "gw1", Share: 0.6, Want: 0.6, Weight: 1}}},
			}},
			{Limit: "ab", Key: "source", Rate: 1e6, ColdShare: 0.5, HotBuckets: 2, Buckets: []api.SharedBucket{
				{Name: "ab|source=192.0.2.0/24", Key: "source 192.0.2.0/24", Hot: true, Share: 0.9, Want: 1, Holders: []api.SharedHolder{}},
			}},
		},
	}
}

// SharedMetrics is Shared with its counters.
func SharedMetrics() metrics.Shared {
	return metrics.Shared{
		Shared: Shared(), Calls: map[string]uint64{"answered": 9, "refused": 1, "failed": 2, "timed-out": 3}, Epochs: 4, Alone: 1500 * time.Millisecond,
		TookBounds: []time.Duration{time.Millisecond, time.Second}, Took: []uint64{8, 1, 0}, TookSum: 12 * time.Millisecond,
	}
}
