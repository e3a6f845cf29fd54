package control

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/shaper/topk"
)

// maxStreams bounds the live streams of the dashboard. On the socket, the connections of a user
// bound them.
const maxStreams = 32

// liveCache is the state that all live streams send, computed once per sample.
type liveCache struct {
	mu   sync.Mutex
	next <-chan struct{} // identifies the sample that now is of
	now  api.Live
}

// getLive sends the state of the daemon as server-sent events, one per second.
func (a *handlers) getLive(w http.ResponseWriter, q *http.Request) {
	seen, ok := eventID(w, q, q.Header.Get("Last-Event-ID"))
	if !ok {
		return
	}
	defer a.streams.Add(-1)
	if a.streams.Add(1) > maxStreams && a.onDashboard {
		writeJSON(w, http.StatusServiceUnavailable, api.Error{Message: fmt.Sprintf("too many live streams (limit %d)", maxStreams)})
		return
	}
	setHeaders(w, "text/event-stream")
	if q.Method == http.MethodHead { // nothing would be sent, so that the disconnect would go unnoticed
		return
	}
	// The write timeout of a response applies to each event.
	var timeout time.Duration
	if h, ok := q.Context().Value(http.ServerContextKey).(*http.Server); ok {
		timeout = h.WriteTimeout
	}
	to := http.NewResponseController(w)
	if last := a.Events.Last(); seen > last { // the ID is from an earlier daemon
		seen = 0
	}
	for {
		next := a.Monitor.Next()
		l := a.live(next, seen)
		if n := len(l.Events); n > 0 {
			seen = l.Events[n-1].ID
		}
		text, err := json.Marshal(l)
		if err == nil {
			err = to.SetWriteDeadline(time.Now().Add(timeout))
		}
		if err == nil {
			_, err = fmt.Fprintf(w, "id: %d\nevent: live\ndata: %s\n\n", seen, text)
		}
		if err == nil {
			err = to.Flush()
		}
		if err != nil {
			return
		}
		select {
		case <-next:
		case <-q.Context().Done():
			return
		}
		if a.Monitor.Closed() {
			return
		}
	}
}

const (
	liveTalkers = 10 // per sort key
	liveQuotas  = 10
	liveEvents  = 50
)

// live returns the state of the daemon until the next sample, and the events after seen.
func (v *view) live(next <-chan struct{}, seen uint64) api.Live {
	s := &v.liveCache
	s.mu.Lock()
	if s.next != next {
		s.next, s.now = next, api.Live{Status: v.status(), Limits: v.limits(), Talkers: v.topTalkers()}
		if v.Shaper.Policy().Quotas() != 0 {
			quotas := v.quotas("", liveQuotas)
			s.now.Quotas = &quotas
		}
	}
	l := s.now
	s.mu.Unlock()
	l.Events = v.Events.Since(seen)
	l.Events = l.Events[max(0, len(l.Events)-liveEvents):]
	return l
}

// topTalkers returns the talkers that are at the top by any sort key.
func (v *view) topTalkers() map[string][]api.Talker {
	all := map[string][]api.Talker{}
	for _, by := range []string{"source", "prefix", "asn"} {
		seen := map[string]bool{}
		all[by] = []api.Talker{}
		for _, sort := range []topk.SortKey{topk.ByDelay, topk.ByDrops, topk.ByRate} {
			for _, w := range v.talkers(by, sort, liveTalkers) {
				if !seen[w.Name] {
					seen[w.Name] = true
					all[by] = append(all[by], w)
				}
			}
		}
	}
	return all
}

// oneOf lists the keys of choices.
func oneOf[T any](choices map[string]T) string {
	return "one of " + strings.Join(slices.Sorted(maps.Keys(choices)), ", ")
}
