package bpf

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"shaperd.dev/shaperd/shaper"
)

// Flags of TCP.
const (
	fin = 1 << iota
	syn
	rst
	_
	ack
)

// The sides of a connection.
const (
	client = iota
	server
)

// dialogue generates the segments of a TCP connection.
type dialogue struct {
	ends [2]netip.AddrPort
	next [2]uint32 // next sequence numbers
}

// testClient is the client of most dialogues.
const testClient = "10.0.0.1:40000"

var testServer = netip.MustParseAddrPort("10.9.9.9:5432")

// dial returns a new connection.
func dial(clientEnd string) *dialogue {
	d := &dialogue{ends: [2]netip.AddrPort{netip.MustParseAddrPort(clientEnd), testServer}}
	d.next[client] = 1000 * uint32(d.ends[client].Port())
	d.next[server] = ^d.next[client]
	return d
}

// nextSegment returns the next segment of a side, with n bytes of payload.
func (d *dialogue) nextSegment(side int, flags byte, n int) []byte {
	b := d.segment(side, flags, d.next[side], d.next[1-side], n)
	d.next[side] += uint32(n)
	if flags&syn != 0 {
		d.next[side]++
	}
	if flags&fin != 0 {
		d.next[side]++
	}
	return b
}

// segment returns a segment of a side, with valid checksums.
func (d *dialogue) segment(side int, flags byte, seq, acked uint32, n int) []byte {
	var options []byte
	if flags&syn != 0 {
		options = []byte{2, 4, 0x05, 0xb4, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7}
	}
	l4 := make([]byte, 20+len(options)+n)
	from, to := d.ends[side], d.ends[1-side]
	binary.BigEndian.PutUint16(l4, from.Port())
	binary.BigEndian.PutUint16(l4[2:], to.Port())
	binary.BigEndian.PutUint32(l4[4:], seq)
	if flags&ack != 0 {
		binary.BigEndian.PutUint32(l4[8:], acked)
	}
	l4[12] = byte(20+len(options)) / 4 << 4
	l4[13] = flags
	binary.BigEndian.PutUint16(l4[14:], 64240)
	copy(l4[20:], options)
	for i := range n {
		l4[20+len(options)+i] = byte(i)
	}
	binary.BigEndian.PutUint16(l4[16:], ^checksum(l4, pseudo(from.Addr(), to.Addr(), len(l4))))

	b := []byte{2, 0, 0, 0, 0, byte(2 - side), 2, 0, 0, 0, 0, byte(1 + side)}
	if from.Addr().Is4() {
		b = append(b, 0x08, 0x00, 0x45, 0x10, 0, 0, 0x12, 0x34, 0x40, 0, 61, ipTCP, 0, 0)
		b = append(append(b, from.Addr().AsSlice()...), to.Addr().AsSlice()...)
		binary.BigEndian.PutUint16(b[16:], uint16(20+len(l4)))
		binary.BigEndian.PutUint16(b[24:], ^checksum(b[14:34], 0))
	} else {
		b = append(b, 0x86, 0xdd, 0x60, 0x01, 0x23, 0x45, byte(len(l4)>>8), byte(len(l4)), ipTCP, 61)
		b = append(append(b, from.Addr().AsSlice()...), to.Addr().AsSlice()...)
	}
	return append(b, l4...)
}

// pseudo returns the sum of TCP's pseudo-header.
func pseudo(from, to netip.Addr, length int) uint32 {
	return uint32(checksum(from.AsSlice(), 0)) + uint32(checksum(to.AsSlice(), 0)) + ipTCP + uint32(length)
}

func checksum(b []byte, sum uint32) uint16 {
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}

// tcpBench has the programs of an attachment whose limits count connections.
type tcpBench struct {
	*bench
	t       testing.TB
	now     uint64 // ns
	forgets bool   // it drops handshakes early
}

const (
	testIdleTimeout     = uint64(time.Hour)
	testClosingTimeout  = uint64(10 * time.Second)
	testHalfOpenTimeout = uint64(3 * time.Second)
)

