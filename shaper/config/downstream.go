package config

import (
	"fmt"
	"strings"

	"shaperd.dev/shaperd/shaper"
)

// parseDownstreams parses the array under a key: strings, or tables with further keys.
func parseDownstreams(t table, key string) (any, []*node) {
	var list []item[shaper.Downstream]
	seen := map[string]bool{}
	for i, v := range t.elements(key) {
		if t.full() {
			break
		}
		at := t.at.child(key).elem(i)
		var d shaper.Downstream
		var err error
		switch v := v.(type) {
		case string:
			d, err = parseDownstream(v)
		case map[string]any:
			sub := table{t.report, key, t.keys.find(key).typ.elem.keys, v, at}
			sub.check()
			to, ok := sub.text("address")
			if !ok {
				continue
			}
			if d, err = parseDownstream(to); err == nil {
				sub.decode(&d)
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
		list = append(list, item[shaper.Downstream]{d, at})
	}
	return values(list), positions(list)
}

func showDownstreams(value any) any {
	all := []any{}
	for _, d := range value.([]shaper.Downstream) {
		all = append(all, downstreamKeys.canonical(nil, &d))
	}
	return all
}

// describeDownstreams returns the downstreams of l with their properties.
func describeDownstreams(l *shaper.Listener) string {
	var all []string
	for _, d := range l.Downstream {
		all = append(all, describeDownstream(d))
	}
	return strings.Join(all, ", ")
}

// describeDownstream returns the address of d with its other properties.
func describeDownstream(d shaper.Downstream) string {
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
