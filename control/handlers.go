package control

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/topk"
)

// findLimit returns the limit that a request names, or writes an error and returns -1.
func (a *handlers) findLimit(w http.ResponseWriter, q *http.Request) (*shaper.Policy, int) {
	p, name := a.Shaper.Policy(), q.PathValue("limit")
	i := p.Find(name)
	if i < 0 {
		writeJSON(w, http.StatusNotFound, api.Error{Message: fmt.Sprintf("unknown limit %q", name)})
	}
	return p, i
}

func getOpenAPI(w http.ResponseWriter, _ *http.Request) {
	setHeaders(w, "application/json")
	_, _ = w.Write(api.OpenAPI)
}

func (a *handlers) getLimit(w http.ResponseWriter, q *http.Request) {
	if p, i := a.findLimit(w, q); i >= 0 {
		l := a.limit(p, i)
		l.Shared = a.limitShares()[l.Name]
		writeJSON(w, http.StatusOK, l)
	}
}

func (a *handlers) getKeys(w http.ResponseWriter, q *http.Request) {
	p, i := a.findLimit(w, q)
	if i < 0 {
		return
	}
	sort, _, ok := enumParam(w, q, "sort", "delayed", sortKeys)
	if !ok {
		return
	}
	if n, ok := topParam(w, q, 20, topk.Size); ok {
		writeJSON(w, http.StatusOK, a.keys(p, i, sort, n))
	}
}

func (a *handlers) getQuotas(w http.ResponseWriter, q *http.Request) {
	if n, ok := topParam(w, q, 100, 10_000); ok {
		writeJSON(w, http.StatusOK, a.quotas(q.URL.Query().Get("limit"), n))
	}
}

func (a *handlers) getTalkers(w http.ResponseWriter, q *http.Request) {
	_, by, ok := enumParam(w, q, "by", "source", map[string]bool{"source": true, "prefix": true, "asn": true})
	if !ok {
		return
	}
	sort, _, ok := enumParam(w, q, "sort", "delayed", sortKeys)
	if !ok {
		return
	}
	if n, ok := topParam(w, q, 20, topk.Size); ok {
		writeJSON(w, http.StatusOK, a.talkers(by, sort, n))
	}
}

func (a *handlers) getConnections(w http.ResponseWriter, q *http.Request) {
	values := q.URL.Query()
	filter := connectionFilter{listener: values.Get("listener"), limit: values.Get("limit")}
	var ok bool
	if _, filter.sort, ok = enumParam(w, q, "sort", "bytes", connectionOrders); !ok {
		return
	}
	if filter.top, ok = topParam(w, q, 100, 10000); !ok {
		return
	}
	if text := values.Get("source"); text != "" {
		var err error
		if filter.source, err = shaper.ParsePrefix(text); err != nil {
			badRequest(w, "source: %q %v", text, err)
			return
		}
	}
	p := a.Shaper.Policy()
	switch {
	case filter.limit != "" && p.Find(filter.limit) < 0:
		writeJSON(w, http.StatusNotFound, api.Error{Message: fmt.Sprintf("unknown limit %q", filter.limit)})
		return
	case filter.listener != "" && !slices.ContainsFunc(p.Listeners(), func(l *shaper.ListenerState) bool { return l.Name == filter.listener }):
		writeJSON(w, http.StatusNotFound, api.Error{Message: fmt.Sprintf("unknown listener %q", filter.listener)})
		return
	}
	writeJSON(w, http.StatusOK, a.connections(filter))
}

func (a *handlers) getExplain(w http.ResponseWriter, q *http.Request) {
	v := q.URL.Query()
	e, err := a.Daemon.Explain(ExplainRequest{Source: v.Get("source"), To: v.Get("to"), Listener: v.Get("listener"), Attach: v.Get("attach"), Destination: v.Get("destination"), DSCP: v.Get("dscp"), Mark: v.Get("mark"), Downstream: v.Get("downstream"), TLV: v.Get("tlv"), Cgroup: v.Get("cgroup")})
	if !writeError(w, err) {
		a.addShares(&e)
		writeJSON(w, http.StatusOK, e)
	}
}

// eventID parses an event ID; "" is 0.
func eventID(w http.ResponseWriter, q *http.Request, text string) (uint64, bool) {
	if text == "" {
		return 0, true
	}
	id, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		badRequest(w, "since: invalid event ID %q", text)
	}
	return id, err == nil
}