// newTCP returns a bench with a clock that the test sets.
func newTCP(t testing.TB, mode shaper.AttachMode, limits ...shaper.Limit) *tcpBench {
	return newTCPVariant(t, mode, map[string]any{kernelVarUnderTest: uint32(1)}, testIdleTimeout, limits...)
}

func newTCPVariant(t testing.TB, mode shaper.AttachMode, variables map[string]any, idle uint64, limits ...shaper.Limit) *tcpBench {
	t.Helper()
	at := kernelConfig{Mode: programModes[mode], Ethernet: 1, Keep: 1, IdleTimeout: idle}
	b := &tcpBench{bench: newVariant(t, at, variables), t: t, now: uint64(time.Hour)}
	_, b.forgets = variables[kernelVarEarlyDropThreshold]
	b.clearMaps()
	b.setLimits(limits...)
	return b
}

// capped returns a cap on the connections of each source.
func capped(n int) shaper.Limit {
	return shaper.Limit{Name: "capped", Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64, MaxConnections: n}
}

// dropSilently makes a limit drop instead of replying with RSTs: a repeated test run continues
// with the packet as the last run left it.
func dropSilently(l shaper.Limit) shaper.Limit {
	l.RefuseWith = shaper.RefuseDrop
	return l
}

// setLimits replaces the limits.
func (b *tcpBench) setLimits(limits ...shaper.Limit) {
	b.t.Helper()
	limits = append([]shaper.Limit(nil), limits...)
	for i := range limits {
		limits[i].Match.Attach = []string{"here"}
		if limits[i].IPv4Prefix == 0 {
			limits[i].IPv4Prefix, limits[i].IPv6Prefix = 32, 64
		}
	}
	b.loadLimits(b.t, limits, nil)
}

// Actions on a packet of the initiator.
const (
	passed   = tcNext
	dropped  = tcDrop
	answered = 7 // redirected as an RST
)

// send runs the limiting program on a packet of the initiator.
func (b *tcpBench) send(packet []byte) (action uint32, d kernelDecision, stamp uint64) {
	b.t.Helper()
	return b.run(b.t, &sample{data: packet}, b.now, (*bench).tc)
}

// reply runs the reply program on a packet of the responder.
func (b *tcpBench) reply(packet []byte) {
	b.t.Helper()
	if err := b.TestNow.Set(b.now); err != nil {
		b.t.Fatal(err)
	}
	action, err := b.ShaperdReplies.Run(&ebpf.RunOptions{Data: packet})
	if err != nil {
		b.t.Fatal(err)
	}
	if action != tcNext {
		b.t.Errorf("a reply met action %d", int32(action))
	}
}

// exchange runs the next segment of a side through its program.
func (b *tcpBench) exchange(d *dialogue, side int, flags byte, n int) uint32 {
	b.t.Helper()
	packet := d.nextSegment(side, flags, n)
	if side == server {
		b.reply(packet)
		return passed
	}
	action, _, _ := b.send(packet)
	return action
}

// open sends the first SYN of a connection.
func (b *tcpBench) open(d *dialogue) uint32 {
	b.t.Helper()
	return b.exchange(d, client, syn, 0)
}

// establish completes a handshake and exchanges data.
func (b *tcpBench) establish(d *dialogue) {
	b.t.Helper()
	if action := b.open(d); action != passed {
		b.t.Fatalf("SYN of %v met action %d", d.ends, int32(action))
	}
	b.exchange(d, server, syn|ack, 0)
	b.exchange(d, client, ack, 0)
	b.exchange(d, server, ack, 100)
	b.exchange(d, client, ack, 10)
	b.exchange(d, server, ack, 0)
}

