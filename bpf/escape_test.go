package bpf

import (
	"cmp"
	"embed"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"path"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd/shaper"
)

var (
	escapeTime = flag.Duration("escape.time", time.Second/2, "how long TestEscape searches, for each kind of limit")
	escapeFrom = flag.Uint64("escape.from", 0, "the first of its sequences, of those that -seed makes")
	escapeMax  = flag.Uint64("escape.count", 0, "how many of them; 0 is as many as there is time for, and 200")
)

// The corpus: sequences that once escaped. A test that fails prints what to put here.
//
//go:embed testdata/escape
var escapeCorpus embed.FS

// TestEscape sends sequences of packets, random and mutated ones, through a router with
// limits to a receiver, both of them this kernel. What the receiver's sockets get is at
// most what the limits were charged, and each connection that it has is one that they count.
func TestEscape(t *testing.T) {
	load := func(ethernet uint32, variables map[string]any) *bench {
		// A test that stands still for a while is not to lose connections; and the map holds
		// those of some time.
		variables[kernelVarUnsettled], variables[kernelVarHalfOpen] = uint64(20*time.Second), uint64(20*time.Second)
		return newVariant(t, kernelAttachment{Mode: uint32(Police), Keep: 1, IdleTimeout: testIdle, Ethernet: ethernet}, variables)
	}
	plain, bare := load(1, map[string]any{}), load(0, map[string]any{})
	crowded := load(1, map[string]any{
		kernelVarCrowd: uint64(0), kernelVarTurnInterval: uint64(escapeTurn), kernelVarSweepInterval: uint64(escapeTurn / 2),
	})
	for _, c := range []struct {
		name   string
		limits []escapeLimit
		gate   gate
	}{
		{"bytes", byteLimits, gate{}},
		{"bytes without Ethernet", byteLimits, gate{bare: true}},
		{"bytes by XDP", byteLimits, gate{xdp: true}},
		{"connections", connectionLimits, gate{}},
		{"connections by XDP", connectionLimits, gate{xdp: true}},
		{"connections without reserved slots", connectionLimits, gate{late: true}},
		{"connections in a crowd", connectionLimits, gate{late: true, crowded: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			programs := plain
			switch {
			case c.gate.bare:
				programs = bare
			case c.gate.crowded:
				programs = crowded
			}
			e := newEscape(t, programs, c.limits, c.gate)
			files, err := escapeCorpus.ReadDir("testdata/escape")
			if err != nil {
				t.Fatal(err)
			}
			for _, file := range files {
				t.Run(file.Name(), func(t *testing.T) {
					onOneCPU(t)
					data, err := escapeCorpus.ReadFile(path.Join("testdata/escape", file.Name()))
					if err != nil {
						t.Fatal(err)
					}
					steps, err := parseSteps(string(data))
					if err != nil {
						t.Fatal(err)
					}
					if found := e.play(steps); found != "" {
						t.Error(found)
					}
				})
			}
			t.Run("search", e.search)
		})
	}
}

// search plays random sequences until one escapes, and makes that as short as it can.
func (e *escape) search(t *testing.T) {
	onOneCPU(t)
	newRand(t) // tells the seed
	end := time.Now().Add(*escapeTime)
	generate := func(n, source uint64) []step {
		return newSequence(rand.New(rand.NewPCG(*seed, n)), source, e.counts, e.gate.crowded)
	}
	source, n := uint64(0), *escapeFrom
	least := n + cmp.Or(*escapeMax, 200)
	for ; n < least || time.Now().Before(end) && *escapeMax == 0; n++ {
		source++
		steps := generate(n, source)
		found := e.play(steps)
		if found == "" {
			continue
		}
		for again := true; again; {
			again = false
			for i := 0; i < len(steps); i++ {
				source++
				fewer := generate(n, source)
				if len(fewer) != len(steps) { // steps were taken out: match them by their place
					fewer = pick(fewer, steps)
				}
				fewer = append(fewer[:i:i], fewer[i+1:]...)
				if s := e.play(fewer); s != "" {
					steps, found, again = fewer, s, true
					i--
				}
			}
		}
		t.Fatalf("sequence %d (-seed=%d -escape.from=%d -escape.count=1): %s\n%s", n, *seed, n, found, formatSteps(steps))
	}
	e.tell(t, n-*escapeFrom)
}

// pick returns those of all that have the numbers of some.
func pick(all, some []step) []step {
	var picked []step
	for _, s := range some {
		picked = append(picked, all[s.number])
	}
	return picked
}

// tell logs what was seen, and fails when that proves nothing.
func (e *escape) tell(t *testing.T, n uint64) {
	t.Logf("%d sequences, %d frames, %d datagrams and %d bytes received, %d connections", n, e.frames, e.received, e.bytes, e.accepted)
	if *escapeMax > 0 {
		return
	}
	if e.received < n/10 || e.counts && e.accepted < n/20 {
		t.Error("too few of something")
	}
}

