package daemon

import (
	"fmt"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/sharing"
)

const titleDisagree = "Hosts disagree"

// maxDisagreements is the maximum number of differences that are problems of their own.
const maxDisagreements = 3

// disagreements returns the problems that hosts of the group have different limits.
func disagreements(s *api.Shared) (all []api.Problem) {
	if s.State != sharedJoined {
		return nil
	}
	for i, d := range s.Differences {
		text := sharing.DifferenceText(d)
		if i == maxDisagreements {
			text = fmt.Sprintf("about %d more: see \"shaperd shared status\".", len(s.Differences)-i)
		}
		all = append(all, api.Problem{Severity: critical, Title: titleDisagree, Text: text})
		if i == maxDisagreements {
			return all
		}
	}
	if len(all) == 0 && s.Differing > 0 {
		text := fmt.Sprintf("about shared limits: those of %d others are not the same as here.", s.Differing)
		all = append(all, api.Problem{Severity: critical, Title: titleDisagree, Text: text})
	}
	return all
}
