// Package redis keeps a ledger of shared limits in Redis or Valkey: one server, one that Sentinels
// watch, or a cluster. The ledger is a script that the server runs, with the same rules as
// cluster.Ledger.
package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"
)

// confirmAfter is how long the address that Sentinels gave is used before one is asked again. A master that
// they have replaced, but could not reach, may still take writes.
const confirmAfter = time.Second

// Store is a ledger on a server. It connects with the first call, and again after an error. Its methods
// may be used concurrently, and wait for each other: one request at a time is on its way.
type Store struct {
	target  *target
	mistake error         // in its options
	free    chan struct{} // has an element while no request is on its way

	conn      *conn     // or nil
	moved     string    // where a node of a cluster has said that the keys are, or ""
	next      int       // index of the address to try first
	confirmed time.Time // when Sentinels have named the server of conn
}

// New returns a store. It does not connect yet. A mistake in the options is the error of every request.
func New(o Options) *Store {
	s := &Store{free: make(chan struct{}, 1)}
	s.target, s.mistake = newTarget(o)
	s.free <- struct{}{}
	return s
}

// Server returns the address of the server that the connection is to, host:port; "" while it is not connected.
// It waits for the request that is on its way.
func (s *Store) Server() string {
	<-s.free
	defer func() { s.free <- struct{}{} }()
	if s.conn == nil {
		return ""
	}
	return s.conn.address
}

// Close waits for the request that is on its way, and closes the connection. A request after it
// connects again.
func (s *Store) Close() {
	<-s.free
	s.disconnect()
	s.free <- struct{}{}
}

func (s *Store) disconnect() {
	if s.conn != nil {
		s.conn.close()
		s.conn = nil
	}
}

// run runs the script once, with the run_id of the process that runs it as first argument, and returns its
// reply. When it is known that the script has not run, it tries again at once, on the right node or
// with the script loaded. Every other error is the caller's.
func (s *Store) run(ctx context.Context, keys []string, args []string) (any, error) {
	if s.mistake != nil {
		return nil, s.mistake
	}
	select {
	case <-s.free:
		defer func() { s.free <- struct{}{} }()
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for another request to the store: %w", context.Cause(ctx))
	}
	loaded, redirects := false, 0
	for {
		if err := s.ensure(ctx); err != nil {
			return nil, err
		}
		reply, err := s.evaluate(ctx, keys, args)
		if err == nil {
			return reply, nil
		}
		address := s.conn.address
		s.confirmed = time.Time{}
		var refused serverError
		if !errors.As(err, &refused) {
			s.fail()
			return nil, fmt.Errorf("ask the store at %s: %w", address, err)
		}
		switch refused.code() {
		case "NOSCRIPT":
			if !loaded {
				loaded = true
				if err = s.load(ctx); err == nil {
					continue
				}
				s.fail()
			}
		case "MOVED":
			s.fail()
			if to := movedTo(refused, address); to != "" && redirects < 2 {
				redirects++
				s.moved = to
				continue
			}
		case "READONLY", "MASTERDOWN", "CLUSTERDOWN", "NOAUTH", "NOPERM", "WRONGPASS":
			s.fail() // another server or another password may help
		}
		return nil, fmt.Errorf("ask the store at %s: %w", address, err)
	}
}

// evaluate sends the script's name to the server.
func (s *Store) evaluate(ctx context.Context, keys, args []string) (any, error) {
	command := append([]string{"EVALSHA", ledgerSHA, fmt.Sprint(len(keys))}, keys...)
	command = append(command, s.conn.run)
	return s.one(ctx, append(command, args...))
}

func (s *Store) load(ctx context.Context) error {
	_, err := s.one(ctx, []string{"SCRIPT", "LOAD", ledgerScript})
	if err != nil {
		return fmt.Errorf("load the script: %w", err)
	}
	return nil
}

// one sends a command and returns its reply, which is no serverError.
func (s *Store) one(ctx context.Context, command []string) (any, error) {
	replies, err := s.conn.do(ctx, command)
	if err != nil {
		return nil, err
	}
	if refused, is := replies[0].(serverError); is {
		return nil, refused
	}
	return replies[0], nil
}

// fail closes the connection, and makes the next one go elsewhere if there is a choice.
func (s *Store) fail() {
	s.disconnect()
	s.moved = ""
	s.next++
}

// ensure connects, or confirms that the connection is to the right server.
func (s *Store) ensure(ctx context.Context) error {
	if s.conn != nil && (s.target.master == "" || time.Since(s.confirmed) < confirmAfter) {
		return nil
	}
	if s.conn != nil && !s.confirm(ctx) {
		s.disconnect()
	}
	if s.conn != nil {
		return nil
	}
	c, err := s.find(ctx)
	if err != nil {
		s.moved = ""
		s.next++
		return err
	}
	s.conn, s.confirmed = c, time.Now()
	return nil
}

// confirm asks one Sentinel, another one each time, whether the connection is to the right server. Who
// does not answer soon is not waited for: a Sentinel that is away says nothing about the server.
func (s *Store) confirm(ctx context.Context) bool {
	s.confirmed = time.Now()
	s.next++
	if deadline, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(deadline)/4)
		defer cancel()
	}
	address, err := s.target.askSentinel(ctx, s.pick())
	return err != nil || address == s.conn.address
}

// pick returns the address to try next.
func (s *Store) pick() string { return s.target.addresses[s.next%len(s.target.addresses)] }

// find connects to the server that has the keys, as far as that is known.
func (s *Store) find(ctx context.Context) (*conn, error) {
	switch {
	case s.target.master != "":
		address, err := s.target.askSentinels(ctx)
		if err != nil {
			return nil, err
		}
		return s.target.connect(ctx, address)
	case s.moved != "":
		return s.target.connect(ctx, s.moved)
	}
	c, err := s.target.connect(ctx, s.pick())
	if err == nil && s.target.cluster && !c.cluster {
		c.close()
		return nil, fmt.Errorf("connect to %s: it is not a node of a cluster", c.address)
	}
	return c, err
}

// movedTo returns the address in an error like "MOVED 3999 10.0.0.1:6381", by a server at from.
func movedTo(e serverError, from string) string {
	words := strings.Fields(string(e))
	if len(words) != 3 {
		return ""
	}
	colon := strings.LastIndexByte(words[2], ':')
	if colon < 0 {
		return ""
	}
	host, port := strings.Trim(words[2][:colon], "[]"), words[2][colon+1:]
	if host == "" {
		// The node does not know its own name.
		var err error
		if host, _, err = net.SplitHostPort(from); err != nil {
			return ""
		}
	}
	return net.JoinHostPort(host, port)
}
