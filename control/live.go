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

	"shaperd/shaper"
)

// maxStreams is how many pages may be open at once. On the socket it is what a user may have
// in connections.
const maxStreams = 32

// streams is what pages that are open are shown, which is put together once for all of them.
type streams struct {
	mu  sync.Mutex
	of  <-chan struct{} // the sample that shown is of
	now Live
}

// getLive tells a page each second how everything is, by server-sent events.
func (a *api) getLive(w http.ResponseWriter, q *http.Request) {
	seen, ok := since(w, q, q.Header.Get("Last-Event-ID"))
	if !ok {
		return
	}
	defer a.open.Add(-1)
	if a.open.Add(1) > maxStreams && a.public {
		answer(w, http.StatusServiceUnavailable, Error{fmt.Sprintf("too many live streams (%d)", maxStreams)})
		return
	}
	header(w, "text/event-stream")
	if q.Method == http.MethodHead { // nothing would ever be sent, and so nobody be missed
		return
	}
	// An event has as long as any answer.
	var within time.Duration
	if h, ok := q.Context().Value(http.ServerContextKey).(*http.Server); ok {
		within = h.WriteTimeout
	}
	to := http.NewResponseController(w)
	if kept := a.Events.Last(); seen > kept { // of an earlier daemon
		seen = 0
	}
	for {
		next := a.Monitor.sampled()
		l := a.live(next, seen)
		if n := len(l.Events); n > 0 {
			seen = l.Events[n-1].ID
		}
		text, err := json.Marshal(l)
		if err == nil {
			err = to.SetWriteDeadline(time.Now().Add(within))
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
		if a.Monitor.ended() {
			return
		}
	}
}

const (
	liveWho    = 10 // of each trait
	liveEvents = 50
)

// live returns how everything is until the next sample, and the events after one.
func (v *view) live(next <-chan struct{}, seen uint64) Live {
	s := &v.streams
	s.mu.Lock()
	if s.of != next {
		s.of, s.now = next, Live{Status: v.status(), Limits: v.limits(), Who: v.heaviest()}
	}
	l := s.now
	s.mu.Unlock()
	l.Events = v.Events.Since(seen)
	l.Events = l.Events[max(0, len(l.Events)-liveEvents):]
	return l
}

// heaviest returns those who are heavy by any trait.
func (v *view) heaviest() map[string][]Who {
	all := map[string][]Who{}
	for _, by := range []string{"source", "prefix", "asn"} {
		seen := map[string]bool{}
		all[by] = []Who{}
		for _, trait := range []shaper.Trait{shaper.TraitDelay, shaper.TraitDrops, shaper.TraitRate} {
			for _, w := range v.who(by, trait, liveWho) {
				if !seen[w.Name] {
					seen[w.Name] = true
					all[by] = append(all[by], w)
				}
			}
		}
	}
	return all
}

// oneOf lists the words of choices.
func oneOf[T any](choices map[string]T) string {
	return "one of " + strings.Join(slices.Sorted(maps.Keys(choices)), ", ")
}