// inFlight returns the sum of all slot counts. It fails the test if the connections in the
// map or the counters disagree.
func (b *tcpBench) inFlight() int {
	b.t.Helper()
	sum := 0
	words, err := b.heldSlots(^uint64(0))
	if err != nil {
		b.t.Fatal(err)
	}
	for index, word := range b.slots {
		n := word & slotCount
		if n > slotMax {
			b.t.Errorf("a claim is left at %d", index)
			continue
		}
		sum += int(n)
		if held := words[slotWord{uint32(index), word >> slotBits}]; n > 0 && uint64(held) != n {
			b.t.Errorf("slot word %d counts %d, connections hold %d", index, n, held)
		}
	}
	held, counted := int64(0), int64(0)
	for number, n := range b.heldByLimit() {
		held += n
		if s, err := b.readState(number); err != nil || int64(s.InFlight) != n {
			b.t.Errorf("limit %d: %d in flight by its counter, %d by the connections: %v", number, int64(s.InFlight), n, err)
		}
	}
	for number := range uint32(8) {
		s, err := b.readState(number)
		if err != nil {
			b.t.Fatal(err)
		}
		counted += int64(s.InFlight)
	}
	if held != int64(sum) || counted != int64(sum) {
		b.t.Errorf("%d in flight, but connections hold %d, and counters say %d", sum, held, counted)
	}
	return sum
}

// heldByLimit returns the number of slots that open connections hold, by the number of the limit.
func (b *tcpBench) heldByLimit() map[uint32]int64 {
	b.t.Helper()
	held := map[uint32]int64{}
	if err := b.eachConnection(func(_ *kernelTuple, c *kernelConn) {
		for i, index := range c.SlotIndex {
			if index != noSlot && c.State&connClosed == 0 {
				held[uint32(c.Slot[i]&slotCount)]++
			}
		}
	}); err != nil {
		b.t.Fatal(err)
	}
	return held
}

// expectInFlight fails the test unless n connections are in flight.
func (b *tcpBench) expectInFlight(n int) {
	b.t.Helper()
	if got := b.inFlight(); got != n {
		b.t.Errorf("%d connections in flight, want %d", got, n)
	}
}

// entries returns the numbers of open and closed connections in the map.
func (b *tcpBench) entries() (live, gone int) {
	b.t.Helper()
	if err := b.eachConnection(func(_ *kernelTuple, c *kernelConn) {
		if c.State&connClosed != 0 {
			gone++
		} else {
			live++
		}
	}); err != nil {
		b.t.Fatal(err)
	}
	return live, gone
}

// counters returns the counters of the first limit.
func (b *tcpBench) counters() kernelCounters {
	b.t.Helper()
	s, err := b.readState(0)
	if err != nil {
		b.t.Fatal(err)
	}
	return s
}

// clearMaps empties all maps.
func (b *tcpBench) clearMaps() {
	b.t.Helper()
	b.clearState(b.t)
	clear(b.slots)
	var tuples []kernelTuple
	err := b.eachConnection(func(t *kernelTuple, _ *kernelConn) { tuples = append(tuples, *t) })
	for i := range tuples {
		if err1 := b.Connections.Delete(&tuples[i]); !errors.Is(err1, ebpf.ErrKeyNotExist) { // the sweeper may delete it
			err = errors.Join(err, err1)
		}
	}
	var turn [48]byte
	for b.SweepQueue.LookupAndDelete(nil, &turn) == nil {
	}
	var t kernelTuple
	for b.Reversed.NextKey(nil, &t) == nil {
		_ = b.Reversed.Delete(&t)
	}
	err = errors.Join(err, b.Sweepers.Put(uint32(0), kernelSweeper{}), startSweeper(b.ShaperdSweep))
	if b.forgets {
		n := int(b.Forgotten.MaxEntries())
		lines := make([]uint32, n)
		for i := range lines {
			lines[i] = uint32(i)
		}
		_, err1 := b.Forgotten.BatchUpdate(lines, make([]kernelForgottenLine, n), nil)
		err = errors.Join(err, err1)
	}
	for number := range maxLimits {
		err = errors.Join(err, b.LimitCounters.Put(number, make([]kernelCounters, ebpf.MustPossibleCPU())), b.DeferUntil.Put(number, uint64(0)))
	}
	if err != nil {
		b.t.Fatal(err)
	}
}
