package cli

import (
	"strings"
	"testing"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
)

// TestPrintLimit_OmitsUncountedRows checks that figures which a limit does not count are omitted: 0
// would be wrong.
func TestPrintLimit_OmitsUncountedRows(t *testing.T) {
	for name, c := range map[string]struct {
		limit    api.Limit
		has, not []string
	}{
		"slots":            {api.Limit{MaxConnections: 2}, []string{"connections"}, []string{"passes", "packets", "delayed"}},
		"rate":             {api.Limit{Rate: 1e6}, []string{"passes", "packets", "delayed"}, []string{"connections"}},
		"both":             {api.Limit{Rate: 1e6, NewConnections: 20}, []string{"passes", "packets", "delayed", "connections"}, nil},
		"slots, packets":   {api.Limit{MaxConnections: 2, PacketsTotal: 7}, []string{"connections", "passes", "packets"}, []string{"delayed"}},
		"nothing but stop": {api.Limit{Block: true}, []string{"refused"}, []string{"passes", "packets", "delayed", "connections"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := &term.Printer{}
			printLimit(p, c.limit)
			for _, word := range c.has {
				if !strings.Contains(p.String(), "\n"+word+" ") {
					t.Errorf("no line of %q in\n%s", word, p.String())
				}
			}
			for _, word := range c.not {
				if strings.Contains(p.String(), "\n"+word+" ") {
					t.Errorf("a line of %q in\n%s", word, p.String())
				}
			}
		})
	}
}
