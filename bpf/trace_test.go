package bpf

import (
	"encoding/binary"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/asn"
	"shaperd.dev/shaperd/shaper/config"
)

var update = flag.Bool("update", false, "write the decisions of package shaper into the traces")

const traces = "../shaper/testdata/traces"

// TestTraces runs each trace through package shaper and through the program in the
// kernel, and compares both with the recorded decisions.
//
// A trace is a directory with a policy, as a configuration with the attachment "here"; the
// arrivals, one packet a line; and the decision on each. The words of a line:
//
//	20x              repeated 20 times
//	every=1ms        time since the previous packet
//	from=A to=A:P    addresses and port
//	udp tcp icmp=N   protocol, bytes of payload
//	segments=N       a train of N segments
//	vlan=N           behind a VLAN tag
//	id=N first|later the first fragment of datagram N, or a later one
//	cut              truncated after 4 bytes of the transport header
//	reload=FILE      another policy from here on
func TestTraces(t *testing.T) {
	t.Parallel()
	dirs, err := filepath.Glob(filepath.Join(traces, "*"))
	if err != nil || len(dirs) == 0 {
		t.Fatalf("no traces in %s: %v", traces, err)
	}
	b := newBench(t, kernelConfig{Mode: programModes[shaper.AttachShape], Ethernet: 1, Keep: 1})
	for _, folder := range dirs {
		t.Run(filepath.Base(folder), func(t *testing.T) { b.trace(t, folder) })
	}
}

// replay is one run of a trace.
type replay struct {
	*bench
	t      *testing.T
	folder string
	shaper *shaper.Shaper
	policy *shaper.Policy
	ports  map[uint32]uint16 // ports of fragmented datagrams
	now    leaky.Time
}

