package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/control/web"
)

// Endpoint is an HTTP server with its listener.
type Endpoint struct {
	server      *http.Server   // nil while nothing is served
	serving     sync.WaitGroup // the accept loop and the connections
	stopBinding func()         // ends the wait for a port in use
}

// Limits of each connection, and of a port.
const (
	maxHeader          = 16 << 10         // bytes
	headTimeout        = time.Second      // for a request header
	readTimeout        = 5 * time.Second  // for a request
	writeTimeout       = 15 * time.Second // for a response
	idleTimeout        = 10 * time.Second // between requests
	maxPortConnections = 256              // connections; beyond it the oldest is closed
)

// newServer returns a server for h with timeouts that bound what a slow client can hold.
func newServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: headTimeout, ReadTimeout: readTimeout, WriteTimeout: writeTimeout, IdleTimeout: idleTimeout,
		MaxHeaderBytes: maxHeader, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}
}

// bindInterval is the time between attempts to bind a port that is in use.
const bindInterval = time.Second

// listen serves h at addr, a host:port from the key of [daemon]; "" serves nothing. If the
// port is in use, it logs that and retries in the background: any user of the host could
// take the port while no daemon runs, and that must not keep traffic from being forwarded.
func listen(key, addr string, o *Options, h http.Handler) (*Endpoint, error) {
	e := &Endpoint{}
	if addr == "" {
		return e, nil
	}
	try := func() error {
		ln, err := (&net.ListenConfig{Control: acceptRequests}).Listen(context.Background(), "tcp", addr)
		if err == nil {
			e.serve(limitedListener{ln, &connLimiter{log: o.Log, endpoint: key, users: map[uint32]*userConns{}}}, newServer(h))
		}
		return err
	}
	err := try()
	if err == nil {
		return e, nil
	}
	if !errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("[daemon] %s: %w", key, err)
	}
	why := fmt.Sprintf("[daemon] %s: listen on %s: address already in use; \"ss -lntup\" shows by which process", key, addr)
	o.Log.Error(why + "; retrying")
	o.endpointErrors.Store(key, why)
	quit := make(chan struct{})
	var waiting sync.WaitGroup
	waiting.Go(func() {
		tick := time.NewTicker(bindInterval)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
			}
			if try() == nil {
				o.endpointErrors.Delete(key)
				o.Log.Info("listening, after the port became free", "key", key, "address", addr)
				return
			}
		}
	})
	e.stopBinding = func() { close(quit); waiting.Wait() }
	return e, nil
}

// acceptRequests makes accept(2) return a connection only when its request has arrived.
// Otherwise it would count as idle while the request is in flight, and a flood of others
// would get it closed.
func acceptRequests(_, _ string, c syscall.RawConn) error {
	var err error
	if e := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, int(headTimeout/time.Second))
	}); e != nil {
		return e
	}
	return err
}

// ServeDashboard serves the dashboard and the read-only half of the API at addr, a host:port;
// "" serves nothing.
func ServeDashboard(addr string, o *Options) (*Endpoint, error) {
	mux := http.NewServeMux()
	mux.Handle("/", web.Handler())
	mux.Handle("/v1/", sameOrigin(newReadOnlyAPI(o)))
	return listen("dashboard", addr, o, guardHost(addr, mux))
}

func (e *Endpoint) serve(l net.Listener, h *http.Server) {
	e.server = h
	h.ConnState = func(c net.Conn, state http.ConnState) {
		switch c := c.(type) {
		case *peer:
			c.setState(state)
		case *limitedConn:
			c.setState(state)
		}
		switch state {
		case http.StateNew:
			e.serving.Add(1)
		case http.StateClosed:
			e.serving.Done()
		}
	}
	e.serving.Go(func() { _ = h.Serve(retryListener{l}) }) // ends with Close
}

// Close ends the endpoint. Requests that have arrived have a second to complete.
func (e *Endpoint) Close() error {
	if e.stopBinding != nil {
		e.stopBinding()
	}
	if e.server == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err := e.server.Shutdown(ctx)
	if err != nil {
		err = e.server.Close()
	}
	e.serving.Wait()
	return err
}

// retryListener is a listener that survives a lack of descriptors or memory: net/http retries
// after a temporary error, with a delay that grows up to a second.
type retryListener struct{ net.Listener }

func (l retryListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return nil, temporaryError{err}
	}
	return c, err
}

type temporaryError struct{ error }

func (temporaryError) Timeout() bool   { return false }
func (temporaryError) Temporary() bool { return true }
