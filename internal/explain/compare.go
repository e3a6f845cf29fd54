package explain

import (
	"fmt"
	"slices"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// Side is one of two configurations, and what it was compiled to.
type Side struct {
	Config *config.Config
	Policy *shaper.Policy
}

// Compare returns in words what is different for q, which names a listener, after a reload: a line for each limit, and none when all is
// the same. A listener that has another name is found by its port.
func (q *Question) Compare(was, is Side) (lines []string) {
	before, err := q.Answer(was.Config, was.Policy)
	if err != nil {
		return nil // the connection is of an earlier configuration
	}
	renamed := *q
	if !slices.ContainsFunc(is.Config.Listen, func(l shaper.Listener) bool { return l.Name == q.Listener }) {
		renamed.Listener = ""
	}
	after, err := renamed.Answer(is.Config, is.Policy)
	if err != nil {
		return []string{fmt.Sprintf("listener %q is gone, or no longer accepts these: open connections continue until they end", q.Listener)}
	}
	find := func(all []api.LimitBucket, name string) *api.LimitBucket {
		if i := slices.IndexFunc(all, func(l api.LimitBucket) bool { return l.Limit == name }); i >= 0 {
			return &all[i]
		}
		return nil
	}
	for i := range after.Limits {
		now := &after.Limits[i]
		old := find(before.Limits, now.Limit)
		if old == nil {
			lines = append(lines, fmt.Sprintf("%s  applies: %s", now.Limit, describe(now)))
			continue
		}
		change := ""
		if was, is := describe(old), describe(now); was != is {
			change = was + "  ->  " + is
		}
		if old.Key != now.Key {
			if change != "" {
				change += "; "
			}
			change += "its bucket is another, and begins empty"
		}
		if change != "" {
			lines = append(lines, now.Limit+"  "+change)
		}
	}
	for i := range before.Limits {
		if old := &before.Limits[i]; find(after.Limits, old.Limit) == nil {
			lines = append(lines, fmt.Sprintf("%s  no longer applies: %s", old.Limit, describe(old)))
		}
	}
	return lines
}

func describe(l *api.LimitBucket) string {
	if l.Mode == shaper.Observe.String() {
		return l.Summary + " (observes)"
	}
	return l.Summary
}
