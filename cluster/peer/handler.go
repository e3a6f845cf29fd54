package peer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"golang.org/x/time/rate"

	"shaperd.dev/shaperd/cluster"
)

// Operations, the last part of a path.
const (
	opCall     = "call"
	opSnapshot = "snapshot"
	opForget   = "forget"
	opPing     = "ping"
)

// protocolVersion is the first part of a path. It is raised when a field changes its meaning.
const protocolVersion = "v1"

func path(group, op string) string { return "/" + protocolVersion + "/" + group + "/" + op }

type (
	snapshotRequest struct{ Keys []string }
	forgetRequest   struct{ Host string }
	pingRequest     struct{ Host string } // that asks
)

// sinceKey is the context key of the time at which the connection of a request was accepted.
type sinceKey struct{}

// handler returns the handler of requests.
func (s *Server) handler(log *refusalLog) http.Handler {
	mux := http.NewServeMux()
	add := func(op string, handle func(http.ResponseWriter, *http.Request) error) {
		mux.HandleFunc("POST "+path("{group}", op), func(w http.ResponseWriter, r *http.Request) {
			if since, _ := r.Context().Value(sinceKey{}).(time.Time); time.Since(since) >= s.age {
				w.Header().Set("Connection", "close")
			}
			if err := handle(w, r); err != nil {
				log.warn(r.RemoteAddr, err.Error())
				if errors.Is(err, errForbidden) { // the next connection may have another certificate
					w.Header().Set("Connection", "close")
				}
				http.Error(w, err.Error(), statusOf(err))
			}
		})
	}
	add(opCall, handle(s, func(ctx context.Context, l local, q *cluster.Request) (*cluster.Reply, error) {
		return l.Call(ctx, q)
	}, func(q *cluster.Request) string { return q.Host }))
	add(opPing, handle(s, func(ctx context.Context, l local, q *pingRequest) (struct{}, error) {
		return struct{}{}, l.Ping(ctx, q.Host)
	}, func(q *pingRequest) string { return q.Host }))
	add(opSnapshot, handle(s, func(ctx context.Context, l local, q *snapshotRequest) (cluster.Snapshot, error) {
		return l.Snapshot(ctx, q.Keys...)
	}, nil))
	add(opForget, handle(s, func(ctx context.Context, l local, q *forgetRequest) (bool, error) {
		return l.Forget(ctx, q.Host)
	}, nil))
	return mux
}

// handle returns a handler that decodes a request, asks the ledger of its group, and encodes the reply.
// caller, unless nil, returns the name of the host that a request says it is from.
func handle[Q, R any](s *Server, ask func(context.Context, local, *Q) (R, error), caller func(*Q) string) func(http.ResponseWriter, *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		q := new(Q)
		decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(q); err != nil {
			return fmt.Errorf("decode the request: %w", err)
		}
		if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
			return errors.New("decode the request: something follows it")
		}
		if caller != nil {
			host := caller(q)
			if c := r.TLS.PeerCertificates[0]; !names(c, host) {
				return fmt.Errorf("host %.80q, with a certificate for %.200q: %w", host, c.DNSNames, errForbidden)
			}
		}
		group := r.PathValue("group")
		if len(group) > cluster.MaxName {
			return fmt.Errorf("group %.80q: must have at most %d characters", group, cluster.MaxName)
		}
		reply, err := ask(r.Context(), local{s, group}, q)
		if err != nil {
			return err
		}
		text, err := json.Marshal(reply)
		if err != nil {
			return fmt.Errorf("encode the reply: %w", err)
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(text) // an error is that the client is gone
		return nil
	}
}

func statusOf(err error) int {
	var tooLarge *http.MaxBytesError
	switch {
	case errors.Is(err, errForbidden):
		return http.StatusForbidden
	case errors.Is(err, errClosed):
		return http.StatusServiceUnavailable
	case errors.As(err, &tooLarge):
		return http.StatusRequestEntityTooLarge
	}
	return http.StatusBadRequest
}

// refusalLog logs why clients are refused, at most every ten seconds on average: a host tries again at once.
type refusalLog struct {
	log     *slog.Logger
	limiter *rate.Limiter
}

const maxReason = 300 // bytes: names in a certificate may be long

func (l *refusalLog) warn(from, reason string) {
	if l.limiter.Allow() {
		l.log.Warn("refused a call to the ledger of shared limits", "from", from, "reason", reason[:min(len(reason), maxReason)])
	}
}

// Write takes what net/http logs: handshakes that have failed.
func (l *refusalLog) Write(text []byte) (int, error) {
	reason := strings.TrimSuffix(string(text), "\n")
	from, why, found := strings.Cut(strings.TrimPrefix(reason, "http: TLS handshake error from "), ": ")
	switch {
	case !found:
		l.warn("", reason)
	case why != "EOF": // a port scan
		l.warn(from, why)
	}
	return len(text), nil
}
