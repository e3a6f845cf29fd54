package control

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"syscall"
	"time"
)

// Endpoint is a port that something is served at over HTTP.
type Endpoint struct {
	server *http.Server // nil when nothing is served
	done   chan struct{}
}

// listen serves h at addr, a host:port, which a key of [daemon] names; "" serves nothing.
func listen(key, addr string, h http.Handler) (*Endpoint, error) {
	e := &Endpoint{done: make(chan struct{})}
	if addr == "" {
		close(e.done)
		return e, nil
	}
	ln, err := net.Listen("tcp", addr)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("[daemon] %s: listen on %s: the port is in use; see \"ss -lntup\" for whose it is", key, addr)
	}
	if err != nil {
		return nil, fmt.Errorf("[daemon] %s: %w", key, err)
	}
	e.server = &http.Server{
		Handler: h, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}
	go func() {
		defer close(e.done)
		_ = e.server.Serve(ln) // ends with Close
	}()
	return e, nil
}

// ServePage serves the web page at addr, a host:port; "" serves nothing. It shows, and
// changes nothing.
func ServePage(addr string, o *Options) (*Endpoint, error) {
	mux := http.NewServeMux()
	mux.Handle("/", PageHandler())
	mux.Handle("/v1/", readOnly(o))
	return listen("page", addr, guardHost(addr, mux))
}

// Close ends it.
func (e *Endpoint) Close() error {
	var err error
	if e.server != nil {
		err = e.server.Close()
	}
	<-e.done
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
