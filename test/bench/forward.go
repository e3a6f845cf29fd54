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

	"shaperd/test/lab"
)

// Here the middle routes, and what it forwards passes something that limits it to far
// more than there is. All are judged by what the whole machine spends: they are in the
// kernel, and have no process.

// far is a rate beyond what the machine can forward, in bits a second.
const far = 900e9

// attached starts shaperd with an attachment at an interface of the middle; at is its
// settings, limits the keys of its limits.
func attached(at string, keys ...string) func(context.Context, task) (*running, error) {
	return func(ctx context.Context, t task) (_ *running, err error) {
		pins, err := lab.NewPins()
		if err != nil {
			return nil, err
		}
		undo := func() error { return lab.RemoveDir(pins) }
		text := fmt.Sprintf("[daemon]\nmetrics = \"\"\npin_path = %q\n\n[[attach]]\nname = \"wall\"\n%s\n", filepath.Join(pins, "pins"), at)
		for i, key := range keys {
			text += fmt.Sprintf("\n[[limit]]\nname = \"far%d\"\nmatch = { attach = [\"wall\"] }\nkey = [%s]\nrate = \"%.0fGbit/s\"\n", i, key, far/1e9)
		}
		r := &running{to: atDownstream, undo: undo}
		dir, path, err := configured("shaperd.toml", text)
		if err == nil {
			r.process, err = startProcess(t.net.middle, dir, t.bins.shaperd, "run", "--config", path)
		}
		if err == nil {
			err = r.process.wrote(ctx, "msg=ready", 1)
		}
		if err != nil {
			_ = r.stop()
			return nil, err
		}
		return r, nil
	}
}

const (
	leaving = "interface = \"right\"\ndirection = \"egress\"\nmode = \"police\""
	seeing  = "interface = \"right\"\ndirection = \"egress\"\nobserve = true"
	coming  = "interface = \"left\"\ndirection = \"ingress\"\nmode = \"police\""
	early   = coming + "\nhook = \"xdp\""

	bySource = `"source"`
)

// byTC adds a queue of the kernel to the interface towards the downstream.
func byTC(commands ...string) func(context.Context, task) (*running, error) {
	return func(_ context.Context, t task) (*running, error) {
		r := kernelShaper(t)
		for i, c := range commands {
			if err := t.net.middle.Run("tc", strings.Fields(c)...); err != nil {
				if i > 0 {
					_ = r.stop()
				}
				return nil, err
			}
		}
		return r, nil
	}
}

// byNFT adds a table of nftables, whose commands are in braces.
func byNFT(table string) func(context.Context, task) (*running, error) {
	return func(_ context.Context, t task) (*running, error) {
		if err := t.net.middle.Run("nft", "add table ip bench "+table); err != nil {
			return nil, err
		}
		return &running{to: atDownstream, undo: func() error { return t.net.middle.Run("nft", "delete table ip bench") }}, nil
	}
}

var (
	plain    = row{name: "plain forwarding", start: startDirect}
	policing = row{name: "shaperd, police, 1 limit", start: attached(leaving, bySource)}
	byHTB    = row{name: "htb", peer: true, start: byTC("qdisc add dev right root handle 1: htb default 1",
		fmt.Sprintf("class add dev right parent 1: classid 1:1 htb rate %.0fbit burst 10mb cburst 10mb", far))}
	byLimit = row{name: "nftables", peer: true, start: byNFT("{ chain f { type filter hook forward priority 0; limit rate over 10000000/second drop; }; }")}
	// forwarders limit all together, or each source.
	forwarders = []row{
		policing,
		{name: "shaperd, police, 4 limits", start: attached(leaving, bySource, ``, `"port"`, `"source", "port"`)},
		{name: "shaperd, police, at ingress", start: attached(coming, bySource)},
		{name: "shaperd, police, by XDP", start: attached(early, bySource)},
		{name: "shaperd, observe, 1 limit", start: attached(seeing, bySource)},
		plain,
		byHTB,
		{name: "tbf", peer: true, start: byTC(fmt.Sprintf("qdisc add dev right root tbf rate %.0fbit burst 10mb latency 50ms", far))},
		byLimit,
	}
)

func toDownstream(n *network, b binaries) task { return task{net: n, bins: b} }

func loadsW10(short bool) (list []load) {
	list = append(packetLoads(short), guestLoads(short)...)
	sizes, span, rows := []int{200, 1200}, time.Second, forwarders
	if short {
		sizes, rows = sizes[:1], []row{policing, plain, byHTB, byLimit}
	}
	for _, size := range sizes {
		list = append(list, load{
			name:  fmt.Sprintf("forwarding, datagrams of %d B", size),
			about: "datagrams of one source, one by one, over a router that limits them to far more than it can carry", headline: "machine-packet", repeat: 2,
			figures: []string{"packets", "machine-packet"}, rows: rows, baseline: policing.name,
			task: toDownstream,
			measure: func(ctx context.Context, n *network, r *running) (sample, error) {
				return measureDatagrams(ctx, n, r, size, span, func(ctx context.Context) error {
					return blast(ctx, n.client, source(0), r.to, size, false)
				})
			},
		})
	}
	if !short {
		list = append(list, load{
			name:  "forwarding, TCP",
			about: "4 connections that send all they can, in trains of segments", headline: "throughput", repeat: 2,
			figures: []string{"throughput", "machine"}, rows: rows, baseline: policing.name,
			task: toDownstream,
			measure: func(ctx context.Context, n *network, r *running) (sample, error) {
				return measureThroughput(ctx, n, r, 4, 256<<10, span)
			},
		})
	}
	return list
}

// spoofedSources is how many addresses the datagrams of a flood come from.
const spoofedSources = 200_000

// spoofed is a flood from many sources, each with a limit of its own.
func spoofed(short bool) load {
	const size = 200
	span := 2 * time.Second
	if short {
		span = time.Second
	}
	return load{
		name:  "a flood of 200,000 sources",
		about: "datagrams of 200 B with random sources of 200,000, over a router that limits each source to far more than there is", headline: "machine-packet", repeat: 2,
		figures: []string{"packets", "machine-packet"}, baseline: policing.name,
		rows: []row{policing, plain, {name: "nftables", peer: true, start: byNFT(
			"{ set sources { type ipv4_addr; size 1048576; flags dynamic,timeout; timeout 60s; };" +
				" chain f { type filter hook forward priority 0; add @sources { ip saddr limit rate over 10000000/second } drop; }; }")}},
		task: toDownstream,
		measure: func(ctx context.Context, n *network, r *running) (sample, error) {
			for _, link := range []string{"all", "left"} {
				if err := n.middle.Sysctl("net/ipv4/conf/"+link+"/rp_filter", "0"); err != nil {
					return sample{}, err
				}
			}
			return measureDatagrams(ctx, n, r, size, span, func(ctx context.Context) error {
				return flood(ctx, n.client, r.to, size)
			})
		},
	}
}

// flood sends datagrams from random addresses until ctx ends.
func flood(ctx context.Context, h *lab.Host, to netip.AddrPort, size int) error {
	var c *net.IPConn
	// Of this protocol, IPPROTO_RAW, a packet's header comes with it.
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
