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
)

// Endpoint is where something is served over HTTP.
type Endpoint struct {
	server  *http.Server   // nil when nothing is served
	serving sync.WaitGroup // who accepts, and connections
	stop    func()         // ends what waits for the port
}

// Bounds of what somebody who connects can take.
const (
	maxHeader    = 16 << 10         // bytes
	headTimeout  = time.Second      // of a request's header
	readTimeout  = 5 * time.Second  // of a request
	writeTimeout = 15 * time.Second // of an answer
	idleTimeout  = 10 * time.Second // between requests
	maxOfPort    = 256              // connections; then the oldest makes room
)

// newServer returns a server of h that nobody who connects holds up for long.
func newServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: headTimeout, ReadTimeout: readTimeout, WriteTimeout: writeTimeout, IdleTimeout: idleTimeout,
		MaxHeaderBytes: maxHeader, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}
}

// takenInterval is how often a port that somebody else has is tried again.
const takenInterval = time.Second

// listen serves h at addr, a host:port, which a key of [daemon] names; "" serves nothing.
// A port that is in use is waited for, and told: any user of the host could take it while no
// daemon runs, and traffic does not stand still for what only shows it.
func listen(key, addr string, o *Options, h http.Handler) (*Endpoint, error) {
	e := &Endpoint{}
	if addr == "" {
		return e, nil
	}
	try := func() error {
		ln, err := (&net.ListenConfig{Control: acceptRequests}).Listen(context.Background(), "tcp", addr)
		if err == nil {
			e.serve(port{ln, &crowd{log: o.Log, name: key, groups: map[uint32]*group{}}}, newServer(h))
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
	why := fmt.Sprintf("[daemon] %s: listen on %s: the port is in use; see \"ss -lntup\" for whose it is", key, addr)
	o.Log.Error(why + ". It is tried again")
	o.unshown.Store(key, why)
	quit := make(chan struct{})
	var waiting sync.WaitGroup
	waiting.Go(func() {
		tick := time.NewTicker(takenInterval)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
			}
			if try() == nil {
				o.unshown.Delete(key)
				o.Log.Info("the port is free now", "key", key, "address", addr)
				return
			}
		}
	})
	e.stop = func() { close(quit); waiting.Wait() }
	return e, nil
}

// acceptRequests has the kernel show a connection when its request has come. One that were
// shown before would be quiet for the time that a request takes on its way, and make room
// for a flood of others.
func acceptRequests(_, _ string, c syscall.RawConn) error {
	var err error
	if e := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, int(headTimeout/time.Second))
	}); e != nil {
		return e
	}
	return err
}

// ServePage serves the web page at addr, a host:port; "" serves nothing. It shows, and
// changes nothing.
func ServePage(addr string, o *Options) (*Endpoint, error) {
	mux := http.NewServeMux()
	mux.Handle("/", PageHandler())
	mux.Handle("/v1/", ownOrigin(readOnly(o)))
	return listen("dashboard", addr, o, guardHost(addr, mux))
}

func (e *Endpoint) serve(l net.Listener, h *http.Server) {
	e.server = h
	h.ConnState = func(c net.Conn, state http.ConnState) {
		if g, ok := c.(interface{ changed(http.ConnState) }); ok {
			g.changed(state)
		}
		switch state {
		case http.StateNew:
			e.serving.Add(1)
		case http.StateClosed:
			e.serving.Done()
		}
	}
	e.serving.Go(func() { _ = h.Serve(patient{l}) }) // ends with Close
}

// Close ends it. What has been asked is answered, within a second.
func (e *Endpoint) Close() error {
	if e.stop != nil {
		e.stop()
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

// patient is a listener that outlives a host without descriptors or memory: net/http takes
// up an error that passes again, each time later, up to once a second.
type patient struct{ net.Listener }

func (l patient) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return nil, passing{err}
	}
	return c, err
}

type passing struct{ error }

func (passing) Timeout() bool   { return false }
func (passing) Temporary() bool { return true }
