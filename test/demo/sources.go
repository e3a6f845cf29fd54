package main

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"shaperd/test/lab"
)

// A source is one of the three senders. All sit on the client host.
type source struct {
	tag  byte // first byte of all it sends
	name string
	addr netip.Addr
}

const greedy = 2 // index in sources

var sources = [3]source{
	{'A', "polite A", netip.MustParseAddr("10.1.1.10")},
	{'B', "polite B", netip.MustParseAddr("10.1.2.10")},
	{'G', "greedy", netip.MustParseAddr("10.1.3.10")},
}

// What the polite sources do: one request at a time, and one datagram now and then.
const (
	politeBody     = 2 << 10
	politePause    = 150 * time.Millisecond
	politePatience = 2 * time.Second
	politeDatagram = 200 * time.Millisecond // between two of them
)

// What the greedy source does: as many connections as it likes, trying again and
// again, and bursts of datagrams.
const (
	greedyConnections = 300
	greedyBody        = 32 << 10
	greedyDial        = 200 * time.Millisecond
	greedyPatience    = 10 * time.Second
	greedyRetry       = 100 * time.Millisecond // after a failure
	greedyBurst       = 100                    // datagrams
	greedyEvery       = 50 * time.Millisecond
	datagramSize      = 160 // an SMS
)

// A tally counts what one source did. It is safe for concurrent use.
type tally struct {
	answered, failed atomic.Int64 // requests
	sent, acked      atomic.Int64 // datagrams

	mu   sync.Mutex
	took []time.Duration // by each answered request
}

// latencies returns how long answered requests took, sorted.
func (t *tally) latencies() []time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Sorted(slices.Values(t.took))
}

// A sender is a source that works towards one address.
type sender struct {
	source
	host  *lab.Host
	to    netip.AddrPort
	tally *tally
}

// beOrderly makes requests one at a time, and sends datagrams, until the deadline.
// It waits for the last answers.
func (s sender) beOrderly(ctx context.Context, deadline time.Time) {
	var group sync.WaitGroup
	group.Go(func() { s.sendDatagrams(ctx, deadline, politeDatagram, 1) })
	group.Go(func() {
		for ctx.Err() == nil && time.Now().Before(deadline) {
			s.request(ctx, politeBody, politePatience, politePatience)
			pause(ctx, politePause)
		}
	})
	group.Wait()
}

// beGreedy does what it can until ctx ends.
func (s sender) beGreedy(ctx context.Context) {
	var group sync.WaitGroup
	group.Go(func() { s.sendDatagrams(ctx, time.Now().Add(time.Hour), greedyEvery, greedyBurst) })
	for range greedyConnections {
		group.Go(func() {
			for ctx.Err() == nil {
				if !s.request(ctx, greedyBody, greedyDial, greedyPatience) {
					pause(ctx, greedyRetry)
				}
			}
		})
	}
	group.Wait()
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// request makes one request and tells whether it was answered. One that the end
// of ctx cut short does not count.
func (s sender) request(ctx context.Context, body int, dial, patience time.Duration) bool {
	start := time.Now()
	err := s.try(ctx, body, dial, start.Add(patience))
	took := time.Since(start)
	if ctx.Err() != nil {
		return false
	}
	if err != nil {
		s.tally.failed.Add(1)
		return false
	}
	s.tally.mu.Lock()
	s.tally.took = append(s.tally.took, took)
	s.tally.mu.Unlock()
	s.tally.answered.Add(1)
	return true
}

func (s sender) try(ctx context.Context, body int, dial time.Duration, deadline time.Time) error {
	c, err := s.host.Dial(ctx, s.addr, s.to, dial)
	if err != nil {
		return err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	if err := c.SetDeadline(deadline); err != nil {
		return err
	}
	request := make([]byte, requestHead+body)
	request[0] = s.tag
	binary.BigEndian.PutUint32(request[1:], uint32(body))
	if _, err := c.Write(request); err != nil {
		return err
	}
	answer, err := io.ReadAll(c)
	if err == nil && (len(answer) != 1 || answer[0] != s.tag) {
		err = errors.New("closed without an answer")
	}
	return err
}

// sendDatagrams sends count datagrams again and again, and counts what comes
// back. After the deadline it waits a moment for the last.
func (s sender) sendDatagrams(ctx context.Context, deadline time.Time, every time.Duration, count int) {
	c, err := s.host.DialUDP(s.addr, s.to)
	if err != nil {
		return // nothing sent, nothing acknowledged
	}
	var reader sync.WaitGroup
	reader.Go(func() {
		var buf [16]byte
		for {
			if n, err := c.Read(buf[:]); n == 1 {
				s.tally.acked.Add(1)
			} else if errors.Is(err, net.ErrClosed) {
				return
			}
		}
	})
	datagram := make([]byte, datagramSize)
	datagram[0] = s.tag
	for ctx.Err() == nil && time.Now().Before(deadline) {
		for range count {
			if _, err := c.Write(datagram); err == nil {
				s.tally.sent.Add(1)
			}
		}
		pause(ctx, every)
	}
	pause(ctx, 500*time.Millisecond)
	c.Close()
	reader.Wait()
}
