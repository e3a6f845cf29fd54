package conn

import (
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// sampler logs events that may come by the thousand: of each kind the first few,
// then one a second, with the number of those left out. The kind is the message
// and the first attribute.
type sampler struct {
	log   *slog.Logger
	mu    sync.Mutex
	kinds map[sampleKind]*sampled
}

type sampleKind struct{ msg, first string }

type sampled struct {
	limiter *rate.Limiter
	omitted uint64
}

func newSampler(log *slog.Logger) *sampler {
	return &sampler{log: log, kinds: map[sampleKind]*sampled{}}
}

// note logs msg, or counts it. The first attribute's value must come from the
// configuration: there is a sample for each.
func (s *sampler) note(msg string, attrs ...any) {
	first, _ := attrs[1].(string)
	kind := sampleKind{msg, first}
	s.mu.Lock()
	k := s.kinds[kind]
	if k == nil {
		k = &sampled{limiter: rate.NewLimiter(rate.Every(time.Second), 5)}
		s.kinds[kind] = k
	}
	if !k.limiter.Allow() {
		k.omitted++
		s.mu.Unlock()
		return
	}
	omitted := k.omitted
	k.omitted = 0
	s.mu.Unlock()
	if omitted > 0 {
		attrs = append(attrs, "omitted", omitted)
	}
	s.log.Warn(msg, attrs...)
}
