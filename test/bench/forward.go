package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// In these loads the middle host routes, and the forwarded packets pass a limiter whose
// rate is never reached. All are judged by the CPU time of the whole machine: they run in
// the kernel and have no process.

// unreachedRate is a rate that the machine cannot reach, in bits a second.
const unreachedRate = 900e9

// startAttached starts shaperd with an attachment on the middle host; at is the
// attachment's settings, and keys has the key of each limit.
func startAttached(at string, keys ...string) func(context.Context, task) (*running, error) {
	return func(ctx context.Context, t task) (_ *running, err error) {
		pins, err := lab.NewBPFFS()
		if err != nil {
			return nil, err
		}
		undo := func() error { return lab.RemoveDir(pins) }
		text := fmt.Sprintf("[daemon]\nmetrics = \"\"\npin_path = %q\n\n[[attach]]\nname = \"wall\"\n%s\n", filepath.Join(pins, "pins"), at)
		for i, key := range keys {
			text += fmt.Sprintf("\n[[limit]]\nname = \"far%d\"\nmatch = { attach = [\"wall\"] }\nkey = [%s]\nrate = \"%.0fGbit/s\"\n", i, key, unreachedRate/1e9)
		}
		r := &running{to: atDownstream, cleanup: undo}
		dir, path, err := writeConfig("shaperd.toml", text)
		if err == nil {
			r.process, err = startProcess(t.net.Middle, dir, t.bins.shaperd, "run", "--config", path)
		}
		if err == nil {
			err = r.process.awaitOutput(ctx, "msg=ready", 1)
		}
		if err != nil {
			_ = r.stop()
			return nil, err
		}
		return r, nil
	}
}

const (
	egressPolice  = "interface = \"right\"\ndirection = \"egress\"\nmode = \"police\""
	egressObserve = "interface = \"right\"\ndirection = \"egress\"\nobserve = true"
	ingressPolice = "interface = \"left\"\ndirection = \"ingress\"\nmode = \"police\""
	ingressXDP    = ingressPolice + "\nhook = \"xdp\""

	bySource = `"source"`
)

// withTC adds a kernel qdisc to the interface towards the downstream.
func withTC(commands ...string) func(context.Context, task) (*running, error) {
	return func(_ context.Context, t task) (*running, error) {
		r := kernelShaper(t)
		for i, c := range commands {
			if err := t.net.Middle.Run("tc", strings.Fields(c)...); err != nil {
				if i > 0 {
					_ = r.stop()
				}
				return nil, err
			}
		}
		return r, nil
	}
}

// withNFT adds an nftables table, whose commands are in braces.
func withNFT(table string) func(context.Context, task) (*running, error) {
	return func(_ context.Context, t task) (*running, error) {
		if err := t.net.Middle.Run("nft", "add table ip bench "+table); err != nil {
			return nil, err
		}
		return &running{to: atDownstream, cleanup: func() error { return t.net.Middle.Run("nft", "delete table ip bench") }}, nil
	}
}

var (
	plainForwarding = row{name: "plain forwarding", start: startDirect}
	policeOneLimit  = row{name: "shaperd, police, 1 limit", start: startAttached(egressPolice, bySource)}
	htbRow          = row{name: "htb", peer: true, start: withTC("qdisc add dev right root handle 1: htb default 1",
		fmt.Sprintf("class add dev right parent 1: classid 1:1 htb rate %.0fbit burst 10mb cburst 10mb", unreachedRate))}
	nftRow = row{name: "nftables", peer: true, start: withNFT("{ chain f { type filter hook forward priority 0; limit rate over 10000000/second drop; }; }")}
	// forwarders limit all traffic together, or each source.
	forwarders = []row{
		policeOneLimit,
		{name: "shaperd, police, 4 limits", start: startAttached(egressPolice, bySource, ``, `"port"`, `"source", "port"`)},
		{name: "shaperd, police, at ingress", start: startAttached(ingressPolice, bySource)},
		{name: "shaperd, police, by XDP", start: startAttached(ingressXDP, bySource)},
		{name: "shaperd, observe, 1 limit", start: startAttached(egressObserve, bySource)},
		plainForwarding,
		htbRow,
		{name: "tbf", peer: true, start: withTC(fmt.Sprintf("qdisc add dev right root tbf rate %.0fbit burst 10mb latency 50ms", unreachedRate))},
		nftRow,
	}
)