func (a *handlers) getEvents(w http.ResponseWriter, q *http.Request) {
	id, ok := eventID(w, q, q.URL.Query().Get("since"))
	if !ok {
		return
	}
	events := a.Events.Since(id)
	if kind := q.URL.Query().Get("kind"); kind != "" {
		events = slices.DeleteFunc(events, func(e api.Event) bool { return e.Attrs["kind"] != kind })
	}
	writeJSON(w, http.StatusOK, events)
}

func (a *handlers) setLimit(w http.ResponseWriter, q *http.Request) {
	var s api.SetLimit
	if !readBody(w, q, &s) {
		return
	}
	d, ok := durationOf(w, s.Duration)
	if !ok {
		return
	}
	switch {
	case len(s.Set) == 0:
		badRequest(w, "set: must not be empty")
		return
	case d > 0 && s.UntilReload:
		badRequest(w, "duration_seconds and until_reload are mutually exclusive")
		return
	}
	sources, ok := sourcesOf(w, s.Source)
	if !ok {
		return
	}
	if _, i := a.findLimit(w, q); i < 0 || writeError(w, a.Daemon.SetLimit(q.Context(), q.PathValue("limit"), sources, s.Set, d, s.UntilReload)) {
		return
	}
	a.getLimit(w, q)
}

// sourcesOf parses the sources of an override; "" is all of them, an invalid prefix.
func sourcesOf(w http.ResponseWriter, text string) (p netip.Prefix, ok bool) {
	if text == "" {
		return p, true
	}
	p, err := shaper.ParsePrefix(text)
	if err != nil {
		badRequest(w, "source: %q %v", text, err)
	}
	return p, err == nil
}

func (a *handlers) unsetLimit(w http.ResponseWriter, q *http.Request) {
	keys := strings.FieldsFunc(q.URL.Query().Get("keys"), func(r rune) bool { return r == ',' })
	sources, ok := sourcesOf(w, q.URL.Query().Get("source"))
	if !ok {
		return
	}
	if _, i := a.findLimit(w, q); i < 0 || writeError(w, a.Daemon.UnsetLimit(q.Context(), q.PathValue("limit"), sources, keys)) {
		return
	}
	a.getLimit(w, q)
}

// reset returns a handler that calls forget for a limit, or a source of it.
func (a *handlers) reset(forget func(d Daemon, ctx context.Context, limit string, source netip.Addr) error) http.HandlerFunc {
	return func(w http.ResponseWriter, q *http.Request) {
		var source netip.Addr
		if text := q.URL.Query().Get("source"); text != "" {
			var err error
			if source, err = netip.ParseAddr(text); err != nil || source.Zone() != "" {
				badRequest(w, "source: %q is not an address", text)
				return
			}
		}
		if _, i := a.findLimit(w, q); i < 0 || writeError(w, forget(a.Daemon, q.Context(), q.PathValue("limit"), source.Unmap())) {
			return
		}
		a.getLimit(w, q)
	}
}

func (a *handlers) block(w http.ResponseWriter, q *http.Request) {
	var s api.SetBlock
	if !readBody(w, q, &s) {
		return
	}
	d, ok := durationOf(w, s.Duration)
	if !ok {
		return
	}
	p, err := shaper.ParsePrefix(s.Prefix)
	if err != nil {
		badRequest(w, "prefix: %q %v", s.Prefix, err)
		return
	}
	if !writeError(w, a.Daemon.Block(q.Context(), p, d)) {
		writeJSON(w, http.StatusOK, a.blocks())
	}
}

func (a *handlers) unblock(w http.ResponseWriter, q *http.Request) {
	text := q.URL.Query().Get("prefix")
	p, err := shaper.ParsePrefix(text)
	if err != nil {
		badRequest(w, "prefix: %q %v", text, err)
		return
	}
	if !writeError(w, a.Daemon.Unblock(q.Context(), p)) {
		writeJSON(w, http.StatusOK, a.blocks())
	}
}

// changeBlocks changes many blocks at once. An error names the first prefix that is invalid by its index.
func (a *handlers) changeBlocks(w http.ResponseWriter, q *http.Request) {
	var s api.ChangeBlocks
	if !readBody(w, q, &s) {
		return
	}
	d, ok := durationOf(w, s.Duration)
	if !ok {
		return
	}
	var prefixes [2][]netip.Prefix
	for i, list := range []struct {
		key   string
		texts []string
	}{{"block", s.Block}, {"unblock", s.Unblock}} {
		for n, text := range list.texts {
			p, err := shaper.ParsePrefix(text)
			if err != nil {
				badRequest(w, "%s[%d]: %q %v", list.key, n, text, err)
				return
			}
			prefixes[i] = append(prefixes[i], p)
		}
	}
	changes, err := a.Daemon.ChangeBlocks(q.Context(), prefixes[0], prefixes[1], d, s.KeepPermanent)
	if !writeError(w, err) {
		writeJSON(w, http.StatusOK, changes)
	}
}

