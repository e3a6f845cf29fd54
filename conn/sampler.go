package conn

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// sampler logs events that may come by the thousand: of each kind the first five,
// then one each time every has passed, and how many were left out. The kind is the
// message and the first attribute.
type sampler struct {
	log   *slog.Logger
	every time.Duration
	mu    sync.Mutex
	kinds map[sampleKind]*sampled
}

type sampleKind struct{ msg, first string }

type sampled struct {
	limiter *rate.Limiter
	omitted uint64
}

func newSampler(log *slog.Logger, every time.Duration) *sampler {
	return &sampler{log: log, every: every, kinds: map[sampleKind]*sampled{}}
}

// note is tell for warnings.
func (s *sampler) note(msg string, attrs ...any) { s.tell(slog.LevelWarn, msg, attrs...) }

// tell logs msg, or counts it. The first attribute's value must come from the
// configuration: there is a sample for each.
func (s *sampler) tell(level slog.Level, msg string, attrs ...any) {
	first, _ := attrs[1].(string)
	kind := sampleKind{msg, first}
	s.mu.Lock()
	k := s.kinds[kind]
	if k == nil {
		k = &sampled{limiter: rate.NewLimiter(rate.Every(s.every), 5)}
		s.kinds[kind] = k
	}
	allowed := k.limiter.Allow()
	if !allowed {
		if k.omitted++; k.omitted == 1 {
			time.AfterFunc(omittedAfter*s.every, func() { s.flush(k, level, msg, attrs[:2]) })
		}
	}
	s.mu.Unlock()
	if allowed {
		s.log.Log(context.Background(), level, msg, attrs...)
	}
}

// omittedAfter is how long events that are left out are counted before they are
// told of: so many times every.
const omittedAfter = 2

func (s *sampler) flush(k *sampled, level slog.Level, msg string, kind []any) {
	s.mu.Lock()
	n := k.omitted
	k.omitted = 0
	s.mu.Unlock()
	s.log.Log(context.Background(), level, msg+", more of them", append(slices.Clone(kind), "omitted", n)...)
}