func toDownstream(n *lab.Row, b binaries) task { return task{net: n, bins: b} }

func loadsW10(short bool) (list []load) {
	list = append(packetLoads(short), guestLoads(short)...)
	sizes, span, rows := []int{200, 1200}, time.Second, forwarders
	if short {
		sizes, rows = sizes[:1], []row{policeOneLimit, plainForwarding, htbRow, nftRow}
	}
	for _, size := range sizes {
		list = append(list, load{
			name:        fmt.Sprintf("forwarding, datagrams of %d B", size),
			description: "datagrams of one source, one by one, over a router with a limit that is never reached", headline: "machine-packet", repeat: 2,
			figures: []string{"packets", "machine-packet"}, rows: rows, baseline: policeOneLimit.name,
			task: toDownstream,
			measure: func(ctx context.Context, n *lab.Row, r *running) (sample, error) {
				return measureDatagrams(ctx, n, r, size, span, func(ctx context.Context) error {
					return blast(ctx, n.Client, source(0), r.to, size, false)
				})
			},
		})
	}
	if !short {
		list = append(list, load{
			name:        "forwarding, TCP",
			description: "4 connections that send at full speed, in trains of segments", headline: "throughput", repeat: 2,
			figures: []string{"throughput", "machine"}, rows: rows, baseline: policeOneLimit.name,
			task: toDownstream,
			measure: func(ctx context.Context, n *lab.Row, r *running) (sample, error) {
				return measureThroughput(ctx, n, r, 4, 256<<10, span)
			},
		})
	}
	return list
}

// spoofedSources is the number of source addresses of a flood.
const spoofedSources = 200_000

// spoofedFlood is a flood from many sources, each with its own bucket.
func spoofedFlood(short bool) load {
	const size = 200
	span := 2 * time.Second
	if short {
		span = time.Second
	}
	return load{
		name:        "a flood of 200,000 sources",
		description: "datagrams of 200 B from 200,000 sources in random order, over a router with a limit per source that is never reached", headline: "machine-packet", repeat: 2,
		figures: []string{"packets", "machine-packet"}, baseline: policeOneLimit.name,
		rows: []row{policeOneLimit, plainForwarding, {name: "nftables", peer: true, start: withNFT(
			"{ set sources { type ipv4_addr; size 1048576; flags dynamic,timeout; timeout 60s; };" +
				" chain f { type filter hook forward priority 0; add @sources { ip saddr limit rate over 10000000/second } drop; }; }")}},
		task: toDownstream,
		measure: func(ctx context.Context, n *lab.Row, r *running) (sample, error) {
			for _, link := range []string{"all", lab.MiddleLeft} {
				if err := n.Middle.Sysctl("net/ipv4/conf/"+link+"/rp_filter", "0"); err != nil {
					return sample{}, err
				}
			}
			return measureDatagrams(ctx, n, r, size, span, func(ctx context.Context) error {
				return flood(ctx, n.Client, r.to, size)
			})
		},
	}
}

// flood sends datagrams from random addresses until ctx ends.
func flood(ctx context.Context, h *lab.Host, to netip.AddrPort, size int) error {
	var c *net.IPConn
	// With IPPROTO_RAW, packets include their IP header.
	err := h.Do(func() (err error) { c, err = net.ListenIP("ip4:255", nil); return err })
	if err != nil {
		return err
	}
	defer c.Close()
	batch := make([]ipv4.Message, 64)
	for i := range batch {
		packet := make([]byte, 28+size)
		packet[0], packet[8], packet[9] = 0x45, 64, unix.IPPROTO_UDP
		copy(packet[16:], to.Addr().AsSlice())
		binary.BigEndian.PutUint16(packet[20:], 4000)
		binary.BigEndian.PutUint16(packet[22:], to.Port())
		binary.BigEndian.PutUint16(packet[24:], uint16(8+size))
		batch[i] = ipv4.Message{Buffers: [][]byte{packet}, Addr: &net.IPAddr{IP: to.Addr().AsSlice()}}
	}
	p := ipv4.NewPacketConn(c)
	var draw uint64
	for ctx.Err() == nil {
		for i := range batch {
			draw = draw*6364136223846793005 + 1442695040888963407
			binary.BigEndian.PutUint32(batch[i].Buffers[0][12:], 20<<24+uint32(draw>>32*spoofedSources>>32))
		}
		if _, err := p.WriteBatch(batch, 0); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}
