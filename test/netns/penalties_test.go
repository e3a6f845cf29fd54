package netns

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/api"
)

// rawPackets sends IPv4 packets with any source.
type rawPackets struct {
	fd int
	to netip.Addr
}

func (h *host) newRawPackets(t testing.TB, to netip.Addr) *rawPackets {
	t.Helper()
	r := &rawPackets{to: to}
	must(t, h.Do(func() (err error) {
		r.fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return err
	}))
	t.Cleanup(func() { unix.Close(r.fd) })
	return r
}

// send sends a segment or datagram, without its checksum, of which sumAt is the offset.
func (r *rawPackets) send(from netip.Addr, protocol byte, l4 []byte, sumAt int) error {
	src, dst := from.As4(), r.to.As4()
	pseudo := append(append(src[:], dst[:]...), 0, protocol, byte(len(l4)>>8), byte(len(l4)))
	binary.BigEndian.PutUint16(l4[sumAt:], 0)
	sum := uint32(0)
	for _, b := range [][]byte{pseudo, l4} {
		for i := 0; i < len(b); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(b[i:]))
		}
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(l4[sumAt:], ^uint16(sum))
	ip := make([]byte, 20, 20+len(l4)) // the kernel fills in length, ID and checksum
	ip[0], ip[8], ip[9] = 0x45, 64, protocol
	copy(ip[12:], src[:])
	copy(ip[16:], dst[:])
	return unix.Sendto(r.fd, append(ip, l4...), 0, &unix.SockaddrInet4{Addr: dst})
}

// syn sends a SYN, and udp a datagram of 4 bytes.
func (r *rawPackets) syn(from netip.AddrPort, port uint16) error {
	b := make([]byte, 20)
	binary.BigEndian.PutUint16(b, from.Port())
	binary.BigEndian.PutUint16(b[2:], port)
	binary.BigEndian.PutUint32(b[4:], 1000)
	b[12], b[13], b[14] = 5<<4, 2, 0xff
	return r.send(from.Addr(), unix.IPPROTO_TCP, b, 16)
}

func (r *rawPackets) udp(from netip.AddrPort, port uint16) error {
	b := make([]byte, 12)
	binary.BigEndian.PutUint16(b, from.Port())
	binary.BigEndian.PutUint16(b[2:], port)
	binary.BigEndian.PutUint16(b[4:], 12)
	return r.send(from.Addr(), unix.IPPROTO_UDP, b, 6)
}

// penalized returns the sources that are blocked.
func (d *daemon) penalized() (sources []string) {
	d.t.Helper()
	all, err := d.api().Penalties(d.t.Context())
	must(d.t, err)
	for _, y := range all {
		if y.Active {
			sources = append(sources, y.Source)
		}
	}
	return sources
}

// TestPenalties floods with forged SYNs and datagrams of an honest source, which blocks nobody. A scanner that really connects is out
// after its 100th refusal, also after a crash, and a source that is excepted never.
func TestPenalties(t *testing.T) {
	t.Parallel()
	f := ipv4
	scanner, exempt, honest := f.sources[0], f.sources[1], f.sources[2]
	n := newNetwork(t)
	n.downstream.serveSlowly(t, f.tcp(), 0)
	n.downstream.answerUDP(t, f.udp(), func([]byte, netip.AddrPort) bool { return true })
	text := config(f, limit("flows", onUDP, `key = ["source"]`, `new_connections = "20/s"`, `queue_timeout = "0s"`),
		limit("logins", onTCP, `key = ["source"]`, `new_connections = "20/s"`, "burst_connections = 20", `queue_timeout = "0s"`)) +
		fmt.Sprintf("\n[[penalty]]\nlimit = \"logins\"\nafter = \"100/min\"\nblock = \"10m\"\nexcept = { source = [%q] }\n", exempt)
	state := filepath.Join(t.TempDir(), "state")
	d := n.shaper.shaperd(t, text, "--state", state)

	const forged = 20_000
	raw := n.client.newRawPackets(t, f.proxy)
	for i := range forged {
		from := netip.AddrPortFrom(honest, uint16(1024+i))
		must(t, raw.syn(from, f.listenAddr().Port()))
		must(t, raw.udp(from, f.udpListenAddr().Port()))
		if i%50 == 0 {
			time.Sleep(time.Millisecond)
		}
	}
	m := d.metrics()
	refused, accepted := m.Sum("shaperd_limit_connections_total", `limit="flows"`, `verdict="refuse"`), m.Sum("shaperd_listener_connections_accepted_total")
	segments, err := n.shaper.Output("nstat", "-az", "TcpInSegs")
	must(t, err)
	t.Logf("%v forged flows were refused, %v connections accepted; %s", refused, accepted, strings.Fields(segments))
	if refused < 1000 || accepted > 0 {
		t.Errorf("%v forged flows were refused, and %v connections accepted", refused, accepted)
	}
	if got := d.penalized(); len(got) > 0 {
		t.Errorf("a forged flood has %v blocked", got)
	}
	for range 10 {
		if _, err := n.client.request(honest, f.listenAddr()); err != nil {
			t.Errorf("an honest source: %v", err)
		}
	}

	// The scanner connects as fast as it can, and counts its refusals.
	passed, refusals := 0, 0
	var at time.Time                        // of its 100th refusal
	end := time.Now().Add(50 * time.Second) // refusals count for a minute
	for time.Now().Before(end) && (at.IsZero() || time.Since(at) < 3*time.Second || refusals < 200) {
		if _, err := n.client.request(scanner, f.listenAddr()); err == nil {
			passed++
			if !at.IsZero() {
				t.Errorf("the scanner got through %v after its 100th refusal", time.Since(at))
			}
		} else if refusals++; refusals == 100 {
			at = time.Now()
		}
	}
	t.Logf("%d connections of the scanner passed, %d were refused", passed, refusals)
	if at.IsZero() || passed == 0 || refusals < 200 {
		t.Fatalf("%d connections of the scanner passed, %d were refused", passed, refusals)
	}
	blocked := func() {
		t.Helper()
		for range 5 {
			if _, err := n.client.request(scanner, f.listenAddr()); err == nil {
				t.Error("the scanner gets through")
			}
		}
		if _, err := n.client.request(honest, f.listenAddr()); err != nil {
			t.Errorf("an honest source: %v", err)
		}
		if got, want := d.penalized(), scanner.String()+"/32"; len(got) != 1 || got[0] != want {
			t.Errorf("%v are blocked, want %s alone", got, want)
		}
	}
	for range 500 {
		_, _ = n.client.request(exempt, f.listenAddr())
	}
	blocked()
	time.Sleep(2 * time.Second) // it is saved within one, and the rate of the others is there again
	if _, err := n.client.request(exempt, f.listenAddr()); err != nil {
		t.Errorf("a source that is excepted: %v", err)
	}
	before, err := d.api().Penalties(t.Context())
	must(t, err)
	d.Kill()
	d = n.shaper.shaperdWith(t, d.Notify.Stored, text, "--state", state)
	blocked()
	after, err := d.api().Penalties(t.Context())
	must(t, err)
	find := func(all []api.Penalty) api.Penalty {
		for _, y := range all {
			if y.Active {
				return y
			}
		}
		return api.Penalty{}
	}
	if a, b := find(before), find(after); a.Until.Sub(b.Until).Abs() > time.Second || a.Times != b.Times {
		t.Errorf("%+v before the crash, %+v after", a, b)
	}
}
