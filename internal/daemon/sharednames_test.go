package daemon

import (
	"slices"
	"testing"

	"shaperd.dev/shaperd/internal/sharing"
	"shaperd.dev/shaperd/shaper"
)

// New connections pass by tickets if the part of a host is less than one in the time of a lease, here a second.
func TestSharedNames_Tickets(t *testing.T) {
	const text = `
[[listen]]
name = "db"
address = ["tcp://127.0.0.1:5432"]
downstream = ["127.0.0.1:5433"]
[shared]
hosts = 3
store = "redis://127.0.0.1:6379"
[[limit]]
name = "l"
shared = true
new_connections = `
	for _, test := range []struct{ limit, want string }{
		{`"5/min"`, "@l/new"},
		{`"2/s"`, "@l/new"},
		{`"4/s"`, "l/new"},
		{"\"5/min\"\nqueue_timeout = \"0s\"", "l/new"},
		{"\"5/min\"\nobserve = true", "l/new"},
	} {
		h := newServer(t, text+test.limit+"\n")
		l, _ := h.current()
		names := sharedNames{h.shaper, sharing.Params(&l.Config.Shared)}
		key := shaper.Key{Limit: h.shaper.Policy().State(0).ID + 1}
		if name := names.Name(key, false); name != test.want {
			t.Errorf("%s: the name is %q, want %q", test.limit, name, test.want)
		}
		if got, _, ok := names.Key(test.want); !ok || got != key {
			t.Errorf("%s: %q is key %v, %v", test.limit, test.want, got, ok)
		}
		other := map[bool]string{true: "l/new", false: "@l/new"}[test.want[0] == '@']
		if _, _, ok := names.Key(other); ok {
			t.Errorf("%s: %q is the name of a bucket", test.limit, other)
		}
		if all := unkeyedShares(names, h.shaper.Policy()); !slices.Contains(all, test.want) {
			t.Errorf("%s: buckets are %q", test.limit, all)
		}
	}
}