func (a *handlers) endPenalty(w http.ResponseWriter, q *http.Request) {
	text := q.URL.Query().Get("source")
	p, err := shaper.ParsePrefix(text)
	if err != nil {
		badRequest(w, "source: %q %v", text, err)
		return
	}
	if !writeError(w, a.Daemon.EndPenalty(q.Context(), q.URL.Query().Get("limit"), p)) {
		writeJSON(w, http.StatusOK, a.penalties())
	}
}

func (a *handlers) bypass(w http.ResponseWriter, q *http.Request) {
	var s api.SetBypass
	if !readBody(w, q, &s) {
		return
	}
	d, ok := durationOf(w, s.Duration)
	if ok && !writeError(w, a.Daemon.Bypass(q.Context(), s.On, d)) {
		writeJSON(w, http.StatusOK, a.status())
	}
}

func (a *handlers) kill(w http.ResponseWriter, q *http.Request) {
	id, err := strconv.ParseUint(q.PathValue("id"), 10, 64)
	if err != nil {
		badRequest(w, "invalid connection ID %q", q.PathValue("id"))
		return
	}
	attrs := append([]any{"id", id}, CallerAttrs(q.Context())...)
	a.Proxy.Connections(func(c *shaper.ConnectionStatus) {
		if c.ID == id {
			attrs = append(attrs, "source", c.Source, "listener", c.Listen)
		}
	})
	if !a.Proxy.Kill(id) {
		writeJSON(w, http.StatusNotFound, api.Error{Message: fmt.Sprintf("unknown connection %d", id)})
		return
	}
	a.Log.Warn("connection killed by operator", attrs...)
	writeJSON(w, http.StatusOK, struct{}{})
}

func (a *handlers) setDownstream(w http.ResponseWriter, q *http.Request) {
	var s api.SetDownstream
	if !readBody(w, q, &s) {
		return
	}
	if !writeError(w, a.Daemon.DrainDownstream(q.Context(), s.Listener, s.Downstream, s.Drained)) {
		writeJSON(w, http.StatusOK, a.downstreams())
	}
}

func (a *handlers) setListener(w http.ResponseWriter, q *http.Request) {
	var s api.SetListener
	if !readBody(w, q, &s) {
		return
	}
	d, ok := durationOf(w, s.Duration)
	switch {
	case !ok:
		return
	case !s.Held && (d > 0 || s.EndIdle):
		badRequest(w, "held: false takes no duration_seconds and no end_idle")
		return
	case s.Held && d == 0:
		d = shaper.Forever
	}
	ended, err := a.Daemon.HoldListener(q.Context(), s.Listener, d, s.EndIdle)
	if writeError(w, err) {
		return
	}
	held := api.HeldListener{Ended: ended}
	held.Waiting, held.Hold = a.hold(s.Listener)
	writeJSON(w, http.StatusOK, held)
}

func (a *handlers) forgetHost(w http.ResponseWriter, q *http.Request) {
	if !writeError(w, a.Daemon.ForgetHost(q.Context(), q.PathValue("host"))) {
		writeJSON(w, http.StatusOK, a.shared())
	}
}

func (a *handlers) reload(w http.ResponseWriter, q *http.Request) {
	err := a.Daemon.Reload(q.Context())
	if errors.Is(err, ErrRefused) {
		writeJSON(w, http.StatusUnprocessableEntity, a.Reloads.Status())
		return
	}
	if !writeError(w, err) {
		writeJSON(w, http.StatusOK, a.Reloads.Status())
	}
}

func (a *handlers) getRevisions(w http.ResponseWriter, q *http.Request) {
	all, err := a.Daemon.Revisions(q.Context())
	if !writeError(w, err) {
		writeJSON(w, http.StatusOK, all)
	}
}

func (a *handlers) rollback(w http.ResponseWriter, q *http.Request) {
	var r api.SetRevision
	if readBody(w, q, &r) && !writeError(w, a.Daemon.Rollback(q.Context(), r.Revision)) {
		writeJSON(w, http.StatusOK, a.status())
	}
}

func (a *handlers) stop(w http.ResponseWriter, q *http.Request) {
	a.Daemon.Stop(q.Context())
	writeJSON(w, http.StatusOK, a.status())
}
