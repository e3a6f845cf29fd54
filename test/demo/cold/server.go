package main

import (
	"errors"
	"net"
	"sync"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

const (
	failsAfter  = 5 * time.Second
	restartTime = 4 * time.Second
	coldTime    = 10 * time.Second

	bears     = 36 // connections at once; others wait in it
	bearsCold = 20 // beyond that it falls over while it is cold
	takes     = 25 * time.Millisecond
	takesCold = 4 * takes
)

// server answers one question a connection.
type server struct {
	host  *lab.Host
	works chan bool // a place for each that it works on
	done  sync.WaitGroup

	mu       sync.Mutex
	listener *net.TCPListener
	open     map[net.Conn]bool
	started  time.Time
	warm     bool // it was never cold
	falls    int
	closed   bool
}

func newServer(h *lab.Host) (*server, error) {
	s := &server{host: h, works: make(chan bool, bears), open: map[net.Conn]bool{}, warm: true}
	return s, s.start()
}

func (s *server) start() error {
	l, err := s.host.Listen(inner)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return l.Close()
	}
	s.listener, s.started = l, time.Now()
	s.done.Go(func() { s.accept(l) })
	return nil
}

func (s *server) accept(l *net.TCPListener) {
	for {
		c, err := l.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		s.mu.Lock()
		s.open[c] = true
		cold := s.cold()
		falls := cold && len(s.open) > bearsCold
		s.mu.Unlock()
		if falls {
			s.fall()
			return
		}
		s.done.Go(func() { s.serve(c) })
	}
}

func (s *server) cold() bool { return !s.warm && time.Since(s.started) < coldTime }

func (s *server) serve(c *net.TCPConn) {
	defer func() {
		c.Close()
		s.mu.Lock()
		delete(s.open, c)
		s.mu.Unlock()
	}()
	b := make([]byte, 1)
	if n, _ := c.Read(b); n == 0 {
		return
	}
	s.works <- true
	s.mu.Lock()
	d := takes
	if s.cold() {
		d = takesCold
	}
	s.mu.Unlock()
	time.Sleep(d)
	<-s.works
	_, _ = c.Write(b)
}

// fall resets all connections, and has the server start again.
func (s *server) fall() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listener == nil {
		return
	}
	s.listener.Close()
	s.listener = nil
	s.warm = false
	s.falls++
	for c := range s.open {
		_ = c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
	if !s.closed {
		s.done.Go(func() {
			time.Sleep(restartTime)
			_ = s.start()
		})
	}
}

func (s *server) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.fall()
	s.done.Wait()
}
