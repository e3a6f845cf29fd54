package netns

import (
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"
)

// TestHarness sends from client to downstream with no daemon between, the shaper
// routing, and holds the capture and the analysis to what was sent.
func TestHarness(t *testing.T) {
	for _, f := range families {
		t.Run(f.name+"/udp", func(t *testing.T) {
			n := newNetwork(t)
			n.forward(t)
			to := netip.AddrPortFrom(f.downstream, udpPort)
			n.downstream.discardUDP(t, to)
			stalls := startStallWatch(t)
			c := n.downstream.capture(t, downstreamLink, udpPort, 1<<14)
			p := n.client.newPaced(t, f.sources[1], to, paced{tag: 7, size: 512, rate: 5000})
			sent, err := p.send(500 * time.Millisecond)
			if err != nil {
				t.Fatal(err)
			}
			list, report := c.stop(), stalls.stop()
			if sent != 2500 || len(list) != sent {
				t.Fatalf("%d of %d datagrams were captured, want 2500 of 2500", len(list), sent)
			}
			for _, a := range list {
				if a.payload != 512 || a.tag() != 7 || a.from.Addr() != f.sources[1] || a.to != to || a.outgoing {
					t.Fatalf("captured %+v, want 512 bytes with tag 7 from %v to %v", a, f.sources[1], to)
				}
				if late := a.at - a.sent(c); late < 0 || late > 10*time.Millisecond+report.longest() {
					t.Errorf("arrived %v after it was sent", late)
				}
			}
			// The sender makes up for what a stall held up.
			e := envelope{rate: 5000, burst: 50, unit: "datagrams"}
			if err := e.checkMean(packetsOf(list), 0.02, report); err != nil {
				t.Error(err)
			}
			if err := e.checkBurst(packetsOf(list), report); err != nil {
				t.Error(err)
			}
			e.rate /= 2
			if e.checkMean(packetsOf(list), 0.02, report) == nil || e.checkBurst(packetsOf(list), report) == nil {
				t.Error("the checks accept twice the rate")
			}
			t.Logf("sigma %.1f datagrams; %v", sigma(packetsOf(list), 5000), report)
		})
		t.Run(f.name+"/tcp", func(t *testing.T) {
			n := newNetwork(t)
			n.forward(t)
			to := netip.AddrPortFrom(f.downstream, tcpPort)
			s := n.downstream.newSink(t, to)
			c := n.downstream.capture(t, downstreamLink, tcpPort, 1<<17)
			b := n.client.newBulk(t, f.sources[0], to, 3, 'x')
			if err := b.send(4 << 20); err != nil {
				t.Fatal(err)
			}
			s.wait(t, 'x', b.sent.Load(), 5*time.Second)
			list := c.stop()
			var in []arrival
			syns := 0
			for _, a := range list {
				if a.outgoing {
					continue
				}
				in = append(in, a)
				if a.flags&flagSYN != 0 {
					syns++
				}
				if a.payload > 1460 {
					t.Fatalf("captured %d bytes in one frame: segments are joined", a.payload)
				}
			}
			if syns != 3 || len(in) == len(list) {
				t.Errorf("captured %d openings of 3, %d of %d frames incoming", syns, len(in), len(list))
			}
			if got := total(bytesOf(in)); int64(got) != b.sent.Load() {
				t.Errorf("captured %d bytes, sent were %d", got, b.sent.Load())
			}
			if got := len(s.of('x', in)); got != len(in) {
				t.Errorf("the sink knows %d of %d frames", got, len(in))
			}
			e := envelope{rate: 10 << 20, burst: 24e3, unit: "bytes"}
			if e.checkBurst(bytesOf(in), nil) == nil {
				t.Error("the check accepts a stream that nobody shapes")
			}
			t.Logf("%.0f MB/s, sigma over 10 MiB/s %.0f bytes", meanRate(bytesOf(in))/1e6, sigma(bytesOf(in), 10<<20))
		})
	}
}

// TestSweep finds what a crashed run left behind, and leaves alone what is in use.
func TestSweep(t *testing.T) {
	gone := exec.Command("true")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	name := func(pid int) string { return strings.Join([]string{"shaperd", strconv.Itoa(pid), "0", "sweep"}, "-") }
	left, mine := name(gone.Process.Pid), name(os.Getpid())
	newHost(t, left)
	newHost(t, mine)
	if err := sweep("/run/netns"); err != nil {
		t.Fatal(err)
	}
	if ns, err := netns.GetFromName(left); err == nil {
		ns.Close()
		t.Errorf("%s is still there", left)
	}
	ns, err := netns.GetFromName(mine)
	if err != nil {
		t.Fatalf("%s was removed: %v", mine, err)
	}
	ns.Close()
}
