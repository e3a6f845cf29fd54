package peer

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/net/netutil"

	"shaperd.dev/shaperd/cluster"
)

// Server serves a ledger. Its methods are safe for concurrent use.
type Server struct {
	clock func() cluster.Time
	http  http.Server
	ended chan struct{}

	mu     sync.Mutex
	ledger cluster.Ledger
	files  Files
}

// ServerOptions are the settings of a server.
type ServerOptions struct {
	Address string // host:port
	Files   Files
	Hosts   int                 // of the group
	Clock   func() cluster.Time // of the ledger: CLOCK_BOOTTIME
	Log     *slog.Logger        // receives failed handshakes and calls
}

// Bounds of what a client can occupy.
const (
	maxBody     = 1 << 20
	readTimeout = 5 * time.Second
	idleTimeout = time.Minute
)

// Serve begins to serve a ledger that knows nothing yet. It fails if the address is not available or
// a file cannot be used.
func Serve(o ServerOptions) (*Server, error) {
	if _, err := o.Files.certificate(); err != nil {
		return nil, fmt.Errorf("serve the ledger at %s: %w", o.Address, err)
	}
	if _, err := o.Files.authorities(); err != nil {
		return nil, fmt.Errorf("serve the ledger at %s: %w", o.Address, err)
	}
	l, err := net.Listen("tcp", o.Address)
	if err != nil {
		return nil, fmt.Errorf("serve the ledger at %s: %w", o.Address, err)
	}
	s := &Server{clock: o.Clock, ended: make(chan struct{}), ledger: cluster.Ledger{Run: rand.Text()}, files: o.Files}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/call", handle(s.call))
	mux.HandleFunc("POST /v1/snapshot", handle(s.snapshot))
	mux.HandleFunc("POST /v1/forget", handle(s.forget))
	s.http = http.Server{
		Handler: mux, ReadTimeout: readTimeout, WriteTimeout: readTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: 8 << 10,
		ErrorLog: slog.NewLogLogger(o.Log.Handler(), slog.LevelWarn), TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){},
	}
	// A host has one connection, and while it connects anew another one; operators have some more.
	limited := netutil.LimitListener(l, 4*o.Hosts+16)
	go func() {
		defer close(s.ended)
		_ = s.http.Serve(tls.NewListener(limited, s.tlsConfig())) // ends with Close
	}()
	return s, nil
}

// Close ends all connections. Calls in this process still work.
func (s *Server) Close() {
	_ = s.http.Close() // its error is that of closing the listener
	<-s.ended
}

// SetFiles replaces the files that the next handshakes use.
func (s *Server) SetFiles(f Files) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.files = f
}

// tlsConfig returns the configuration of connections to s.
func (s *Server) tlsConfig() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			s.mu.Lock()
			files := s.files
			s.mu.Unlock()
			return files.server()
		},
	}
}

// errForbidden is the error of a caller that a certificate does not name.
var errForbidden = errors.New("the certificate of the caller does not name this host")

// handle returns a handler of requests in JSON.
func handle[Q, R any](f func(*http.Request, *Q) (R, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var q Q
		var reply R
		err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(&q)
		status := http.StatusBadRequest
		if err == nil {
			reply, err = f(r, &q)
		}
		if errors.Is(err, errForbidden) {
			status = http.StatusForbidden
		}
		if err != nil {
			http.Error(w, err.Error(), status)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(reply) // the client is gone
	}
}

func (s *Server) call(r *http.Request, q *cluster.Request) (*cluster.Reply, error) {
	if err := q.Validate(); err != nil {
		return nil, err
	}
	if c := r.TLS.PeerCertificates[0]; !speaksFor(c, q.Host) {
		return nil, fmt.Errorf("%w: %q, but %q %q", errForbidden, q.Host, c.Subject.CommonName, c.DNSNames)
	}
	return s.Call(r.Context(), q)
}

type snapshotRequest struct{ Keys []string }

func (s *Server) snapshot(r *http.Request, q *snapshotRequest) (cluster.Snapshot, error) {
	return s.Snapshot(r.Context(), q.Keys...)
}

type forgetRequest struct{ Host string }

func (s *Server) forget(r *http.Request, q *forgetRequest) (bool, error) {
	return s.Forget(r.Context(), q.Host)
}

// Call is a call of a host in this process. It never fails.
func (s *Server) Call(_ context.Context, q *cluster.Request) (*cluster.Reply, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ledger.Call(s.clock(), q), nil
}

// Snapshot is [cluster.Ledger.Snapshot]. It never fails.
func (s *Server) Snapshot(_ context.Context, keys ...string) (cluster.Snapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ledger.Snapshot(s.clock(), keys...), nil
}

// Forget is [cluster.Ledger.Forget]. It never fails.
func (s *Server) Forget(_ context.Context, host string) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ledger.Forget(s.clock(), host), nil
}