func (b *bench) trace(t *testing.T, folder string) {
	b.clearState(t)
	r := &replay{bench: b, t: t, folder: folder, shaper: shaper.New(testKeys), ports: map[uint32]uint16{}, now: 1000 * leaky.Second}
	r.load("policy.toml")
	lines := strings.Split(strings.TrimSpace(r.read("arrivals.txt")), "\n")
	var decisions []string
	seen := map[shaper.Verdict]bool{}
	for i, line := range lines {
		if name, ok := strings.CutPrefix(line, "reload="); ok {
			r.load(name)
			continue
		}
		k, every, times := r.packet(line)
		for range times {
			r.now += every
			want, _, limited := wantDecision(r.shaper, r.policy, &k, r.now, false)
			_, got, _ := b.run(t, &k, uint64(r.now/64), (*bench).tc)
			decision := r.describe(want, limited)
			if kernel := r.describe(r.decision(got), limited); kernel != decision {
				t.Fatalf("line %d, %q: the kernel decides %q, package shaper %q", i+1, line, kernel, decision)
			}
			decisions = append(decisions, decision)
			seen[want.Verdict] = true
		}
	}
	text := strings.Join(decisions, "\n") + "\n"
	file := filepath.Join(folder, "decisions.txt")
	if *update {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(r.read("decisions.txt"), text); diff != "" {
		t.Errorf("decisions (-recorded +got):\n%s", diff)
	}
	if !seen[shaper.Delay] || !seen[shaper.Refuse] {
		t.Error("a trace without delays and refusals proves nothing")
	}
}

func (r *replay) read(name string) string {
	r.t.Helper()
	text, err := os.ReadFile(filepath.Join(r.folder, name))
	if err != nil {
		r.t.Fatal(err)
	}
	return string(text)
}

// load activates a policy in package shaper and in the kernel.
func (r *replay) load(name string) {
	r.t.Helper()
	c, err := config.Load(filepath.Join(r.folder, name))
	if err != nil {
		r.t.Fatal(err)
	}
	var table *asn.Table
	if len(c.ASN.Files) > 0 {
		if table, err = asn.Load(c.ASN.Files...); err != nil {
			r.t.Fatal(err)
		}
	}
	p, err := r.shaper.Compile(c.Limits, nil, c.Attach, table, false)
	if err != nil {
		r.t.Fatal(err)
	}
	r.shaper.Swap(p, r.now)
	n, err := r.assignNumbers(p, []shaper.Attachment{{Name: "here"}}, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	if err := r.installPolicy(p, n, func() leaky.Time { return r.now }); err != nil {
		r.t.Fatal(err)
	}
	r.policy = p
}

// decision converts a decision of the kernel to package shaper's type.
func (r *replay) decision(d kernelDecision) shaper.Decision {
	limit := int(int32(d.Limit))
	return shaper.Decision{Verdict: shaper.Verdict(d.Verdict), Reason: shaper.Reason(d.Reason), Depart: leaky.Time(d.Depart), Limit: limit}
}

// describe formats a decision: delays in ns, with the fraction in ticks.
func (r *replay) describe(d shaper.Decision, limited bool) string {
	if !limited {
		return "no limit"
	}
	if d.Verdict == shaper.Pass {
		return "pass"
	}
	wait := d.Depart - r.now
	return fmt.Sprintf("%v %d+%d/64 ns, %v, %s", d.Verdict, wait/64, wait%64, d.Reason, r.policy.Limit(d.Limit).Name)
}

// packet parses a line and builds its packet.
func (r *replay) packet(line string) (k sample, every leaky.Time, times int) {
	r.t.Helper()
	bad := func(err error) {
		if err != nil {
			r.t.Fatalf("%s: %q: %v", r.folder, line, err)
		}
	}
	number := func(s string) int {
		n, err := strconv.Atoi(s)
		bad(err)
		return n
	}
	k = sample{ip: true, segments: 1}
	times = 1
	var protocol byte
	var vlan, id, payload int
	var first, later, cut bool
	for _, word := range strings.Fields(line) {
		key, value, _ := strings.Cut(word, "=")
		switch key {
		case "every":
			d, err := time.ParseDuration(value)
			bad(err)
			every = leaky.FromDuration(d)
		case "from":
			a, err := netip.ParseAddr(value)
			bad(err)
			k.flow.Source = a
		case "to":
			a, err := netip.ParseAddrPort(value)
			bad(err)
			k.flow.Destination, k.flow.Port = a.Addr(), a.Port()
		case "udp", "tcp", "icmp":
			payload = number(value)
			protocol = map[string]byte{"udp": ipUDP, "tcp": ipTCP, "icmp": ipICMP}[key]
			k.flow.Protocol = map[string]shaper.Protocol{"udp": shaper.UDP, "tcp": shaper.TCP, "icmp": shaper.ICMP}[key]
		case "segments":
			k.segments = uint64(number(value))
			k.gsoSize = uint32(max(payload/int(k.segments), 1))
		case "vlan":
			vlan = number(value)
		case "id":
			id = number(value)
		case "first":
			first = true
		case "later":
			later = true
		case "cut":
			cut = true
		default:
			n, ok := strings.CutSuffix(key, "x")
			if !ok {
				bad(fmt.Errorf("unknown word %q", word))
			}
			times = number(n)
		}
	}
	k.bytes = uint64(max(payload, 1))
	l4 := transport(protocol, k.flow.Port, payload)
	switch {
	case later:
		l4 = make([]byte, payload)
		k.flow.Port = r.ports[uint32(id)]
	case first:
		r.ports[uint32(id)] = k.flow.Port
	case cut:
		l4 = l4[:4]
		k.bytes, k.flow.Port = 4, 0
	}
	if protocol == ipICMP {
		k.flow.Port = 0
	}
	m := newGenerator(newSeededRand(1))
	b := make([]byte, 12)
	if vlan > 0 {
		b = append(b, 0x81, 0, byte(vlan>>8), byte(vlan))
	}
	fragment := first || later
	if k.flow.Source.Is4() {
		k.data = append(append(b, 0x08, 0x00), m.ipv4(k.flow.Source, k.flow.Destination, protocol, l4, fragment, first, uint32(id))...)
	} else {
		if protocol == ipICMP {
			protocol = ipICMPv6
		}
		k.data = append(append(b, 0x86, 0xdd), m.ipv6(k.flow.Source, k.flow.Destination, protocol, l4, fragment, first, uint32(id))...)
	}
	k.flow.Connection = uint64(k.flow.Port) // in a trace each port is a flow
	return k, every, times
}

// transport returns a transport header with a payload.
func transport(protocol byte, port uint16, payload int) []byte {
	var h []byte
	switch protocol {
	case ipTCP:
		h = make([]byte, 20)
		h[12], h[13] = 0x50, 0x10
	case ipUDP:
		h = make([]byte, 8)
	}
	if len(h) > 0 {
		binary.BigEndian.PutUint16(h, 1234)
		binary.BigEndian.PutUint16(h[2:], port)
	}
	return append(h, make([]byte, payload)...)
}
