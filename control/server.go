// Package control serves the API of package api: all of it on the control socket, by roles, and
// what only reads on the port of the dashboard. It owns the file of the socket, the ports of the
// dashboard and of the metrics, and their HTTP servers.
//
// Each request has a goroutine of its own. So the methods of [Daemon], [Proxy] and [Packets] are
// called concurrently; none may wait for traffic.
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

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control/metrics"
	"shaperd.dev/shaperd/control/monitor"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// Options are the parts of the daemon that the API reads and controls.
type Options struct {
	Shaper     *shaper.Shaper
	Proxy      Proxy
	Packets    Packets
	Clock      func() leaky.Time
	Monitor    *monitor.Monitor
	Reloads    *monitor.Reloads
	Events     *monitor.Events
	Daemon     Daemon
	Log        *slog.Logger
	LogDropped func() uint64 // number of log records dropped
	Version    string

	// Ready is closed when the daemon has applied its configuration: until then requests wait,
	// as what they would be told is not true yet. nil means that it has.
	Ready <-chan struct{}

	once           sync.Once
	sharedView     *view
	endpointErrors sync.Map // by key of [daemon]: why it is not served
}

// view returns the view that the socket and the dashboard share: both use what either has
// cached.
func (o *Options) view() *view {
	o.once.Do(func() { o.sharedView = &view{Options: o} })
	return o.sharedView
}

// startWait is how long a request waits at most for the daemon to be ready: less than the timeout of
// the client in package api, which reports the error then.
const startWait = 8 * time.Second

// whenReady returns the handler of r with requests that wait until the daemon is ready, except for
// those that a daemon that starts can answer.
func (o *Options) whenReady(r route) http.HandlerFunc {
	h := r.handler
	if o.Ready == nil || r.pattern == stopRoute || r.pattern == healthRoute {
		return h
	}
	return func(w http.ResponseWriter, q *http.Request) {
		select {
		case <-o.Ready:
			h(w, q)
		case <-q.Context().Done():
		case <-time.After(startWait):
			w.Header().Set("Retry-After", "1")
			writeJSON(w, http.StatusServiceUnavailable, api.Error{Message: "shaperd is starting"})
		}
	}
}

// Daemon holds the configuration and applies changes. Its methods are called concurrently.
//
// The error of a change wraps [ErrUnknown] if there is no object of that name, and
// [ErrRefused] if the change is invalid: the caller can do something about it.
type Daemon interface {
	metrics.Daemon
	// Summary returns the effective values of a limit in words.
	Summary(*shaper.Limit) string
	// Override returns the values that operators set in a limit, and the file and line of each
	// [[override]] of it, both by key.
	Override(limit string) (set, inFiles map[string]string)
	Config() any
	// Silence returns for how long the loops of the daemon have not answered, and Stopping whether it
	// has begun to stop. Neither waits.
	Silence() time.Duration
	Stopping() bool
	Explain(ExplainRequest) (api.Explanation, error)
	// Shared returns what this host knows of the group of hosts that share limits. AddLedger adds what
	// the ledger knows; it may wait for the store, for some seconds at most.
	Shared() api.Shared
	AddLedger(*api.Shared)

	Scheduled(limit string) []api.Scheduled
	Configuration() api.Configuration
	Revisions(ctx context.Context) ([]api.Revision, error)
	Rollback(ctx context.Context, revision string) error
	ResetBucket(ctx context.Context, limit string, source netip.Addr) error
	ResetQuota(ctx context.Context, limit string, source netip.Addr) error
	SetLimit(ctx context.Context, limit string, sources netip.Prefix, set map[string]string, d time.Duration, untilReload bool) error
	UnsetLimit(ctx context.Context, limit string, sources netip.Prefix, keys []string) error // without keys, all of them
	Block(ctx context.Context, p netip.Prefix, d time.Duration) error
	Unblock(ctx context.Context, p netip.Prefix) error
	// ChangeBlocks blocks prefixes for d, and unblocks others, but not for keepPermanent those without an end: all of them or none.
	ChangeBlocks(ctx context.Context, block, unblock []netip.Prefix, d time.Duration, keepPermanent bool) (api.BlockChanges, error)
	EndPenalty(ctx context.Context, limit string, source netip.Prefix) error // of all limits if limit is ""
	Bypass(ctx context.Context, on bool, d time.Duration) error
	// DrainDownstream drains or enables a downstream of one listener, or of all if listener
	// is "".
	DrainDownstream(ctx context.Context, listener, downstream string, drained bool) error
	// HoldListener makes new connections of a listener wait for d, or until it is resumed if that is
	// shaper.Forever; with 0 it resumes the listener. With endIdle it closes idle connections, and returns how many.
	HoldListener(ctx context.Context, listener string, d time.Duration, endIdle bool) (ended int, err error)
	// ForgetHost tells the ledger that a host is gone for good.
	ForgetHost(ctx context.Context, host string) error
	Reload(ctx context.Context) error
	Stop(ctx context.Context)
}

