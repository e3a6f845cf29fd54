package peer

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"shaperd.dev/shaperd/cluster"
)

// Server serves ledgers. Its methods are safe for concurrent use.
type Server struct {
	bounds
	clock    func() cluster.Time
	listener *listener
	http     http.Server
	serving  sync.WaitGroup // the accept loop and the connections

	mu     sync.Mutex
	groups map[string]*served // by name: those whose hosts have called
	files  Files
	closed bool
}

// served is the ledger of a group.
type served struct {
	cluster.Ledger
	idleAt cluster.Time // from then on it has nothing that was not given up: there was no call for an expiry
}

// ServerOptions are the settings of a server.
type ServerOptions struct {
	Address string // host:port
	Files   Files
	Hosts   int                 // that may exist, of all groups
	Clock   func() cluster.Time // of the ledgers: CLOCK_BOOTTIME
	Log     *slog.Logger        // receives failed handshakes, and calls that are refused
}

// bounds are the bounds of what clients can occupy.
type bounds struct {
	timeout   time.Duration // for a handshake, for a request to arrive, and for a reply to be taken
	idle      time.Duration // without request
	age       time.Duration // of a connection, at whose next request it ends
	strangers int           // connections of clients that have not shown a certificate
}

const (
	idleTimeout = time.Minute // more than the interval between calls
	maxBody     = 1 << 20     // bytes of a request, of which a valid one has less than half
	maxHeader   = 8 << 10     // bytes
	maxGroups   = 16
)

var defaultBounds = bounds{timeout: 5 * time.Second, idle: idleTimeout, age: 10 * time.Minute, strangers: 256}

// Serve begins to serve ledgers that know nothing. It fails if the address is not available or a file
// cannot be used.
func Serve(o ServerOptions) (*Server, error) { return serve(o, defaultBounds) }

func serve(o ServerOptions, b bounds) (*Server, error) {
	if _, err := o.Files.server(); err != nil {
		return nil, fmt.Errorf("serve the ledger at %s: %w", o.Address, err)
	}
	inner, err := net.Listen("tcp", o.Address)
	if err != nil {
		return nil, fmt.Errorf("serve the ledger at %s: %w", o.Address, err)
	}
	s := &Server{bounds: b, clock: o.Clock, groups: map[string]*served{}, files: o.Files}
	// A host has one connection, or two while it connects anew.
	s.listener = &listener{Listener: inner, maxStrangers: b.strangers, maxHosts: 2*o.Hosts + 16}
	refusals := &refusalLog{log: o.Log, limiter: rate.NewLimiter(rate.Every(10*time.Second), 10)}
	s.http = http.Server{
		Handler:     s.handler(refusals),
		ReadTimeout: b.timeout, WriteTimeout: b.timeout, IdleTimeout: b.idle, MaxHeaderBytes: maxHeader,
		Protocols: new(http.Protocols),
		ErrorLog:  log.New(refusals, "", 0),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, sinceKey{}, connOf(c).since)
		},
		ConnState: func(c net.Conn, state http.ConnState) {
			switch state {
			case http.StateNew:
				s.serving.Add(1)
			case http.StateClosed:
				s.serving.Done()
			}
			s.listener.setState(connOf(c), state)
		},
	}
	s.http.Protocols.SetHTTP1(true)
	s.serving.Go(func() { _ = s.http.Serve(tls.NewListener(s.listener, s.tlsConfig())) }) // ends with Close
	return s, nil
}

// Close ends all connections, and returns when nothing is answered any more, in this process neither.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	_ = s.http.Close() // its error is that of closing the listener
	s.serving.Wait()
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

// Errors of requests, besides those of their content.
var (
	errClosed    = errors.New("the server is closed")
	errForbidden = errors.New("the certificate does not name this host")
	errGroups    = fmt.Errorf("%d other groups use this server", maxGroups)
)

// with calls f with the ledger of a group, and the time. That of a group whose hosts have not called knows
// nothing, and is not kept.
func (s *Server) with(group string, f func(*served, cluster.Time)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errClosed
	}
	now := s.clock()
	l := s.groups[group]
	if l == nil {
		if len(s.groups) == maxGroups {
			maps.DeleteFunc(s.groups, func(_ string, l *served) bool { return now >= l.idleAt })
		}
		if len(s.groups) == maxGroups {
			return errGroups
		}
		l = &served{Ledger: cluster.Ledger{Run: rand.Text()}}
	}
	if f(l, now); l.idleAt != 0 {
		s.groups[group] = l
	}
	return nil
}

// local is the ledger of a group in this process.
type local struct {
	server *Server
	group  string
}

func (l local) Call(_ context.Context, q *cluster.Request) (r *cluster.Reply, err error) {
	if err := q.Validate(); err != nil {
		return nil, err
	}
	err = l.server.with(l.group, func(l *served, now cluster.Time) {
		r = l.Call(now, q)
		l.idleAt = max(l.idleAt, now+2*q.Params.Lease+q.Params.Step)
	})
	return r, err
}

func (l local) Snapshot(_ context.Context, keys ...string) (shot cluster.Snapshot, err error) {
	err = l.server.with(l.group, func(l *served, now cluster.Time) { shot = l.Snapshot(now, keys...) })
	return shot, err
}

func (l local) Forget(_ context.Context, host string) (ok bool, err error) {
	err = l.server.with(l.group, func(l *served, now cluster.Time) { ok = l.Forget(now, host) })
	return ok, err
}

func (l local) Ping(context.Context, string) error {
	return l.server.with(l.group, func(*served, cluster.Time) {})
}

func (l local) Close() {}
