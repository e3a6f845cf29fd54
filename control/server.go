package control

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"reflect"
	"strconv"
	"strings"
	"time"

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
}

// Daemon is who knows the configuration, and changes it. Its methods are called by several
// goroutines.
//
// An error of a change wraps [ErrUnknown] when there is nothing of that name, and
// [ErrRefused] when what is asked for cannot be: the caller can do something about it.
type Daemon interface {
	Describe(*Status) // fills in what it knows
	HeldTo(*shaper.Limit) string
	Override(limit string) map[string]string
	Config() any
	Explain(Question) (Explanation, error)

	SetLimit(ctx context.Context, limit string, s SetLimit) error
	UnsetLimit(ctx context.Context, limit string) error
	Block(ctx context.Context, p netip.Prefix, d time.Duration) error
	Unblock(ctx context.Context, p netip.Prefix) error
	Bypass(ctx context.Context, on bool, d time.Duration) error
	Reload(ctx context.Context) error
	Drain()
}

// Errors of a Daemon.
var (
	ErrUnknown = errors.New("unknown")
	ErrRefused = errors.New("refused")
	ErrEnding  = errors.New("the daemon is about to end")
)

// Question is what to explain: see the query of GET /v1/explain.
type Question struct{ Source, To, Attach, Destination string }

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
		return context.WithValue(ctx, roleKey{}, c.(*peer).role)
	}
	s.serve(socket, h)
	return s
}

// Connections returns how many there are.
func (s *Server) Connections() int { return s.socket.connections() }

type roleKey struct{}

// route is an endpoint, and who may use it.
type route struct {
	pattern string
	role    Role
	handler http.HandlerFunc
}