// Errors of a Daemon.
var (
	ErrUnknown  = errors.New("unknown")
	ErrRefused  = errors.New("refused")
	ErrStopping = errors.New("the daemon is stopping")
)

// ExplainRequest is the query of GET /v1/explain.
type ExplainRequest struct{ Source, To, Listener, Attach, Destination, DSCP, Mark, Downstream, TLV, Cgroup string }

// Server serves the API on the control socket.
type Server struct {
	Endpoint
	socket *socket
}

// maxBody is the maximum size of a request body in bytes.
const maxBody = 64 << 10

// bulkRoute takes lists, in a body of up to maxBulkBody bytes.
const (
	bulkRoute   = "PATCH /v1/blocks"
	maxBulkBody = 8 << 20
)

// bodyLimit returns the maximum size of the request body of a route.
func bodyLimit(pattern string) int64 {
	if pattern == bulkRoute {
		return maxBulkBody
	}
	return maxBody
}

// Serve serves the API on a control socket at path.
func Serve(path string, o *Options) (*Server, error) {
	socket, err := listenSocket(path, groupID(), o.Log)
	if err != nil {
		return nil, err
	}
	return serveAPI(socket, newServer(newAPI(o))), nil
}

func serveAPI(socket *socket, h *http.Server) *Server {
	s := &Server{socket: socket}
	h.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		return context.WithValue(ctx, peerKey{}, c.(*peer))
	}
	s.serve(socket, h)
	return s
}

// peerKey is the context key of the *peer of a request.
type peerKey struct{}

// route is an endpoint with the role that it requires.
type route struct {
	pattern string
	role    Role
	handler http.HandlerFunc
}

// Routes that do not wait for a daemon that starts.
const (
	stopRoute   = "POST /v1/stop"
	healthRoute = "GET /v1/health"
)

