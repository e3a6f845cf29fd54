package control

import (
	"cmp"
	"slices"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/shaper"
)

// quotas returns up to n quotas of which the largest parts are used: those of a limit, or of all if it is "".
func (v *view) quotas(limit string, n int) api.Quotas {
	out := api.Quotas{Quotas: []api.Quota{}}
	if err := v.Proxy.QuotaError(); err != nil {
		out.Error = err.Error()
	}
	type name struct{ limit, key string }
	all := map[name]*api.Quota{} // some come twice
	v.Proxy.Quotas(func(st *shaper.QuotaStatus) {
		if limit == "" || st.Limit == limit {
			all[name{st.Limit, st.Key}] = newQuota(st)
		}
	})
	for _, q := range all {
		out.Total++
		if q.Used >= q.Amount {
			out.UsedUp++
		}
		out.Quotas = append(out.Quotas, *q)
	}
	part := func(q *api.Quota) float64 { return float64(q.Used) / float64(q.Amount) }
	slices.SortFunc(out.Quotas, func(a, b api.Quota) int {
		return cmp.Or(cmp.Compare(part(&b), part(&a)), cmp.Compare(a.Limit, b.Limit), cmp.Compare(a.Key, b.Key))
	})
	out.Quotas = slices.Clip(out.Quotas[:min(n, len(out.Quotas))])
	return out
}

// newQuota converts st to its form in the API; nil stays nil.
func newQuota(st *shaper.QuotaStatus) *api.Quota {
	if st == nil {
		return nil
	}
	return &api.Quota{
		Limit: st.Limit, Key: st.Key, Unit: st.Quota.Unit.String(), Period: st.Quota.Period.String(), Amount: st.Quota.Amount, Used: st.Used,
		Ends: st.Ends.Seconds(), Slow: float64(st.Slow) / 8, Waits: st.Waiting,
	}
}
