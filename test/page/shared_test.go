package page

import (
	"time"

	"shaperd.dev/shaperd/api"
)

// shared returns the state of the first of four hosts that share limits, at time t.
func (f *fake) shared(t time.Time) *api.Shared {
	share := 0.4 + 0.2*wave(t, 12)
	s := &api.Shared{
		State: "joined", For: t.Sub(f.started).Seconds(), Group: "mainframe", Name: "gw1", Hosts: 4, Alone: "share", Counted: true, Failover: "fast", Live: 3, Gone: 1,
		LeaseAge: 0.04, LeaseLeft: 0.94, Epoch: 1764, Stores: []string{"rediss://10.0.9.1:6379"}, HotBuckets: 5,
		Problems: []api.Problem{{Severity: "warning", Title: "Host away", Text: `gw3 has not called for 5m, and 1/4 of each shared limit is kept for it. If it is gone for good: "shaperd shared forget gw3"`}},
		Limits: []api.SharedLimit{
			{Limit: "database", Key: "all", Rate: 10e6, MaxConnections: 100, HostConnections: 25, ColdShare: 0.25, HotBuckets: 1, Buckets: []api.SharedBucket{{
				Name: "database", Key: "all", Hot: true, Share: share, Want: 0.9, Short: share < 0.4, Tight: true,
				Holders: []api.SharedHolder{{Host: "gw1", Share: share, Want: 0.9, Weight: 30}, {Host: "gw2", Share: 0.2}, {Host: "gw4", Share: 0.95 - share - 0.2}},
			}, {
				Name: "#database", Key: "all", Slots: true, Hot: true, Share: 0.37, Want: 0.4, Holders: []api.SharedHolder{{Host: "gw1", Share: 0.37, Want: 0.4, Weight: 1}, {Host: "gw2", Share: 0.2}},
			}}},
			{Limit: "logins", Key: "source,port", NewConnections: 5, ColdShare: 0.25, Buckets: []api.SharedBucket{}},
			{Limit: "per-source", Key: "source", Rate: 1.25e6, ColdShare: 0.25, HotBuckets: 4, Buckets: []api.SharedBucket{
				{Name: "a", Key: "source 198.51.100.7/32", Hot: true, Share: 0.75, Want: 1, Tight: true, Holders: []api.SharedHolder{{Host: "gw2", Share: 0.2}}},
				{Name: "b", Key: "source 198.51.100.20/32", Hot: true, Share: 0.5, Want: 0.5, Holders: []api.SharedHolder{}},
			}},
		},
		Ledger: &api.Ledger{Epoch: 1764, Age: 86400, Settled: true, Hosts: []api.SharedHost{
			{Name: "gw1", State: "counted", Age: 0.04, LeaseLeft: 0.91, Version: "0.1.0"},
			{Name: "gw2", State: "counted", Age: 0.07, LeaseLeft: 0.83, Version: "0.1.0"},
			{Name: "gw3", State: "absent", Age: 312, Version: "0.1.0"},
			{Name: "gw4", State: "gone"},
		}},
	}
	if f.scenario == "alone" {
		s.State, s.For, s.Alone, s.Withdrawn, s.LeaseAge, s.LeaseLeft, s.HotBuckets, s.Ledger = "alone", 73, "open", true, 74, 0, 0, nil
		s.StoreError, s.LedgerError = "connection refused "+nasty, "connection refused "+nasty
		s.Problems = []api.Problem{
			{Severity: "critical", Title: "Not limited together", Text: "no ledger answers: " + s.StoreError +
				`. This host has been alone for 1m13s, and with alone = "open" lets the whole of each shared limit pass: all hosts together may exceed it.`},
			{Severity: "critical", Title: "Hosts disagree", Text: "about limit " + nasty},
		}
		for i := range s.Limits {
			s.Limits[i].ColdShare, s.Limits[i].HotBuckets, s.Limits[i].Buckets = 1, 0, []api.SharedBucket{}
		}
		s.Limits[0].Buckets = []api.SharedBucket{{Name: "database", Key: "all", Share: 1, Holders: []api.SharedHolder{}}}
	}
	return s
}