// escapeLimit is a limit, and whether it holds what a receiver got.
type escapeLimit struct {
	shaper.Limit
	holds func(d *delivery) bool
}

// delivery is what a socket got: a datagram, or what there was to read of a connection.
type delivery struct {
	protocol shaper.Protocol
	source   netip.Addr
	port     uint16
	bytes    uint64
}

var (
	sources1 = []netip.Prefix{netip.MustParsePrefix("10.1.0.0/17"), netip.MustParsePrefix("fd01:0:0:1::/64")}
	within1  = func(d *delivery) bool { return sources1[0].Contains(d.source) || sources1[1].Contains(d.source) }

	byteLimits = []escapeLimit{
		{shaper.Limit{Name: "all"}, func(*delivery) bool { return true }},
		{shaper.Limit{Name: "udp", Match: shaper.Match{Protocol: shaper.UDP}}, func(d *delivery) bool { return d.protocol == shaper.UDP }},
		{shaper.Limit{Name: "tcp", Match: shaper.Match{Protocol: shaper.TCP}}, func(d *delivery) bool { return d.protocol == shaper.TCP }},
		{shaper.Limit{Name: "icmp", Match: shaper.Match{Protocol: shaper.ICMP}}, func(d *delivery) bool { return d.protocol == shaper.ICMP }},
		{shaper.Limit{Name: "source", Match: shaper.Match{Source: sources1}}, within1},
		{shaper.Limit{Name: "port", Match: shaper.Match{Port: []shaper.PortRange{{First: escapePort, Last: escapePort}}}}, func(d *delivery) bool { return d.port == escapePort }},
		{shaper.Limit{Name: "udp port", Match: shaper.Match{Protocol: shaper.UDP, Port: []shaper.PortRange{{First: otherPort, Last: otherPort}}}}, func(d *delivery) bool { return d.protocol == shaper.UDP && d.port == otherPort }},
		{shaper.Limit{Name: "source, port", Match: shaper.Match{Source: sources1, Port: []shaper.PortRange{{First: otherPort, Last: otherPort}}}}, func(d *delivery) bool { return within1(d) && d.port == otherPort }},
	}
	connectionLimits = []escapeLimit{
		{shaper.Limit{Name: "all"}, func(*delivery) bool { return true }},
		{shaper.Limit{Name: "modbus", Match: shaper.Match{Protocol: shaper.TCP, Port: []shaper.PortRange{{First: escapePort, Last: escapePort}}}, Connections: 1 << 20}, func(d *delivery) bool { return d.protocol == shaper.TCP && d.port == escapePort }},
	}
)

// escape is a router and a receiver.
type escape struct {
	t        testing.TB
	b        *tcpBench
	limits   []escapeLimit
	numbers  map[string]uint32 // of the limits' counters
	counts   bool              // connections
	gate     gate
	tap      int
	datagram []int // sockets: UDP, raw
	listen   []int
	marker   int
	isn      map[uint16]uint32 // of the receiver, by the client's port
	got      []got
	conns    []*accepted
	before   []kernelState
	buf, out []byte
	frames   uint64
	received uint64
	bytes    uint64
	accepted uint64
	passes   uint64
}

// gate is where packets come in.
type gate struct {
	bare bool // of Ethernet
	xdp  bool // it comes before packets are joined, and meets no trains
	late bool // SYNs reserve no slots; the receiver takes their data

	crowded bool // handshakes that take long are forgotten
}

// got is a delivery by a socket.
type got struct {
	delivery
	raw bool
}

// accepted is a connection that the receiver has.
type accepted struct {
	fd   int
	from netip.AddrPort
	port uint16
	to   netip.Addr
}

// The receiver's addresses and ports, and the router's at the gate.
const (
	escapePort = 9999
	otherPort  = 7777
	markPort   = 40000
)

var (
	escapeMAC  = [6]byte{2, 0, 0, 0, 0, 1}
	escapeTo4  = netip.MustParseAddr("10.2.0.2")
	escapeTo6  = netip.MustParseAddr("fd02::2")
	vnetHeader = 10
	escapeTurn = 2 * time.Millisecond // how often each connection is looked at

	routerAddrs = []netip.Addr{
		netip.MustParseAddr("10.1.255.254"), netip.MustParseAddr("fd01::ffff"),
		netip.MustParseAddr("10.2.0.1"), netip.MustParseAddr("fd02::1"),
	}
)

