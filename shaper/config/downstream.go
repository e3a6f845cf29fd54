package config

import (
	"fmt"
	"strings"
	"time"
)

// downstreams reads the key "downstream" of a listener: strings, or tables with further
// keys.
func downstreams(t table) (list []item[Downstream]) {
	const key = "downstream"
	seen := map[string]bool{}
	for i, v := range t.elements(key) {
		if t.full() {
			break
		}
		at := t.at.child(key).elem(i)
		var d Downstream
		var err error
		switch v := v.(type) {
		case string:
			d, err = parseDownstream(v)
		case map[string]any:
			sub := table{t.report, key, t.keys.typeOf(key).elem.keys, v, at}
			sub.check()
			to, ok := sub.text("address")
			if !ok {
				continue
			}
			if d, err = parseDownstream(to); err == nil {
				sub.integer("weight", &d.Weight)
				connections := 100
				if sub.integer("max_connections", &connections); sub.has("max_connections") {
					d.MaxConnections = connections
				}
			}
		default:
			err = t.elementError(key, v)
		}
		if err == nil && seen[d.String()] {
			err = fmt.Errorf("duplicate entry %s", quote(d.String()))
		}
		if err != nil {
			t.add(at, fmt.Sprintf("%s: %v", key, err))
			continue
		}
		seen[d.String()] = true
		list = append(list, item[Downstream]{d, at})
	}
	return list
}

// decodeBalancing reads the keys for several downstreams, and health checks.
func decodeBalancing(t table, listen *Listen) {
	enumValue(t, "balance", &listen.Balance)
	t.duration("slow_start", &listen.SlowStart)
	if check, ok := t.table("check"); ok {
		listen.Check = Check{Interval: 2 * time.Second, Timeout: time.Second, Rise: 2, Fall: 3}
		check.duration("interval", &listen.Check.Interval)
		check.duration("timeout", &listen.Check.Timeout)
		check.integer("rise", &listen.Check.Rise)
		check.integer("fall", &listen.Check.Fall)
	}
	if eject, ok := t.table("eject"); ok {
		eject.integer("after", &listen.EjectAfter)
		eject.duration("for", &listen.EjectFor)
		eject.requireForEffect(listen.EjectAfter > 0, "after", "for")
	}
	if len(listen.Downstream) == 1 {
		t.requireForEffect(false, "a second downstream", "balance", "slow_start", "eject")
	}
}

// describe returns the address of d with its other properties.
func (d Downstream) describe() string {
	var more []string
	if d.Weight != 1 {
		more = append(more, fmt.Sprint("weight ", d.Weight))
	}
	if d.MaxConnections > 0 {
		more = append(more, fmt.Sprint("max_connections ", d.MaxConnections))
	}
	if len(more) == 0 {
		return d.String()
	}
	return d.String() + " (" + strings.Join(more, ", ") + ")"
}
