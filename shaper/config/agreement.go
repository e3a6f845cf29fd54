package config

import (
	"cmp"
	"hash/fnv"
	"maps"
	"slices"
	"strings"
)

// SharedLimits describes in a line each what all hosts of the group must agree on: by name each
// shared limit, as it is with overrides, which apply on one host, and while the daemon observes; and
// under "[shared]" the group. The lines do not depend on the order of anything in files, nor on keys
// that may differ: what a host does with units that wait or are refused, and how it reaches the
// ledger. The data of ASN files is not compared. Without shared limits it is empty.
func (c *Config) SharedLimits() map[string]string {
	all := map[string]string{}
	for _, l := range c.Limits { // a copy
		if l.Shared {
			l.Shared, l.Observe = false, l.Observe || c.Daemon.Observe
			all[l.Name] = strings.Join(limitKeys.agreed(c, &l, ""), "; ")
		}
	}
	if len(all) > 0 {
		all["[shared]"] = strings.Join(sharedKeys.agreed(c, c, ""), "; ")
	}
	return all
}

// SharedDigest returns a hash of [Config.SharedLimits].
func (c *Config) SharedDigest() uint64 {
	all, h := c.SharedLimits(), fnv.New64a()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		h.Write([]byte(name + "\n" + all[name] + "\n"))
	}
	return h.Sum64()
}

// agreed returns the keys of a table of c that became record, and their values, that are the same
// on all hosts.
func (k keys) agreed(c *Config, record any, prefix string) (all []string) {
	for i := range k {
		key := &k[i]
		switch {
		case key.perHost || !k.isShown(key, c, record):
		case key.typ.kind == kindTable && key.text == nil:
			all = append(all, key.typ.keys.agreed(c, record, key.name+" ")...)
		default:
			text := key.textOf(record)
			if key.typ.kind == kindArray && key.text == nil {
				elems := strings.Split(text, ", ")
				slices.Sort(elems)
				text = strings.Join(elems, ", ")
			}
			if text != "" {
				all = append(all, prefix+cmp.Or(key.label, key.name)+" "+text)
			}
		}
	}
	return all
}
