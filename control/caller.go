package control

import (
	"context"
	"net/http"
	"strconv"

	"shaperd.dev/shaperd/api"
)

// caller is the process that sent a request, for the audit log.
type caller struct {
	uid   uint32
	pid   int32
	login string // user ID of the login session, which sudo does not change; "" if unknown
}

// callerKey is the context key of the caller of a request.
type callerKey struct{}

// withCaller returns q with its caller p in its context.
func withCaller(q *http.Request, p *peer) *http.Request {
	a := caller{p.uid, p.pid, api.LoginUser(strconv.Itoa(int(p.pid)))}
	if a.login == "" && a.uid == 0 {
		if n, err := strconv.ParseUint(q.Header.Get(api.LoginHeader), 10, 32); err == nil {
			a.login = strconv.FormatUint(n, 10)
		}
	}
	return q.WithContext(context.WithValue(q.Context(), callerKey{}, a))
}

// CallerAttrs returns the caller of the request of ctx as log attributes; none outside a
// request over the control socket.
func CallerAttrs(ctx context.Context) (attrs []any) {
	a, ok := ctx.Value(callerKey{}).(caller)
	if !ok {
		return nil
	}
	attrs = []any{"uid", a.uid, "pid", a.pid}
	if a.login != "" {
		attrs = append(attrs, "login", a.login)
	}
	return attrs
}
