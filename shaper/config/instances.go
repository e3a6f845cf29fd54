package config

import (
	"slices"

	"shaperd.dev/shaperd/shaper"
)

// checkInstances reports limits that each of several instances of a listener would allow: which instance has a source changes
// with the instances, and differs by address, so even the bucket of one source may be at several of them.
func (l *loader) checkInstances() {
	shared := &l.c.Shared
	for _, listen := range l.c.Listen {
		if listen.Instances <= 1 {
			continue
		}
		for i := range l.c.Limits {
			limit, t := &l.c.Limits[i], l.limits[i]
			applies := len(limit.Match.Listen) == 0 || slices.Contains(limit.Match.Listen, listen.Name)
			switch {
			case limit.InPacketPlane() || !applies || limit.Block || limit.Shed.Any() || limit.Observe || l.c.Daemon.Observe:
			case limit.Key&shaper.KeyConnection != 0: // a connection is at one instance
			case limit.Quota.Amount > 0:
				t.errorf(t.overriddenKey("quota"), "unsupported at listener %q: each of its %d instances would allow all of it", listen.Name, listen.Instances)
			case !limit.Shared:
				t.errorf("shared", "true is required at listener %q: each of its %d instances would allow all of the limit", listen.Name, listen.Instances)
			case len(shared.Store) > 0 && shared.Name == "":
				t.errorf("shared", "missing name in [shared]: each of the %d instances of listener %q must have its own", listen.Instances, listen.Name)
			case shared.Hosts > 0 && shared.Hosts < listen.Instances:
				t.errorf("shared", "[shared] has hosts = %d, which must be at least the %d instances of listener %q", shared.Hosts, listen.Instances, listen.Name)
			}
		}
	}
}
