// Command naive is the proxy that one would write in an afternoon: a goroutine per
// direction, a golang.org/x/time/rate limiter per source, a channel as semaphore. The
// harness compares it with the others.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

func main() {
	fmt.Fprintln(os.Stderr, "naive:", run(os.Args[1:]))
	os.Exit(1)
}

type naive struct {
	downstream string
	rate       rate.Limit // bytes a second, or rate.Inf
	slots      chan struct{}

	mu       sync.Mutex
	limiters map[netip.Addr]*rate.Limiter
}

const chunk = 32 << 10

// run serves until an error. Its arguments are protocol, address, downstream, rate in
// bytes a second and slots; 0 is no limit.
func run(args []string) error {
	if len(args) != 5 {
		return errors.New("usage: naive PROTOCOL ADDRESS DOWNSTREAM RATE SLOTS")
	}
	n := &naive{downstream: args[2], rate: rate.Inf, limiters: map[netip.Addr]*rate.Limiter{}}
	bytes, err := strconv.ParseInt(args[3], 10, 64)
	if err != nil {
		return err
	}
	if bytes > 0 {
		n.rate = rate.Limit(bytes)
	}
	slots, err := strconv.Atoi(args[4])
	if err != nil {
		return err
	}
	if slots > 0 {
		n.slots = make(chan struct{}, slots)
	}
	if args[0] == "udp" {
		return n.serveUDP(args[1])
	}
	l, err := net.Listen("tcp4", args[1])
	if err != nil {
		return err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go n.serve(c.(*net.TCPConn))
	}
}

func (n *naive) limiter(from netip.Addr) *rate.Limiter {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.limiters[from]
	if l == nil {
		l = rate.NewLimiter(n.rate, chunk)
		n.limiters[from] = l
	}
	return l
}

func (n *naive) serve(c *net.TCPConn) {
	defer c.Close()
	if n.slots != nil {
		n.slots <- struct{}{}
		defer func() { <-n.slots }()
	}
	raw, err := net.Dial("tcp4", n.downstream)
	if err != nil {
		return
	}
	d := raw.(*net.TCPConn)
	defer d.Close()
	var up sync.WaitGroup
	up.Go(func() {
		defer d.CloseWrite()
		if n.rate == rate.Inf {
			_, _ = io.Copy(d, c)
			return
		}
		l := n.limiter(c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr())
		buf := make([]byte, chunk)
		for {
			got, err := c.Read(buf)
			if err != nil || l.WaitN(context.Background(), got) != nil {
				return
			}
			if _, err := d.Write(buf[:got]); err != nil {
				return
			}
		}
	})
	_, _ = io.Copy(c, d)
	_ = c.CloseWrite()
	up.Wait()
}

func (n *naive) serveUDP(address string) error {
	at, err := net.ResolveUDPAddr("udp4", address)
	if err != nil {
		return err
	}
	l, err := net.ListenUDP("udp4", at)
	if err != nil {
		return err
	}
	flows := map[netip.AddrPort]*net.UDPConn{}
	buf := make([]byte, 64<<10)
	for {
		got, from, err := l.ReadFromUDPAddrPort(buf)
		if err != nil {
			return err
		}
		d := flows[from]
		if d == nil {
			raw, err := net.Dial("udp4", n.downstream)
			if err != nil {
				return fmt.Errorf("flow: %w", err)
			}
			d = raw.(*net.UDPConn)
			flows[from] = d
			go answers(l, from, d)
		}
		if n.rate != rate.Inf && !n.limiter(from.Addr()).AllowN(time.Now(), got) {
			continue
		}
		_, _ = d.Write(buf[:got])
	}
}

func answers(l *net.UDPConn, to netip.AddrPort, d *net.UDPConn) {
	buf := make([]byte, 64<<10)
	for {
		got, err := d.Read(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			_, _ = l.WriteToUDPAddrPort(buf[:got], to)
		}
	}
}
