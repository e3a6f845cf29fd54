package control

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"shaperd.dev/shaperd/api"
)

// silentAfter is how long the loops of the daemon may not answer before it counts as hung. A
// healthy one answers each second.
const silentAfter = 5 * time.Second

// attachmentsTimeout is how long a prober waits for the state of attachments.
const attachmentsTimeout = time.Second

// withProbes adds what probers ask to mux: /healthz, which fails when the process should be
// restarted, and /ready, which fails when it should get no traffic. Neither waits for the loops of
// the daemon.
func (v *view) withProbes(mux *http.ServeMux) {
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		h := api.Health{State: "ok"}
		if d := v.Daemon.Silence(); d > silentAfter {
			h = silent(d)
		}
		writeProbe(w, h, h.State == "ok")
	})
	mux.HandleFunc("GET /ready", func(w http.ResponseWriter, _ *http.Request) {
		h := v.health()
		writeProbe(w, h, h.State == api.Ready)
	})
}

// writeProbe writes h as a line of text, with the code 503 unless ok.
func writeProbe(w http.ResponseWriter, h api.Health, ok bool) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	if !ok {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	fmt.Fprintln(w, h)
}

func silent(d time.Duration) api.Health {
	return api.Health{State: api.Silent, Detail: fmt.Sprintf("no answer for %v", d.Truncate(time.Second))}
}

// health returns whether the daemon can take traffic. It does not wait for its loops.
func (v *view) health() api.Health {
	select {
	case <-v.Ready:
	default:
		if v.Ready != nil {
			return api.Health{State: api.Starting}
		}
	}
	if v.Daemon.Stopping() {
		return api.Health{State: api.Stopping}
	}
	if d := v.Daemon.Silence(); d > silentAfter {
		return silent(d)
	}
	if problem := v.notAttached(); problem != "" {
		return api.Health{State: api.NotAttached, Detail: problem}
	}
	return api.Health{State: api.Ready}
}

// attachmentsProbe asks for the state of attachments on behalf of probers. A kernel that does not
// answer holds up one goroutine, however many of them there are.
type attachmentsProbe struct {
	mu      sync.Mutex
	pending chan struct{} // closed with the answer; nil while nothing is asked
	problem string        // the last answer
}

// notAttached returns which attachments do not enforce their limits; "" if all do.
func (v *view) notAttached() string {
	p := &v.attachmentsProbe
	p.mu.Lock()
	answered := p.pending
	if answered == nil {
		answered = make(chan struct{})
		p.pending = answered
		go func() {
			problem := v.attachmentProblems()
			p.mu.Lock()
			defer p.mu.Unlock()
			p.problem, p.pending = problem, nil
			close(answered)
		}()
	}
	p.mu.Unlock()
	select {
	case <-answered:
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.problem
	case <-time.After(attachmentsTimeout):
		return "the packet plane does not answer"
	}
}

func (v *view) attachmentProblems() string {
	packets, found, _, err := v.refresh()
	if err != nil {
		return "the packet plane cannot be read"
	}
	var down []string
	for _, a := range packets.Attachments {
		if found && !a.Up {
			down = append(down, strings.TrimSuffix(a.Name+" at "+a.Interface, " at "))
		}
	}
	return strings.Join(down, ", ")
}
