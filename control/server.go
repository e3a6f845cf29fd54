package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"shaperd/leaky"
	"shaperd/shaper"
)

// Options are what is shown and steered.
type Options struct {
	Shaper  *shaper.Shaper
	Proxy   Proxy
	Packets Packets
	Clock   func() leaky.Time
	Monitor *Monitor
	Reloads *Reloads
	Events  *Events
	Daemon  Daemon
	Log     *slog.Logger
	LogLost func() uint64 // lines of the log
	Version string

	once    sync.Once
	shared  *view
	unshown sync.Map // by key of [daemon], why nobody is shown anything there
}

// view returns what answers, the same on the socket and on the page's port: what is looked
// at for one is there for the other.
func (o *Options) view() *view {
	o.once.Do(func() { o.shared = &view{Options: o} })
	return o.shared
}

// Daemon is who knows the configuration, and changes it. Its methods are called by several
// goroutines.
//
// An error of a change wraps [ErrUnknown] when there is nothing of that name, and
// [ErrRefused] when what is asked for cannot be: the caller can do something about it.
type Daemon interface {
	Describe(*Status) // fills in what it knows
	HeldTo(*shaper.Limit) string
	// Override returns what operators have set in a limit, by key, and where files of the
	// configuration override it.
	Override(limit string) (set, inFiles map[string]string)
	Config() any
	Explain(Question) (Explanation, error)

	SetLimit(ctx context.Context, limit string, set map[string]string, d time.Duration, untilReload bool) error
	UnsetLimit(ctx context.Context, limit string, keys []string) error // without keys all of them
	Block(ctx context.Context, p netip.Prefix, d time.Duration) error
	Unblock(ctx context.Context, p netip.Prefix) error
	Bypass(ctx context.Context, on bool, d time.Duration) error
	// DrainDownstream has a downstream get no connections any more, or get them again, at
	// one listener, or at all where listener is "".
	DrainDownstream(ctx context.Context, listener, downstream string, drained bool) error
	Reload(ctx context.Context) error
	Drain(ctx context.Context)
}

// Errors of a Daemon.
var (
	ErrUnknown = errors.New("unknown")
	ErrRefused = errors.New("refused")
	ErrEnding  = errors.New("the daemon is about to end")
)

// Question is what to explain: see the query of GET /v1/explain.
type Question struct{ Source, To, Listener, Attach, Destination string }

// Server answers on the control socket.
type Server struct {
	Endpoint
	socket *socket
}

// maxBody is how many bytes a request may bring.
const maxBody = 64 << 10

// Serve answers on a control socket at path.
func Serve(path string, o *Options) (*Server, error) {
	socket, err := listenSocket(path, groupID(), o.Log)
	if err != nil {
		return nil, err
	}
	return answerOn(socket, newServer(newAPI(o))), nil
}

func answerOn(socket *socket, h *http.Server) *Server {
	s := &Server{socket: socket}
	h.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		return context.WithValue(ctx, peerKey{}, c.(*peer))
	}
	s.serve(socket, h)
	return s
}

// Connections returns how many there are.
func (s *Server) Connections() int { return s.socket.crowd.size() }

// peerKey is the key of the *peer that asks, in the context of a request.
type peerKey struct{}

// route is an endpoint, and who may use it.
type route struct {
	pattern string
	role    Role
	handler http.HandlerFunc
}