// newAPI returns the handler of the API. The context of a request must have a *peer.
func newAPI(o *Options) http.Handler {
	mux := http.NewServeMux()
	a := &handlers{view: o.view()}
	scrape := metricsHandler(o)
	logLimit := rate.NewLimiter(1, 10)
	for _, r := range append(a.routes(), route{"GET /metrics", Reader, scrape.ServeHTTP}) {
		r.handler = o.whenReady(r)
		mux.HandleFunc(r.pattern, func(w http.ResponseWriter, q *http.Request) {
			p, _ := q.Context().Value(peerKey{}).(*peer)
			if p == nil {
				p = &peer{}
			}
			if p.tooMany {
				w.Header().Set("Retry-After", "1")
				w.Header().Set("Connection", "close")
				writeJSON(w, http.StatusServiceUnavailable, api.Error{Message: fmt.Sprintf("too many connections of user %d (limit %d)", p.uid, maxConnections(p.role))})
				return
			}
			if p.role < r.role {
				msg := "permission denied: requires root or the user of the daemon"
				if r.role == Reader {
					msg = fmt.Sprintf("permission denied: requires root, the user of the daemon, or the group %q", Group)
				}
				writeJSON(w, http.StatusForbidden, api.Error{Message: msg})
				if p.role != NoRole && logLimit.Allow() { // without a role, Accept has logged it
					o.Log.Warn("control socket: permission denied", append(CallerAttrs(withCaller(q, p).Context()), "request", r.pattern)...)
				}
				return
			}
			if r.role == Admin { // changes are queued, and profiles take long
				q = withCaller(q, p)
				_ = http.NewResponseController(w).SetWriteDeadline(time.Time{})
			}
			q.Body = http.MaxBytesReader(w, q.Body, bodyLimit(r.pattern))
			r.handler(w, q)
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, q *http.Request) {
		writeJSON(w, http.StatusNotFound, api.Error{Message: fmt.Sprintf("no such endpoint: %s %s", q.Method, q.URL.Path)})
	})
	return mux
}

// newReadOnlyAPI returns the handler of the read-only half of the API, without roles.
func newReadOnlyAPI(o *Options) http.Handler {
	mux := http.NewServeMux()
	for _, r := range (&handlers{view: o.view(), onDashboard: true}).routes() {
		if r.role == Reader {
			mux.HandleFunc(r.pattern, o.whenReady(r))
		}
	}
	return mux
}

// handlers are the handlers of one endpoint.
type handlers struct {
	*view
	onDashboard bool         // served without roles
	streams     atomic.Int32 // open live streams
}

func (a *handlers) routes() []route {
	return []route{
		{"GET /v1/status", Reader, func(w http.ResponseWriter, q *http.Request) { writeJSON(w, http.StatusOK, a.status()) }},
		{healthRoute, Reader, func(w http.ResponseWriter, q *http.Request) { writeJSON(w, http.StatusOK, a.health()) }},
		{"GET /v1/limits", Reader, func(w http.ResponseWriter, q *http.Request) { writeJSON(w, http.StatusOK, a.limits()) }},
		{"GET /v1/limits/{limit}", Reader, a.getLimit},
		{"GET /v1/limits/{limit}/keys", Reader, a.getKeys},
		{"GET /v1/talkers", Reader, a.getTalkers},
		{"GET /v1/connections", Reader, a.getConnections},
		{"GET /v1/downstreams", Reader, func(w http.ResponseWriter, q *http.Request) { writeJSON(w, http.StatusOK, a.downstreams()) }},
		{"GET /v1/explain", Reader, a.getExplain},
		{"GET /v1/shared", Reader, func(w http.ResponseWriter, q *http.Request) { writeJSON(w, http.StatusOK, a.shared()) }},
		{"GET /v1/blocks", Reader, func(w http.ResponseWriter, q *http.Request) { writeJSON(w, http.StatusOK, a.blocks()) }},
		{"GET /v1/quotas", Reader, a.getQuotas},
		{"GET /v1/penalties", Reader, func(w http.ResponseWriter, q *http.Request) { writeJSON(w, http.StatusOK, a.penalties()) }},
		{"GET /v1/revisions", Reader, a.getRevisions},
		{"GET /v1/events", Reader, a.getEvents},
		{"GET /v1/history", Reader, func(w http.ResponseWriter, q *http.Request) { writeJSON(w, http.StatusOK, a.Monitor.History()) }},
		{"GET /v1/live", Reader, a.getLive},
		{"GET /v1/openapi.json", Reader, getOpenAPI},
		{"GET /v1/config", Admin, func(w http.ResponseWriter, q *http.Request) { writeJSON(w, http.StatusOK, a.Daemon.Config()) }},

		{"PATCH /v1/limits/{limit}", Admin, a.setLimit},
		{"DELETE /v1/limits/{limit}/override", Admin, a.unsetLimit},
		{"DELETE /v1/limits/{limit}/bucket", Admin, a.reset(Daemon.ResetBucket)},
		{"DELETE /v1/limits/{limit}/quota", Admin, a.reset(Daemon.ResetQuota)},
		{"POST /v1/blocks", Admin, a.block},
		{"DELETE /v1/blocks", Admin, a.unblock},
		{bulkRoute, Admin, a.changeBlocks},
		{"DELETE /v1/penalties", Admin, a.endPenalty},
		{"PUT /v1/bypass", Admin, a.bypass},
		{"DELETE /v1/connections/{id}", Admin, a.kill},
		{"PATCH /v1/downstreams", Admin, a.setDownstream},
		{"PATCH /v1/listeners", Admin, a.setListener},
		{"DELETE /v1/shared/hosts/{host}", Admin, a.forgetHost},
		{"GET /v1/config/files", Admin, func(w http.ResponseWriter, q *http.Request) { writeJSON(w, http.StatusOK, a.Daemon.Configuration()) }},
		{"POST /v1/reload", Admin, a.reload},
		{"POST /v1/rollback", Admin, a.rollback},
		{stopRoute, Admin, a.stop},

		{"GET /debug/pprof/", Admin, pprof.Index},
		{"GET /debug/pprof/profile", Admin, pprof.Profile},
		{"GET /debug/pprof/trace", Admin, pprof.Trace},
	}
}