// newAPI returns what answers requests whose context has a role.
func newAPI(o *Options) http.Handler {
	mux := http.NewServeMux()
	for _, r := range (&api{view{Options: o}}).routes() {
		mux.HandleFunc(r.pattern, func(w http.ResponseWriter, q *http.Request) {
			if role, _ := q.Context().Value(roleKey{}).(Role); role < r.role {
				msg := "this takes root, or the daemon's own user"
				if r.role == Reader {
					msg = fmt.Sprintf("this takes root, the daemon's own user, or the group %q", Group)
				}
				answer(w, http.StatusForbidden, Error{msg})
				return
			}
			if r.role == Admin { // a change waits for those before it, a profile takes its time
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
	for _, r := range (&api{view{Options: o}}).routes() {
		if r.role == Reader {
			mux.HandleFunc(r.pattern, r.handler)
		}
	}
	return mux
}

type api struct{ view }

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
		{"GET /v1/blocks", Reader, func(w http.ResponseWriter, q *http.Request) { answer(w, http.StatusOK, a.status().Blocks) }},
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

// answer writes v.
func answer(w http.ResponseWriter, code int, v any) {
	text, err := json.Marshal(v)
	if err != nil {
		code = http.StatusInternalServerError
		text, _ = json.Marshal(Error{err.Error()})
	}
	header(w, "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(append(text, '\n')) // the client may have left
}

func header(w http.ResponseWriter, contentType string) {
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
}

func bad(w http.ResponseWriter, format string, args ...any) {
	answer(w, http.StatusBadRequest, Error{fmt.Sprintf(format, args...)})
}

// failed answers err, if it is one.
func failed(w http.ResponseWriter, err error) bool {
	if err == nil {
		return false
	}
	code := http.StatusInternalServerError
	switch {
	case errors.Is(err, ErrUnknown):
		code = http.StatusNotFound
	case errors.Is(err, ErrRefused):
		code = http.StatusUnprocessableEntity
	case errors.Is(err, ErrEnding), errors.Is(err, context.Canceled): // of a client that left
		code = http.StatusServiceUnavailable
	}
	answer(w, code, Error{err.Error()})
	return true
}

// body reads the body of a request, and answers where that is no v.
func body(w http.ResponseWriter, q *http.Request, v any) bool {
	text, err := io.ReadAll(q.Body)
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		answer(w, http.StatusRequestEntityTooLarge, Error{fmt.Sprintf("the body is larger than %d bytes", maxBody)})
		return false
	}
	if err == nil {
		err = decode(text, v)
	}
	if err != nil {
		bad(w, "the body is not what it is to be: %v", err)
		return false
	}
	return true
}

// decode reads v from text, which has all of its fields but those that may be left out.
func decode(text []byte, v any) error {
	if len(text) == 0 {
		return errors.New("it is empty")
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	var given map[string]*json.RawMessage
	if err := json.Unmarshal(text, &given); err != nil { // there is more behind it
		return err
	}
	for f := range reflect.TypeOf(v).Elem().Fields() {
		name, may, _ := strings.Cut(f.Tag.Get("json"), ",")
		if may != "omitempty" && given[name] == nil {
			return fmt.Errorf("%q is missing", name)
		}
	}
	return nil
}

// longest is for how long a change may be asked to last.
const longest = 366 * 24 * time.Hour

// lasting reads for how long a change is to last, in seconds; 0 is as long as may be.
func lasting(w http.ResponseWriter, seconds float64) (time.Duration, bool) {
	if !(seconds >= 0 && seconds <= longest.Seconds()) {
		bad(w, "for: %v seconds: from 0 to %v", seconds, longest.Seconds())
		return 0, false
	}
	d := time.Duration(seconds * float64(time.Second))
	if d == 0 && seconds > 0 { // which would be as long as may be
		bad(w, "for: %v seconds are none", seconds)
		return 0, false
	}
	return d, true
}

// top reads how many are asked for.
func top(w http.ResponseWriter, q *http.Request, usual, most int) (int, bool) {
	text := q.URL.Query().Get("top")
	if text == "" {
		return usual, true
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > most {
		bad(w, "top: %q: a number from 1 to %d", text, most)
		return 0, false
	}
	return n, true
}

// word reads one of the words that choices has.
func word[T any](w http.ResponseWriter, q *http.Request, name, usual string, choices map[string]T) (choice T, word string, ok bool) {
	if word = q.URL.Query().Get(name); word == "" {
		word = usual
	}
	if choice, ok = choices[word]; !ok {
		bad(w, "%s: %q: %s", name, word, oneOf(choices))
	}
	return choice, word, ok
}

// named finds the limit that a request names.
func (a *api) named(w http.ResponseWriter, q *http.Request) (*shaper.Policy, int) {
	p, name := a.Shaper.Policy(), q.PathValue("limit")
	for i := range p.Len() {
		if p.Limit(i).Name == name {
			return p, i
		}
	}
	answer(w, http.StatusNotFound, Error{fmt.Sprintf("there is no limit %q", name)})
	return p, -1
}

//go:embed openapi.json
var openAPI []byte

func getOpenAPI(w http.ResponseWriter, _ *http.Request) {
	header(w, "application/json")
	_, _ = w.Write(openAPI)
}

func (a *api) getLimit(w http.ResponseWriter, q *http.Request) {
	if p, i := a.named(w, q); i >= 0 {
		answer(w, http.StatusOK, a.limit(p, i))
	}
}

func (a *api) getKeys(w http.ResponseWriter, q *http.Request) {
	p, i := a.named(w, q)
	if i < 0 {
		return
	}
	by, _, ok := word(w, q, "sort", "delayed", traits)
	if !ok {
		return
	}
	if n, ok := top(w, q, 20, shaper.TopSize); ok {
		answer(w, http.StatusOK, a.keys(p, i, by, n))
	}
}

func (a *api) getWho(w http.ResponseWriter, q *http.Request) {
	_, kind, ok := word(w, q, "by", "source", map[string]bool{"source": true, "prefix": true, "asn": true})
	if !ok {
		return
	}
	by, _, ok := word(w, q, "sort", "delayed", traits)
	if !ok {
		return
	}
	if n, ok := top(w, q, 20, shaper.TopSize); ok {
		answer(w, http.StatusOK, a.who(kind, by, n))
	}
}

func (a *api) getConnections(w http.ResponseWriter, q *http.Request) {
	values := q.URL.Query()
	ask := asked{listener: values.Get("listener"), limit: values.Get("limit")}
	var ok bool
	if _, ask.sort, ok = word(w, q, "sort", "bytes", orders); !ok {
		return
	}
	if ask.top, ok = top(w, q, 100, 10000); !ok {
		return
	}
	if text := values.Get("source"); text != "" {
		var err error
		if ask.source, err = ParsePrefix(text); err != nil {
			bad(w, "source: %v", err)
			return
		}
	}
	answer(w, http.StatusOK, a.connections(ask))
}

// ParsePrefix reads a prefix, or an address, which is one of all its bits.
func ParsePrefix(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil || p.Addr().Is4In6() {
		return p, fmt.Errorf("%q is no prefix such as 192.0.2.0/24 or 2001:db8::/48, and no address", s)
	}
	return p.Masked(), nil
}

func (a *api) getExplain(w http.ResponseWriter, q *http.Request) {
	v := q.URL.Query()
	e, err := a.Daemon.Explain(Question{Source: v.Get("source"), To: v.Get("to"), Attach: v.Get("attach"), Destination: v.Get("destination")})
	if !failed(w, err) {
		answer(w, http.StatusOK, e)
	}
}

// since reads after which event somebody asks.
func since(w http.ResponseWriter, q *http.Request, text string) (uint64, bool) {
	if text == "" {
		return 0, true
	}
	id, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		bad(w, "since: %q: the ID of an event", text)
	}
	return id, err == nil
}

func (a *api) getEvents(w http.ResponseWriter, q *http.Request) {
	if id, ok := since(w, q, q.URL.Query().Get("since")); ok {
		answer(w, http.StatusOK, a.Events.Since(id))
	}
}

func (a *api) setLimit(w http.ResponseWriter, q *http.Request) {
	var s SetLimit
	if !body(w, q, &s) {
		return
	}
	if _, ok := lasting(w, s.For); !ok {
		return
	}
	if len(s.Set) == 0 {
		bad(w, "set: nothing is set")
		return
	}
	if _, i := a.named(w, q); i < 0 || failed(w, a.Daemon.SetLimit(q.Context(), q.PathValue("limit"), s)) {
		return
	}
	a.getLimit(w, q)
}

func (a *api) unsetLimit(w http.ResponseWriter, q *http.Request) {
	if _, i := a.named(w, q); i < 0 || failed(w, a.Daemon.UnsetLimit(q.Context(), q.PathValue("limit"))) {
		return
	}
	a.getLimit(w, q)
}

func (a *api) block(w http.ResponseWriter, q *http.Request) {
	var s SetBlock
	if !body(w, q, &s) {
		return
	}
	d, ok := lasting(w, s.For)
	if !ok {
		return
	}
	p, err := ParsePrefix(s.Prefix)
	if err != nil {
		bad(w, "prefix: %v", err)
		return
	}
	if !failed(w, a.Daemon.Block(q.Context(), p, d)) {
		answer(w, http.StatusOK, a.view.status().Blocks)
	}
}

func (a *api) unblock(w http.ResponseWriter, q *http.Request) {
	p, err := ParsePrefix(q.URL.Query().Get("prefix"))
	if err != nil {
		bad(w, "prefix: %v", err)
		return
	}
	if !failed(w, a.Daemon.Unblock(q.Context(), p)) {
		answer(w, http.StatusOK, a.view.status().Blocks)
	}
}

func (a *api) bypass(w http.ResponseWriter, q *http.Request) {
	var s SetBypass
	if !body(w, q, &s) {
		return
	}
	d, ok := lasting(w, s.For)
	if ok && !failed(w, a.Daemon.Bypass(q.Context(), s.On, d)) {
		answer(w, http.StatusOK, a.status())
	}
}

func (a *api) kill(w http.ResponseWriter, q *http.Request) {
	id, err := strconv.ParseUint(q.PathValue("id"), 10, 64)
	if err != nil {
		bad(w, "%q is not the ID of a connection", q.PathValue("id"))
		return
	}
	if !a.Proxy.Kill(id) {
		answer(w, http.StatusNotFound, Error{fmt.Sprintf("there is no connection %d", id)})
		return
	}
	a.Log.Warn("connection killed by an operator", "id", id)
	answer(w, http.StatusOK, struct{}{})
}

func (a *api) setDownstream(w http.ResponseWriter, q *http.Request) {
	var s SetDownstream
	if !body(w, q, &s) {
		return
	}
	if a.Proxy.DrainDownstream(s.Listener, s.Downstream, s.Drained) == 0 {
		answer(w, http.StatusNotFound, Error{fmt.Sprintf("there is no downstream %q", s.Downstream)})
		return
	}
	a.Log.Warn("downstream set by an operator", "listener", s.Listener, "downstream", s.Downstream, "drained", s.Drained)
	answer(w, http.StatusOK, a.downstreams())
}

func (a *api) reload(w http.ResponseWriter, q *http.Request) {
	err := a.Daemon.Reload(q.Context())
	if errors.Is(err, ErrRefused) {
		answer(w, http.StatusUnprocessableEntity, a.Reloads.Status())
		return
	}
	if !failed(w, err) {
		answer(w, http.StatusOK, a.Reloads.Status())
	}
}

func (a *api) drain(w http.ResponseWriter, q *http.Request) {
	a.Daemon.Drain()
	answer(w, http.StatusOK, a.status())
}
