//go:build vmguest

package guest

import (
	"bufio"
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestQdiscs adds every queueing discipline that tests use, with tc.
func TestQdiscs(t *testing.T) {
	h, _ := newPair(t)
	for _, qdisc := range []string{
		"root fq",
		"root fq_codel",
		"root netem delay 20ms",
		"root htb",
		"root tbf rate 10mbit burst 10kb latency 50ms",
		"root prio",
		"root cake bandwidth 10mbit",
		"clsact",
		"ingress",
	} {
		t.Run(qdisc, func(t *testing.T) {
			words := strings.Fields(qdisc)
			h.run(t, "tc", append([]string{"qdisc", "add", "dev", "out"}, words...)...)
			kind := strings.Fields(strings.TrimPrefix(qdisc, "root "))[0]
			if out := h.run(t, "tc", "qdisc", "show", "dev", "out"); !strings.Contains(out, "qdisc "+kind+" ") {
				t.Errorf("tc shows\n%s", out)
			}
			h.run(t, "tc", "qdisc", "del", "dev", "out", words[0])
		})
	}
}

func TestNetem(t *testing.T) {
	sender, receiver := newPair(t)
	sender.run(t, "tc", "qdisc", "add", "dev", "out", "root", "netem", "delay", "20ms")
	if shortest, longest := delays(t, sender, receiver); shortest < 20*time.Millisecond {
		t.Errorf("datagrams took %v to %v, want 20ms", shortest, longest)
	}
}

// TestIFB redirects the receiver's ingress through an ifb.
func TestIFB(t *testing.T) {
	sender, receiver := newPair(t)
	receiver.addIFB(t)
	before := receiver.link(t, "turn").Attrs().Statistics.TxPackets
	delays(t, sender, receiver)
	if n := receiver.link(t, "turn").Attrs().Statistics.TxPackets - before; n < datagrams {
		t.Errorf("%d of %d datagrams went through the ifb", n, datagrams)
	}
}

// TestDepartures checks that fq holds packets until the departure time set by a program.
func TestDepartures(t *testing.T) {
	const delay = 30 * time.Millisecond
	program := loadDelayProgram(t, delay)
	for _, at := range []string{"veth", "ifb"} {
		t.Run(at, func(t *testing.T) {
			sender, receiver := newPair(t)
			h, link := sender, "out"
			if at == "ifb" {
				receiver.addIFB(t)
				h, link = receiver, "turn"
			}
			index := h.link(t, link).Attrs().Index
			h.addQdisc(t, index, "fq", netlink.HANDLE_ROOT)
			if shortest, longest := delays(t, sender, receiver); shortest > delay/2 {
				t.Fatalf("datagrams took %v to %v without the program", shortest, longest)
			}
			h.addQdisc(t, index, "clsact", netlink.HANDLE_CLSACT)
			must(t, "add filter", h.Links.FilterAdd(&netlink.BpfFilter{
				FilterAttrs: netlink.FilterAttrs{
					LinkIndex: index, Parent: netlink.HANDLE_MIN_EGRESS, Priority: 1, Protocol: unix.ETH_P_ALL,
				},
				Fd: program.FD(), Name: "depart", DirectAction: true,
			}))
			shortest, longest := delays(t, sender, receiver)
			if shortest < delay || shortest > 2*delay {
				t.Errorf("datagrams took %v to %v, want %v", shortest, longest, delay)
			}
			t.Logf("%v to %v", shortest, longest)
		})
	}
}

// loadDelayProgram loads a program that delays packets by d.
func loadDelayProgram(t *testing.T, d time.Duration) *ebpf.Program {
	t.Helper()
	const tstamp = 152 // in struct __sk_buff
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:    ebpf.SchedCLS,
		License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.FnKtimeGetNs.Call(),
			asm.Add.Imm(asm.R0, int32(d)),
			asm.StoreMem(asm.R6, tstamp, asm.R0, asm.DWord),
			asm.Mov.Imm(asm.R0, 0), // TC_ACT_OK
			asm.Return(),
		},
	})
	must(t, "load program", err)
	t.Cleanup(func() { p.Close() })
	return p
}

// TestIperf3 measures the rate of fq's pacing. It retries when the guest got too little CPU time.
func TestIperf3(t *testing.T) {
	const rate = 50e6
	sender, receiver := newPair(t)
	sender.run(t, "tc", "qdisc", "add", "dev", "out", "root", "fq", "maxrate", "50mbit")
	for retries := 2; ; retries-- {
		got := iperf3Rate(t, sender, receiver)
		if got > 0.7*rate && got < 1.1*rate {
			return
		}
		if retries == 0 || got > rate {
			t.Fatalf("iperf3 measured %.1f Mbit/s, want %.1f", got/1e6, rate/1e6)
		}
	}
}

// iperf3Rate returns the rate that a client reaches in one second, in bits a second.
func iperf3Rate(t *testing.T, sender, receiver host) float64 {
	t.Helper()
	server := exec.Command("iperf3", "--server", "--one-off", "--forceflush")
	out, err := server.StdoutPipe()
	must(t, "make pipe", err)
	must(t, "start server", receiver.Start(server))
	t.Cleanup(func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	})
	for lines := bufio.NewScanner(out); !strings.Contains(lines.Text(), "listening"); {
		if !lines.Scan() {
			t.Fatal("the server does not listen")
		}
	}
	var report struct {
		End struct {
			SumReceived struct {
				Rate float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		}
	}
	text := sender.run(t, "iperf3", "--client", receiverAddr.String(), "--time", "1", "--json")
	must(t, "read report", json.Unmarshal([]byte(text), &report))
	return report.End.SumReceived.Rate
}

// addIFB redirects the ingress of the link "in" to the ifb "turn".
func (h host) addIFB(t *testing.T) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "turn"
	must(t, "add ifb", h.Links.LinkAdd(&netlink.Ifb{LinkAttrs: attrs}))
	must(t, "set up ifb", h.Up("turn"))
	in := h.link(t, "in").Attrs().Index
	h.addQdisc(t, in, "clsact", netlink.HANDLE_CLSACT)
	must(t, "add filter", h.Links.FilterAdd(&netlink.MatchAll{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: in, Parent: netlink.HANDLE_MIN_INGRESS, Priority: 1, Protocol: unix.ETH_P_ALL,
		},
		Actions: []netlink.Action{netlink.NewMirredAction(h.link(t, "turn").Attrs().Index)},
	}))
}

func (h host) addQdisc(t *testing.T, index int, kind string, parent uint32) {
	t.Helper()
	must(t, "add "+kind, h.Links.QdiscAdd(&netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Parent: parent},
		QdiscType:  kind,
	}))
}
