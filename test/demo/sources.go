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

	"shaperd.dev/shaperd/test/lab"
)

// A source is one of the three senders. All are on the client host.
type source struct {
	tag  byte // first byte of each request and datagram
	name string
	addr netip.Addr
}

const greedy = 2 // index in sources

var sources = [3]source{
	{'A', "polite A", netip.MustParseAddr("10.1.1.10")},
	{'B', "polite B", netip.MustParseAddr("10.1.2.10")},
	{'G', "greedy", netip.MustParseAddr("10.1.3.10")},
}

// The polite sources send one request at a time, and single datagrams.
const (
	politeBody             = 2 << 10
	politePause            = 150 * time.Millisecond
	politeTimeout          = 2 * time.Second
	politeDatagramInterval = 200 * time.Millisecond // between datagrams
)

// The greedy source opens many connections, retries without end, and sends bursts of datagrams.
const (
	greedyConnections = 300
	greedyBody        = 32 << 10
	greedyDialTimeout = 200 * time.Millisecond
	greedyTimeout     = 10 * time.Second
	greedyRetry       = 100 * time.Millisecond // after a failure
	greedyBurst       = 100                    // datagrams
	greedyInterval    = 50 * time.Millisecond
	datagramSize      = 160 // an SMS
)

// sourceStats counts the requests and datagrams of one source. It is safe for concurrent use.
type sourceStats struct {
	answered, failed atomic.Int64 // requests
	sent, acked      atomic.Int64 // datagrams

	mu        sync.Mutex
	durations []time.Duration // of each answered request
}

// latencies returns the durations of answered requests, sorted.
func (t *sourceStats) latencies() []time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Sorted(slices.Values(t.durations))
}

// A sender is a source that sends to one address.
type sender struct {
	source
	host  *lab.Host
	to    netip.AddrPort
	stats *sourceStats
}

// runPolite makes requests one at a time and sends datagrams, until the deadline. It waits for the last responses.
func (s sender) runPolite(ctx context.Context, deadline time.Time) {
	var group sync.WaitGroup
	group.Go(func() { s.sendDatagrams(ctx, deadline, politeDatagramInterval, 1) })
	group.Go(func() {
		for ctx.Err() == nil && time.Now().Before(deadline) {
			s.request(ctx, politeBody, politeTimeout, politeTimeout)
			pause(ctx, politePause)
		}
	})
	group.Wait()
}

// runGreedy sends as much as it can until ctx ends.
func (s sender) runGreedy(ctx context.Context) {
	var group sync.WaitGroup
	group.Go(func() { s.sendDatagrams(ctx, time.Now().Add(time.Hour), greedyInterval, greedyBurst) })
	for range greedyConnections {
		group.Go(func() {
			for ctx.Err() == nil {
				if !s.request(ctx, greedyBody, greedyDialTimeout, greedyTimeout) {
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

// request makes one request and reports whether it was answered. A request that the end
// of ctx interrupts does not count.
func (s sender) request(ctx context.Context, body int, dial, timeout time.Duration) bool {
	start := time.Now()
	err := s.exchange(ctx, body, dial, start.Add(timeout))
	took := time.Since(start)
	if ctx.Err() != nil {
		return false
	}
	if err != nil {
		s.stats.failed.Add(1)
		return false
	}
	s.stats.mu.Lock()
	s.stats.durations = append(s.stats.durations, took)
	s.stats.mu.Unlock()
	s.stats.answered.Add(1)
	return true
}

func (s sender) exchange(ctx context.Context, body int, dial time.Duration, deadline time.Time) error {
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
	response, err := io.ReadAll(c)
	if err == nil && (len(response) != 1 || response[0] != s.tag) {
		err = errors.New("closed without a response")
	}
	return err
}

// sendDatagrams sends bursts of count datagrams and counts the replies. After the
// deadline it waits a moment for the last replies.
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
				s.stats.acked.Add(1)
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
				s.stats.sent.Add(1)
			}
		}
		pause(ctx, every)
	}
	pause(ctx, 500*time.Millisecond)
	c.Close()
	reader.Wait()
}
