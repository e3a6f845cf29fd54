package netns

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// Two limits at one attachment, for read-only commands.
var twoLimits = []string{
	limit("each", `match = { attach = ["wall"], protocol = "tcp", destination = ["10.2.0.0/24"] }`, keyAddress, "ipv4_prefix = 24",
		`rate = "10Mbit/s"`, `max_delay = "200ms"`, `max_connections = 5`),
	limit("all", atWall, `key = ["attach"]`, `rate = "100Mbit/s"`, `overhead = "90B"`, `packets = "5000pps"`, `max_delay = "50ms"`),
}

// TestAttachExplain explains packets, for which no daemon is needed.
func TestAttachExplain(t *testing.T) {
	t.Parallel()
	h := newNetwork(t).shaper
	file := configFile(t, attachConfig("/sys/fs/bpf/none", attach(lab.MiddleRight, "police"), twoLimits...))
	for _, test := range []struct {
		name, source, destination, to string
		want                          result
	}{
		{"both limits", "10.1.1.10", "10.2.0.5", "tcp/5432", result{stdout: `10.1.1.10 to 10.2.0.5, tcp/5432: attachment "wall", egress of right, mode police

LIMIT  BUCKET              DIRECTION  LIMITS                                                   MODE
each   source 10.1.1.0/24  egress     10Mbit/s, queue 200ms, 5 connections                     enforce
all    attach wall         egress     100Mbit/s with 90B a packet, 5000/s packets, queue 50ms  enforce

Bytes: bottleneck is "each".
Packets: bottleneck is "all".
Connections in flight: bottleneck is "each".
`}},
		{"one limit", "fd00:1::10", "fd00:2::5", "icmp", result{stdout: `fd00:1::10 to fd00:2::5, icmp: attachment "wall", egress of right, mode police

LIMIT  BUCKET       DIRECTION  LIMITS                                                   MODE
all    attach wall  egress     100Mbit/s with 90B a packet, 5000/s packets, queue 50ms  enforce

Bytes: bottleneck is "all".
Packets: bottleneck is "all".
`}},
		{"no destination", "10.1.1.10", "", "tcp/5432", result{
			code: 2, stderr: "shaperd: limit \"each\" matches destinations: use --destination to name one\nSee \"shaperd explain --help\"\n",
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			args := []string{"explain", "--config", file, "--attach", "wall", "--source", test.source, "--to", test.to}
			if test.destination != "" {
				args = append(args, "--destination", test.destination)
			}
			if diff := cmp.Diff(test.want, h.command(t, args...), cmp.AllowUnexported(result{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestAttachCheck checks limits whose backlog exceeds the queue of the attachment.
func TestAttachCheck(t *testing.T) {
	t.Parallel()
	h := newNetwork(t).shaper
	for _, test := range []struct {
		name  string
		lines []string
		line  int
		want  string // "" if the queue is large enough
	}{
		{
			"bytes",
			[]string{`rate = "100Mbit/s"`, `max_delay = "1s"`},
			18,
			`max_delay: 1s at this rate can hold 8632 packets, more than the 750 that attachment "wall" queues for one key: lower max_delay, or raise its "queue"`,
		},
		{
			"packets",
			[]string{`packets = "3760pps"`, `max_delay = "200ms"`},
			18,
			`max_delay: 200ms at this rate can hold 751 packets, more than the 750 that attachment "wall" queues for one key: lower max_delay, or raise its "queue"`,
		},
		{"full", []string{`packets = "3750pps"`, `max_delay = "200ms"`}, 0, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			file := configFile(t, attachConfig("/sys/fs/bpf/none", attach(lab.MiddleRight, "shape", "queue = 1000"),
				limit("each", append([]string{atWall, keyAddress}, test.lines...)...)))
			got := h.command(t, "check", file)
			want := result{code: 1, stderr: fmt.Sprintf("%s:%d:1: %s\nshaperd: the configuration has errors\n", file, test.line, test.want)}
			if test.want == "" {
				want = result{stdout: got.stdout}
				if !hasFQ(t) {
					want.stderr = fmt.Sprintf("%s: warning: \"run\" would fail on this host: %s\n", file, noFQ)
				}
				if !strings.HasPrefix(got.stdout, file+": ok, revision ") {
					t.Errorf("check prints\n%s", got.stdout)
				}
			}
			if diff := cmp.Diff(want, got, cmp.AllowUnexported(result{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

const noFQ = `this kernel has no sch_fq, which mode = "shape" needs: load the module with "modprobe sch_fq", write mode = "police", or use a [[listen]] instead`

// hasFQ reports whether this kernel has the fq qdisc.
func hasFQ(t *testing.T) bool {
	t.Helper()
	h := newHost(t, "fq")
	err := h.Links.QdiscAdd(&netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: h.mustLink(t, "lo").Attrs().Index, Parent: netlink.HANDLE_ROOT},
		QdiscType:  "fq",
	})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		t.Fatal(err)
	}
	return err == nil
}

// TestAttachShape delays packets. On a kernel without fq the daemon reports that in one sentence
// and leaves nothing behind; package vm tests kernels that have it.
func TestAttachShape(t *testing.T) {
	for _, direction := range []string{"egress", "ingress"} {
		t.Run(direction, func(t *testing.T) {
			n := newNetwork(t)
			pins := newPinPath(t)
			at := strings.Replace(attach(lab.MiddleRight, "shape"), "egress", direction, 1)
			text := attachConfig(pins, at, twoLimits...)
			if hasFQ(t) {
				d := n.shaper.shaperd(t, text)
				if len(n.shaper.programs(t)) == 0 {
					t.Error("nothing is attached")
				}
				d.terminate()
				d.waitExit(patience)
			} else {
				want := result{code: 1, stderr: fmt.Sprintf("shaperd: attach \"wall\" to right, %s: %s\n", direction, noFQ)}
				if diff := cmp.Diff(want, n.shaper.command(t, "run", "--config", configFile(t, text)), cmp.AllowUnexported(result{})); diff != "" {
					t.Error(diff)
				}
			}
			n.shaper.mustBeClean(t, pins)
		})
	}
}

// TestAttach_FailedReloadKeepsPolicy makes a reload fail by an error that is only found at the
// interfaces: the old policy stays effective.
func TestAttach_FailedReloadKeepsPolicy(t *testing.T) {
	t.Parallel()
	fl := flood{rate: 2000, depth: 200}
	retryOnStall(t, func() (stallReport, error) {
		f := ipv4
		n := newNetwork(t)
		n.forward(t)
		n.downstream.discardUDP(t, f.udp())
		pins := newPinPath(t)
		text := attachConfig(pins, attach(lab.MiddleRight, "police"), fl.lines())
		d := n.shaper.shaperd(t, text)
		before := n.shaper.programs(t)
		return fl.measureDuring(t, n, f, 1500*time.Millisecond, 0.01, func(*capture) {
			time.Sleep(500 * time.Millisecond)
			d.reload(text + "\n[[attach]]\nname = \"door\"\ninterface = \"r*\"\ndirection = \"egress\"\nmode = \"police\"\n")
			const want = `attachments \"wall\" and \"door\" are both at right, egress, where their limits would count packets twice`
			d.awaitLog(want)
			if diff := cmp.Diff(before, n.shaper.programs(t)); diff != "" {
				t.Errorf("the attached programs changed: %s", diff)
			}
		})
	})
}
