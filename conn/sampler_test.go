package conn

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// lockedBuffer may be written to by several goroutines.
type lockedBuffer struct {
	sync.Mutex
	bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.Lock()
	defer b.Unlock()
	return b.Buffer.Write(p)
}

func (b *lockedBuffer) String() string {
	b.Lock()
	defer b.Unlock()
	return b.Buffer.String()
}

func TestSampler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out lockedBuffer
		s := newSampler(slog.New(slog.NewTextHandler(&out, nil)), time.Second)
		for range 100 {
			s.note("refused", "limit", "a", "source", "10.0.0.1")
		}
		s.note("refused", "limit", "b", "source", "10.0.0.1")
		time.Sleep(3 * time.Second)
		got := out.String()
		for text, n := range map[string]int{
			"msg=refused limit=a source=10.0.0.1":            5,
			"msg=refused limit=b source=10.0.0.1":            1,
			`msg="refused, more of them" limit=a omitted=95`: 1,
			`msg="refused, more of them" limit=b`:            0,
		} {
			if c := strings.Count(got, text); c != n {
				t.Errorf("%q stands %d times in the log, want %d:\n%s", text, c, n, got)
			}
		}
	})
}
