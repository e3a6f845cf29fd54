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
// the same. A listener that has another name is found by its address. The error is that was does not accept q: it is of an earlier
// configuration.
func (q *Question) Compare(was, is Side) (lines []string, err error) {
	before, err := q.Answer(was.Config, was.Policy)
	if err != nil {
		return nil, err
	}
	renamed := *q
	renamed.Listener = q.nameIn(was.Config, is.Config)
	var after *Explanation
	if renamed.Listener != "" {
		after, err = renamed.Answer(is.Config, is.Policy)
	}
	if after == nil || err != nil {
		return []string{fmt.Sprintf("listener %q is removed, or no longer accepts this traffic: open connections continue until they end", q.Listener)}, nil
	}
	if was, is := classText(before.Class), classText(after.Class); was != is {
		lines = append(lines, "class  "+was+"  ->  "+is)
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
			change += "gets another bucket, which begins empty"
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
	return lines, nil
}

// nameIn returns the name in is of q's listener in was, or "" if it is gone.
func (q *Question) nameIn(was, is *config.Config) string {
	named := func(l shaper.Listener) bool { return l.Name == q.Listener }
	if slices.ContainsFunc(is.Listen, named) {
		return q.Listener
	}
	for _, old := range was.Listen {
		for _, l := range is.Listen {
			sameAddress := func(a shaper.Address) bool {
				return a.Protocol == q.Protocol && a.Ports.First <= q.Port && q.Port <= a.Ports.Last && slices.Contains(l.Addresses, a)
			}
			if named(old) && slices.ContainsFunc(old.Addresses, sameAddress) {
				return l.Name
			}
		}
	}
	return ""
}

// classText describes a class. Without classes all is of the default class.
func classText(c *api.Class) string {
	if c == nil {
		c = &api.Class{Name: shaper.DefaultClass, Weight: 1}
	}
	return fmt.Sprintf("%s, weight %d, priority %d", c.Name, c.Weight, c.Priority)
}

func describe(l *api.LimitBucket) string {
	if l.Mode == shaper.Observe.String() {
		return l.Summary + " (observes)"
	}
	return l.Summary
}
