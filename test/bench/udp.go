package main

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

func loadsW7(short bool) (list []load) {
	sizes, span := []int{64, 200, 1200}, 2*time.Second
	if short {
		sizes, span = sizes[2:], time.Second
	}
	for _, size := range sizes {
		for _, gso := range []bool{false, true} {
			how := "one by one"
			if gso {
				how = "by segmentation offload"
			}
			list = append(list, load{
				name:        fmt.Sprintf("%d B, %s", size, how),
				description: "datagrams of one source at full speed: single ones, 64 per system call, or super-packets of up to 64 datagrams", headline: "cpu-packet",
				figures: []string{"packets", "cpu-packet", "machine-packet", "memory"}, programs: []string{subject, "direct", "nginx", "naive"},
				task: func(n *lab.Row, b binaries) task { return task{net: n, bins: b, udp: true} },
				measure: func(ctx context.Context, n *lab.Row, r *running) (sample, error) {
					return measureDatagrams(ctx, n, r, size, span, func(ctx context.Context) error {
						return blast(ctx, n.Client, source(0), r.to, size, gso)
					})
				},
			})
		}
	}
	const rate = 60_000
	return append(list, load{
		name:        fmt.Sprintf("200 B, %d a second", rate),
		description: "datagrams of one source, one by one and evenly spaced", headline: "cpu-packet",
		figures: []string{"packets", "cpu-packet", "machine-packet", "memory"}, programs: []string{subject, "direct", "nginx", "naive"},
		task: func(n *lab.Row, b binaries) task { return task{net: n, bins: b, udp: true} },
		measure: func(ctx context.Context, n *lab.Row, r *running) (sample, error) {
			return measureDatagrams(ctx, n, r, 200, span, func(ctx context.Context) error {
				return drip(ctx, n.Client, source(0), r.to, 200, rate)
			})
		},
	})
}

// udpHeaders is the number of bytes that an interface counts per datagram in addition to the payload.
const udpHeaders = 14 + 20 + 8

// measureDatagrams measures the arrivals of the datagrams that send sends until its context ends.
func measureDatagrams(ctx context.Context, n *lab.Row, r *running, size int, span time.Duration, send func(context.Context) error) (s sample, err error) {
	// Nothing reads from this socket: arrivals are counted at the interface and dropped cheaply in the kernel.
	unread, err := n.Downstream.ListenUDP(atDownstream)
	if err != nil {
		return s, err
	}
	defer unread.Close()
	_ = unread.SetReadBuffer(1)
	ctx, cancel := context.WithCancel(ctx)
	var sending sync.WaitGroup
	defer func() { cancel(); sending.Wait() }()
	failed := make(chan error, 1)
	sending.Go(func() { failed <- send(ctx) })
	time.Sleep(settle)
	c, err := measureTraffic(n, r, span)
	if err != nil {
		return s, err
	}
	select {
	case err := <-failed:
		return s, fmt.Errorf("send: %w", err)
	default:
	}
	datagrams := c.payload(udpHeaders) / float64(size)
	if datagrams < 100 {
		return s, fmt.Errorf("only %.0f datagrams arrived", datagrams)
	}
	s = sample{figures: map[string]float64{
		"packets":        datagrams / c.seconds / 1000,
		"machine-packet": c.cost.machine.Seconds() * 1e6 / datagrams,
	}}
	if r.process != nil {
		s.figures["cpu-packet"] = (c.cost.user + c.cost.system).Seconds() * 1e6 / datagrams
	}
	s.addMemory(r.peakMemory())
	return s, nil
}

// drip sends datagrams at a rate until ctx ends. What it misses it makes up for.
func drip(ctx context.Context, h *lab.Host, from netip.Addr, to netip.AddrPort, size, rate int) error {
	c, err := h.DialUDP(from, to)
	if err != nil {
		return err
	}
	defer c.Close()
	start := time.Now()
	for sent := 0; ctx.Err() == nil; {
		for due := int(time.Since(start).Seconds() * float64(rate)); sent < due; sent++ {
			_, _ = c.Write(zeros[:size]) // a full queue, or a port that is not open yet
		}
	}
	return nil
}

// blast sends datagrams until ctx ends.
func blast(ctx context.Context, h *lab.Host, from netip.Addr, to netip.AddrPort, size int, gso bool) error {
	c, err := h.DialUDP(from, to)
	if err != nil {
		return err
	}
	defer c.Close()
	batch := make([]ipv4.Message, 64)
	each := size
	if gso {
		batch = batch[:1]
		each = min(64, 65_000/size) * size
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		if err := raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_SEGMENT, size)
		}); err != nil {
			return err
		}
	}
	for i := range batch {
		batch[i].Buffers = [][]byte{zeros[:each]}
	}
	p := ipv4.NewPacketConn(c)
	for ctx.Err() == nil {
		if _, err := p.WriteBatch(batch, 0); err != nil && ctx.Err() == nil {
			// A full queue, or a port that is not open yet.
			time.Sleep(time.Millisecond)
		}
	}
	return nil
}