// states are the counters of the limits.
func (e *escape) states() []kernelState {
	all := make([]kernelState, len(e.limits))
	for i := range all {
		var err error
		if all[i], err = e.b.state(e.numbers[e.limits[i].Name]); err != nil {
			e.t.Fatal(err)
		}
	}
	return all
}

// play sends a sequence, and says what of it escaped.
func (e *escape) play(steps []step) string {
	e.got = e.got[:0]
	for i := range steps {
		e.take(&steps[i])
	}
	e.settle()
	e.receive()
	after := e.states()
	found := e.judge(after)
	for _, c := range e.conns {
		_ = unix.SetsockoptLinger(c.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		unix.Close(c.fd)
	}
	e.conns = e.conns[:0]
	clear(e.isn)
	if e.counts {
		e.settle()
		e.answers()
	}
	e.before = e.states()
	return found
}

// judge says which limit was charged for less than the receiver got, or which connection
// is not counted.
func (e *escape) judge(after []kernelState) string {
	var found []string
	for i, l := range e.limits {
		var charged, packets, bytes [2]uint64
		for j := range 2 {
			charged[0] += after[i].Taken[j][0] - e.before[i].Taken[j][0]
			charged[1] += after[i].Taken[j][1] - e.before[i].Taken[j][1]
		}
		for _, g := range e.got {
			kind := 0
			if g.raw {
				kind = 1
			}
			if l.holds(&g.delivery) {
				bytes[kind] += g.bytes
				packets[kind]++
			}
		}
		for kind, of := range []string{"sockets", "raw sockets"} {
			if bytes[kind] > charged[0] {
				found = append(found, fmt.Sprintf("limit %q was charged %d bytes, the receiver's %s got %d", l.Name, charged[0], of, bytes[kind]))
			}
			if packets[kind] > charged[1] {
				found = append(found, fmt.Sprintf("limit %q was charged %d packets, the receiver's %s got %d: %+v", l.Name, charged[1], of, packets[kind], e.got))
			}
		}
	}
	for _, c := range e.conns {
		if e.counts && c.port == escapePort && c.lives() && !e.counted(c) {
			found = append(found, fmt.Sprintf("the receiver has a connection from %v that is not counted", c.from))
		}
	}
	return strings.Join(found, "\n")
}

// lives reports whether the receiver can still get anything from it, or send.
func (c *accepted) lives() bool {
	info, err := unix.GetsockoptTCPInfo(c.fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	return err == nil && (info.State == unix.BPF_TCP_ESTABLISHED || info.State == unix.BPF_TCP_CLOSE_WAIT || info.State == unix.BPF_TCP_FIN_WAIT2 || info.State == unix.BPF_TCP_SYN_RECV)
}

// counted reports whether the programs hold a slot for it.
func (e *escape) counted(c *accepted) bool {
	key := kernelTuple{Initiator: words(c.from.Addr()), Responder: words(c.to), InitiatorPort: c.from.Port(), ResponderPort: c.port}
	var f kernelFlight
	return e.b.Connections.Lookup(&key, &f) == nil && f.Word&flightClosed == 0 && f.SlotPlace[0] != nowhere
}

// words is an address as the programs have it.
func words(a netip.Addr) (w [4]uint32) {
	b := a.As16()
	for i := range w {
		w[i] = binary.BigEndian.Uint32(b[4*i:])
	}
	return w
}

// take does what a step says.
func (e *escape) take(s *step) {
	switch s.kind {
	case stepWait:
		time.Sleep(3 * escapeTurn)
		return
	case stepWrite, stepShutdown:
		e.accept()
		for _, c := range e.conns {
			if s.kind == stepWrite {
				_, _ = unix.Write(c.fd, make([]byte, 100))
			} else {
				_ = unix.Shutdown(c.fd, unix.SHUT_WR)
			}
		}
		return
	}
	train := s.vnet[1] != 0
	if train && e.gate.xdp {
		return
	}
	e.out = append(append(e.out[:0], s.vnet[:]...), s.frame...)
	if s.tcp > 0 {
		e.answers()
		at := e.out[vnetHeader+s.tcp:]
		acknowledging(at, e.isn[binary.BigEndian.Uint16(at)], train)
	}
	e.write(e.out)
}

func (e *escape) write(frame []byte) {
	e.frames++
	if e.gate.bare {
		l3 := 14
		if frame[vnetHeader+12] == 0x81 {
			l3 = 18
		}
		if frame[0] != 0 { // offsets of what a train has
			frame[2] -= byte(l3)
			frame[6] -= byte(l3)
		}
		frame = append(frame[:vnetHeader], frame[vnetHeader+l3:]...)
	}
	if _, err := unix.Write(e.tap, frame); err != nil && !errors.Is(err, unix.EINVAL) {
		e.t.Fatalf("write %x: %v", frame, err)
	}
}