// newAPI returns what answers requests whose context has a role.
func newAPI(o *Options) http.Handler {
	mux := http.NewServeMux()
	a := &api{view: o.view()}
	metrics := metricsHandler(o)
	told := rate.NewLimiter(1, 10)
	for _, r := range append(a.routes(), route{"GET /metrics", Reader, metrics.ServeHTTP}) {
		mux.HandleFunc(r.pattern, func(w http.ResponseWriter, q *http.Request) {
			who, _ := q.Context().Value(peerKey{}).(*peer)
			if who == nil {
				who = &peer{}
			}
			if who.crowded {
				w.Header().Set("Retry-After", "1")
				w.Header().Set("Connection", "close")
				answer(w, http.StatusServiceUnavailable, Error{fmt.Sprintf("too many connections of user %d (%d)", who.uid, most(who.role))})
				return
			}
			if who.role < r.role {
				msg := "this takes root, or the daemon's own user"
				if r.role == Reader {
					msg = fmt.Sprintf("this takes root, the daemon's own user, or the group %q", Group)
				}
				answer(w, http.StatusForbidden, Error{msg})
				if who.role != Nobody && told.Allow() { // who has no role was told of when he connected
					o.Log.Warn("control socket: not permitted", append(Asker(withAsker(q, who).Context()), "asked", r.pattern)...)
				}
				return
			}
			if r.role == Admin { // a change waits for those before it, a profile takes its time
				q = withAsker(q, who)
				_ = http.NewResponseController(w).SetWriteDeadline(time.Time{})
			}
			q.Body = http.MaxBytesReader(w, q.Body, maxBody)
			r.handler(w, q)
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, q *http.Request) {
		answer(w, http.StatusNotFound, Error{fmt.Sprintf("there is no %s %s", q.Method, q.URL.Path)})
	})
	return mux
}

// readOnly is newAPI for everybody who gets as far as this: what shows, and changes nothing.
func readOnly(o *Options) http.Handler {
	mux := http.NewServeMux()
	for _, r := range (&api{view: o.view(), public: true}).routes() {
		if r.role == Reader {
			mux.HandleFunc(r.pattern, r.handler)
		}
	}
	return mux
}

// api answers at one endpoint.
type api struct {
	*view
	public bool         // whoever can connect may ask
	open   atomic.Int32 // streams
}

func (a *api) routes() []route {
	return []route{
		{"GET /v1/status", Reader, func(w http.ResponseWriter, q *http.Request) { answer(w, http.StatusOK, a.status()) }},
		{"GET /v1/limits", Reader, func(w http.ResponseWriter, q *http.Request) { answer(w, http.StatusOK, a.limits()) }},
		{"GET /v1/limits/{limit}", Reader, a.getLimit},
		{"GET /v1/limits/{limit}/keys", Reader, a.getKeys},
		{"GET /v1/who", Reader, a.getWho},
		{"GET /v1/connections", Reader, a.getConnections},
		{"GET /v1/downstreams", Reader, func(w http.ResponseWriter, q *http.Request) { answer(w, http.StatusOK, a.downstreams()) }},
		{"GET /v1/explain", Reader, a.getExplain},
		{"GET /v1/blocks", Reader, func(w http.ResponseWriter, q *http.Request) { answer(w, http.StatusOK, a.blocks()) }},
		{"GET /v1/events", Reader, a.getEvents},
		{"GET /v1/history", Reader, func(w http.ResponseWriter, q *http.Request) { answer(w, http.StatusOK, a.Monitor.history()) }},
		{"GET /v1/live", Reader, a.getLive},
		{"GET /v1/openapi.json", Reader, getOpenAPI},
		{"GET /v1/config", Admin, func(w http.ResponseWriter, q *http.Request) { answer(w, http.StatusOK, a.Daemon.Config()) }},

		{"PATCH /v1/limits/{limit}", Admin, a.setLimit},
		{"DELETE /v1/limits/{limit}/override", Admin, a.unsetLimit},
		{"POST /v1/blocks", Admin, a.block},
		{"DELETE /v1/blocks", Admin, a.unblock},
		{"PUT /v1/bypass", Admin, a.bypass},
		{"DELETE /v1/connections/{id}", Admin, a.kill},
		{"PATCH /v1/downstreams", Admin, a.setDownstream},
		{"POST /v1/reload", Admin, a.reload},
		{"POST /v1/drain", Admin, a.drain},

		{"GET /debug/pprof/", Admin, pprof.Index},
		{"GET /debug/pprof/profile", Admin, pprof.Profile},
		{"GET /debug/pprof/trace", Admin, pprof.Trace},
	}
}
