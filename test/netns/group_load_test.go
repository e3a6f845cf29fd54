package netns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"
)

const (
	transferSize = 64 << 10
	transfers    = 4 // at once, through each gateway that has demand

	groupDatagram = 1000
	hotDatagrams  = groupRate / 5 / groupDatagram   // a second, through a gateway that has demand
	coldDatagrams = groupRate / 100 / groupDatagram // through any other
)

// A groupLoad sends through all gateways of a group. A gateway has demand while it is hot: clients
// that make transfers, each on a connection of its own, as fast as they can, and datagrams. Through
// the others some datagrams pass.
type groupLoad struct {
	g     *group
	group sync.WaitGroup

	mu      sync.Mutex
	changed sync.Cond // which gateways are hot, or up
	hot     [groupSize]bool
	jumps   []jump
	failed  []error // of transfers
	ended   int     // transfers that succeeded
}

// A jump is when another gateway became hot.
type jump struct {
	at time.Time
	to int
}

// startLoad starts a load without demand.
func (g *group) startLoad() *groupLoad {
	ctx, cancel := context.WithCancel(context.Background())
	l := &groupLoad{g: g}
	l.changed.L = &l.mu
	context.AfterFunc(ctx, l.wake)
	for i := range groupSize {
		for n := range transfers {
			l.group.Go(func() { l.transferAll(ctx, i, groupSources[n%2]) })
		}
		l.group.Go(func() { l.sendDatagrams(ctx, i) })
	}
	g.t.Cleanup(func() {
		cancel()
		l.group.Wait()
	})
	return l
}

// setHot makes exactly these gateways hot.
func (l *groupLoad) setHot(gateways ...int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.hot
	l.hot = [groupSize]bool{}
	for _, i := range gateways {
		if l.hot[i] = true; !was[i] {
			l.jumps = append(l.jumps, jump{time.Now(), i})
		}
	}
	l.changed.Broadcast()
}

// isHot reports whether a gateway is hot.
func (l *groupLoad) isHot(i int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.hot[i]
}

// wake makes clients look again.
func (l *groupLoad) wake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.changed.Broadcast()
}

// awaitHot waits until a gateway is hot. With begun, it also returns when the gateway ends: what has
// begun may be completed.
func (l *groupLoad) awaitHot(ctx context.Context, i int, begun bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.hot[i] && (!begun || l.g.gateways[i].up.Load()) && ctx.Err() == nil {
		l.changed.Wait()
	}
	return ctx.Err()
}

// takeResults returns the transfers since it was last called, and the jumps.
func (l *groupLoad) takeResults() (ended int, failed []error, jumps []jump) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ended, failed, jumps = l.ended, l.failed, l.jumps
	l.ended, l.failed, l.jumps = 0, nil, nil
	return ended, failed, jumps
}

// transferAll makes one transfer after the other through gateway i.
func (l *groupLoad) transferAll(ctx context.Context, i int, from netip.Addr) {
	for l.awaitHot(ctx, i, false) == nil {
		err := l.g.transfer(ctx, i, from, transferSize, func() error { return l.awaitHot(ctx, i, true) })
		if ctx.Err() != nil {
			return
		}
		l.mu.Lock()
		if err == nil {
			l.ended++
		} else {
			l.failed = append(l.failed, fmt.Errorf("through %s: %w", l.g.gateways[i].name, err))
		}
		l.mu.Unlock()
		if err != nil {
			select {
			case <-time.After(20 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	}
}

// transfer sends size bytes through gateway i, and waits for the receipt. It calls proceed before each
// block.
func (g *group) transfer(ctx context.Context, i int, from netip.Addr, size int, proceed func() error) error {
	c, err := g.sources.Dial(ctx, from, netip.AddrPortFrom(g.gateways[i].addr, groupPort), 10*time.Second)
	if err != nil {
		return err
	}
	defer abort(c)
	defer context.AfterFunc(ctx, func() { abort(c) })()
	// A small buffer, so that demand ends soon after the gateway is no longer hot.
	if err := c.SetWriteBuffer(4 << 10); err != nil {
		return err
	}
	block := make([]byte, 4<<10)
	for sent := 0; sent < size; sent += len(block) {
		if err := proceed(); err != nil {
			return err
		}
		block = block[:min(len(block), size-sent)]
		if _, err := c.Write(block); err != nil {
			return fmt.Errorf("after %d bytes: %w", sent, err)
		}
	}
	if err := c.CloseWrite(); err != nil {
		return err
	}
	receipt, err := io.ReadAll(c)
	if err != nil {
		return fmt.Errorf("read the receipt: %w", err)
	}
	if len(receipt) != 8 || binary.BigEndian.Uint64(receipt) != uint64(size) {
		return fmt.Errorf("the receipt is % x", receipt)
	}
	return nil
}

// acceptTransfers serves transfers inside the host.
func (h *host) acceptTransfers(t testing.TB, at netip.AddrPort) {
	h.serveTCP(t, at, func(c *net.TCPConn) {
		n, err := io.Copy(io.Discard, c)
		if err == nil {
			_, _ = c.Write(binary.BigEndian.AppendUint64(nil, uint64(n)))
		}
	})
}

// sendDatagrams sends datagrams through gateway i. The tag of each is i.
func (l *groupLoad) sendDatagrams(ctx context.Context, i int) {
	c, err := l.g.sources.DialUDP(groupSources[2], netip.AddrPortFrom(l.g.gateways[i].addr, groupPort))
	if err != nil {
		l.g.t.Error(err)
		return
	}
	defer c.Close()
	payload := make([]byte, groupDatagram)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	due, last := 0.0, time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := time.Now()
		rate := float64(coldDatagrams)
		if l.isHot(i) {
			rate = hotDatagrams
		}
		// After a stall of this program, it does not send everything that was due.
		due = min(due+rate*now.Sub(last).Seconds(), 3)
		last = now
		for ; due >= 1; due-- {
			stamp(payload, time.Now(), byte(i))
			// Refused while no daemon runs.
			if _, err := c.Write(payload); err != nil && !errors.Is(err, net.ErrClosed) {
				break
			}
		}
	}
}

// move makes one gateway after the other hot, each for a while, until the context ends. Gateways
// without a daemon are left out.
func (l *groupLoad) move(ctx context.Context, period time.Duration) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	hot, until := groupSize-1, time.Now()
	for {
		if now := time.Now(); now.After(until) || !l.g.gateways[hot].up.Load() {
			next := slices.IndexFunc(slices.Concat(l.g.all(), l.g.all())[hot+1:], func(gw *gateway) bool { return gw.up.Load() })
			if next >= 0 {
				hot, until = (hot+1+next)%groupSize, now.Add(period)
				l.setHot(hot)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
