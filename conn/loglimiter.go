package conn

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// logLimiter limits the rate of log records that may come by the thousand: of each kind it
// logs five at once, then one per interval, and the number omitted. The kind is the message
// and the value of the first attribute.
type logLimiter struct {
	log   *slog.Logger
	every time.Duration // the interval

	mu sync.Mutex
	// mu protects:
	kinds map[logKind]*logQuota
}

type logKind struct{ msg, first string }

type logQuota struct {
	limiter *rate.Limiter
	omitted uint64 // since the number was logged last
}

func newLogLimiter(log *slog.Logger, every time.Duration) *logLimiter {
	return &logLimiter{log: log, every: every, kinds: map[logKind]*logQuota{}}
}

// warn writes msg at level Warn.
func (l *logLimiter) warn(msg string, attrs ...any) { l.write(slog.LevelWarn, msg, attrs...) }

// write logs msg, or counts it as omitted. The value of the first attribute must come from the
// configuration, because memory is kept for each.
func (l *logLimiter) write(level slog.Level, msg string, attrs ...any) {
	first, _ := attrs[1].(string)
	kind := logKind{msg, first}
	l.mu.Lock()
	k := l.kinds[kind]
	if k == nil {
		k = &logQuota{limiter: rate.NewLimiter(rate.Every(l.every), 5)}
		l.kinds[kind] = k
	}
	allowed := k.limiter.Allow()
	if !allowed {
		if k.omitted++; k.omitted == 1 {
			time.AfterFunc(omittedIntervals*l.every, func() { l.flush(k, level, msg, attrs[:2]) })
		}
	}
	l.mu.Unlock()
	if allowed {
		l.log.Log(context.Background(), level, msg, attrs...)
	}
}

// omittedIntervals is the number of intervals after which omitted records are reported.
const omittedIntervals = 2

func (l *logLimiter) flush(k *logQuota, level slog.Level, msg string, kind []any) {
	l.mu.Lock()
	n := k.omitted
	k.omitted = 0
	l.mu.Unlock()
	l.log.Log(context.Background(), level, msg+" (repeated)", append(slices.Clone(kind), "omitted", n)...)
}
