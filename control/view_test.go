package control

import (
	"testing"

	"shaperd.dev/shaperd/api"
)

// sharedDaemon is a daemon with limits that hosts share.
type sharedDaemon struct {
	*fakeDaemon
	limits []api.SharedLimit
}

func (d sharedDaemon) Shared() api.Shared { return api.Shared{Limits: d.limits} }

// An explanation has the share of the bucket: of a hot one that of its own, and none if that is not known.
func TestAddShares(t *testing.T) {
	hot := []api.SharedBucket{{Key: "source 192.0.2.7/32", Share: 0.75}, {Key: "source 192.0.2.7/32", Slots: true, Share: 0.5}}
	daemon := sharedDaemon{limits: []api.SharedLimit{
		{Limit: "per-source", Key: "source", ColdShare: 0.25, MaxConnections: 20, HostConnections: 5, HotBuckets: 2, Buckets: hot},
		{Limit: "many", Key: "source", ColdShare: 0.25, HotBuckets: 12, Buckets: hot},
		{Limit: "total", Key: "all", ColdShare: 0.25, HotBuckets: 1, Buckets: []api.SharedBucket{{Key: "all", Share: 0.4}}},
	}}
	for _, test := range []struct {
		limit, key string
		want       *api.LimitShare
	}{
		{"per-source", "source 192.0.2.7/32", &api.LimitShare{Share: 0.75, Connections: 10}},
		{"per-source", "source 192.0.2.8/32", &api.LimitShare{Share: 0.25, Connections: 5}},
		{"many", "source 192.0.2.8/32", nil},
		{"total", "all", &api.LimitShare{Share: 0.4}},
		{"own", "all", nil},
	} {
		x := api.Explanation{Limits: []api.LimitBucket{{Limit: test.limit, Key: test.key}}}
		(&view{Options: &Options{Daemon: daemon}}).addShares(&x)
		if got := x.Limits[0].Shared; (got == nil) != (test.want == nil) || got != nil && *got != *test.want {
			t.Errorf("%s, %s: %+v, want %+v", test.limit, test.key, got, test.want)
		}
	}
}
