package conn

import (
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
)

func TestLogLimiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out testutil.Buffer
		l := newLogLimiter(slog.New(slog.NewTextHandler(&out, nil)), time.Second)
		for range 100 {
			l.warn("refused", "limit", "a", "source", "10.0.0.1")
		}
		l.warn("refused", "limit", "b", "source", "10.0.0.1")
		time.Sleep(3 * time.Second)
		got := out.String()
		for text, n := range map[string]int{
			"msg=refused limit=a source=10.0.0.1":         5,
			"msg=refused limit=b source=10.0.0.1":         1,
			`msg="refused (repeated)" limit=a omitted=95`: 1,
			`msg="refused (repeated)" limit=b`:            0,
		} {
			if c := strings.Count(got, text); c != n {
				t.Errorf("%q is %d times in the log, want %d:\n%s", text, c, n, got)
			}
		}
	})
}
