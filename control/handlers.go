package control

import (
	_ "embed"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"shaperd/shaper"
)

// named finds the limit that a request names.
func (a *api) named(w http.ResponseWriter, q *http.Request) (*shaper.Policy, int) {
	p, name := a.Shaper.Policy(), q.PathValue("limit")
	i := p.Find(name)
	if i < 0 {
		answer(w, http.StatusNotFound, Error{fmt.Sprintf("there is no limit %q", name)})
	}
	return p, i
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
	p := a.Shaper.Policy()
	switch {
	case ask.limit != "" && p.Find(ask.limit) < 0:
		answer(w, http.StatusNotFound, Error{fmt.Sprintf("there is no limit %q", ask.limit)})
		return
	case ask.listener != "" && !slices.ContainsFunc(p.Listeners(), func(l *shaper.ListenerState) bool { return l.Name == ask.listener }):
		answer(w, http.StatusNotFound, Error{fmt.Sprintf("there is no listener %q", ask.listener)})
		return
	}
	answer(w, http.StatusOK, a.connections(ask))
}

// ParsePrefix reads a prefix, or an address, which is one of all its bits. What may be meant
// otherwise is refused: a prefix with bits behind its length, and a zone, which would not count.
func ParsePrefix(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		if a.Zone() != "" {
			return netip.Prefix{}, fmt.Errorf("%q: zones are not told apart: write %v", s, a.WithZone(""))
		}
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	switch {
	case err != nil:
		return p, fmt.Errorf("%q is no prefix or address, such as 192.0.2.0/24 or 2001:db8::7", s)
	case p.Addr().Is4In6():
		return p, fmt.Errorf("%s: write it as IPv4", s)
	case p != p.Masked():
		return p, fmt.Errorf("%s has bits behind its length: write %v, or the address alone", s, p.Masked())
	}
	return p, nil
}

func (a *api) getExplain(w http.ResponseWriter, q *http.Request) {
	v := q.URL.Query()
	e, err := a.Daemon.Explain(Question{Source: v.Get("source"), To: v.Get("to"), Listener: v.Get("listener"), Attach: v.Get("attach"), Destination: v.Get("destination")})
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
	d, ok := lasting(w, s.For)
	if !ok {
		return
	}
	switch {
	case len(s.Set) == 0:
		bad(w, "set: nothing is set")
		return
	case d > 0 && s.UntilReload:
		bad(w, "for, until_reload: one of them")
		return
	}
	if _, i := a.named(w, q); i < 0 || failed(w, a.Daemon.SetLimit(q.Context(), q.PathValue("limit"), s.Set, d, s.UntilReload)) {
		return
	}
	a.getLimit(w, q)
}

func (a *api) unsetLimit(w http.ResponseWriter, q *http.Request) {
	keys := strings.FieldsFunc(q.URL.Query().Get("keys"), func(r rune) bool { return r == ',' })
	if _, i := a.named(w, q); i < 0 || failed(w, a.Daemon.UnsetLimit(q.Context(), q.PathValue("limit"), keys)) {
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
		answer(w, http.StatusOK, a.blocks())
	}
}

func (a *api) unblock(w http.ResponseWriter, q *http.Request) {
	p, err := ParsePrefix(q.URL.Query().Get("prefix"))
	if err != nil {
		bad(w, "prefix: %v", err)
		return
	}
	if !failed(w, a.Daemon.Unblock(q.Context(), p)) {
		answer(w, http.StatusOK, a.blocks())
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
	attrs := append([]any{"id", id}, Asker(q.Context())...)
	a.Proxy.Connections(func(c *shaper.ConnectionStatus) {
		if c.ID == id {
			attrs = append(attrs, "source", c.Source, "listener", c.Listen)
		}
	})
	if !a.Proxy.Kill(id) {
		answer(w, http.StatusNotFound, Error{fmt.Sprintf("there is no connection %d", id)})
		return
	}
	a.Log.Warn("connection killed by an operator", attrs...)
	answer(w, http.StatusOK, struct{}{})
}

func (a *api) setDownstream(w http.ResponseWriter, q *http.Request) {
	var s SetDownstream
	if !body(w, q, &s) {
		return
	}
	if !failed(w, a.Daemon.DrainDownstream(q.Context(), s.Listener, s.Downstream, s.Drained)) {
		answer(w, http.StatusOK, a.downstreams())
	}
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
	a.Daemon.Drain(q.Context())
	answer(w, http.StatusOK, a.status())
}
