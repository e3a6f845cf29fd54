package daemon

import (
	"fmt"

	"shaperd.dev/shaperd/api"
)

// maxDisagreements is the maximum number of differences that are problems of their own.
const maxDisagreements = 3

// disagreements returns the problems that hosts of the group have different limits.
func disagreements(s *api.Shared) (all []api.Problem) {
	if s.State != sharedJoined {
		return nil
	}
	add := func(format string, args ...any) {
		all = append(all, api.Problem{Severity: critical, Title: "Hosts disagree", Text: fmt.Sprintf(format, args...)})
	}
	for i, d := range s.Differences {
		name := fmt.Sprintf("limit %q", d.Limit)
		if d.Limit == "[shared]" {
			name = d.Limit
		}
		switch {
		case i == maxDisagreements:
			add("about %d more: see \"shaperd shared status\".", len(s.Differences)-i)
			return all
		case d.Limit == "":
			add("about shared limits: those at %s are not the same as here.", d.Host)
		case d.Here == "" && d.There == "":
			add("about %s: it is not the same at %s as here.", name, d.Host)
		case d.Here == "":
			add("about %s: it is shared at %s, and not here.", name, d.Host)
		case d.There == "":
			add("about %s: it is shared here, and not at %s.", name, d.Host)
		default:
			add("about %s: here %s; at %s %s.", name, d.Here, d.Host, d.There)
		}
	}
	if len(all) == 0 && s.Differing > 0 {
		add("about shared limits: those of %d others are not the same as here.", s.Differing)
	}
	return all
}
