package bpf

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/shaper"
)

// TestFindForeign finds what would run before a future attachment, by its hook, direction and
// mode. TestCoverage_ForeignProgramFirst does so for an existing one.
func TestFindForeign(t *testing.T) {
	w := newWire(t, "foreign")
	at := w.to.Attrs().Name
	tc(t, w.to, "qdisc add clsact", "filter add ingress pref 5 protocol ip u32 match u8 0 0 flowid :1",
		"filter add ingress pref 49152 protocol ip u32 match u8 0 0 flowid :1")
	attachOther(t, w.to, ebpf.AttachTCXIngress)
	passes, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "xdp_passes", Type: ebpf.XDP, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	xdp, err := link.AttachXDP(link.XDPOptions{Interface: w.to.Attrs().Index, Program: passes, Flags: link.XDPGenericMode})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = xdp.Close() })
	for _, c := range []string{"add table netdev foreign", fmt.Sprintf("add chain netdev foreign first { type filter hook ingress device %s priority 0; }", at)} {
		if out, err := exec.Command("nft", c).CombinedOutput(); err != nil {
			t.Fatalf("nft %s: %v\n%s", c, err, out)
		}
	}
	const theXDP, theTCX, theChain = "the XDP program xdp_passes", "the tcx program passes_all", "the chain first of nf_tables"
	const theFilter, aLaterOne = "the filter u32 with preference 5", "the filter u32 with preference 49152"
	for _, c := range []struct {
		name string
		a    shaper.Attachment
		want []string // with an exclamation mark if it prevents the attachment
	}{
		{"by tcx", shaper.Attachment{Direction: shaper.Ingress, Mode: shaper.AttachPolice, Hook: shaper.HookTCX}, []string{theXDP}},
		{"by default", shaper.Attachment{Direction: shaper.Ingress, Mode: shaper.AttachPolice}, []string{theXDP}},
		{"by clsact", shaper.Attachment{Direction: shaper.Ingress, Mode: shaper.AttachPolice, Hook: shaper.HookClsact}, []string{theXDP, theTCX, theFilter}},
		{"by a redirect", shaper.Attachment{Direction: shaper.Ingress, Mode: shaper.AttachShape}, []string{theXDP, "!" + theTCX, "!" + theChain, theFilter, aLaterOne}},
		{"by XDP", shaper.Attachment{Direction: shaper.Ingress, Mode: shaper.AttachPolice, Hook: shaper.HookXDP}, []string{"!" + theXDP}},
		{"at egress", shaper.Attachment{Mode: shaper.AttachPolice, Hook: shaper.HookClsact}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.a.Name, c.a.Interfaces = "here", []string{"foreign1", "nowhere0"}
			all, err := FindForeign(pins, []shaper.Attachment{c.a})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, f := range all {
				what, _, _ := strings.Cut(f.What, " (id")
				got = append(got, map[bool]string{true: "!"}[f.Refuses]+what)
				if f.Attachment != "here" || f.Interface != at || f.Direction != c.a.Direction || !strings.Contains(f.Fix, "shows it") {
					t.Errorf("%+v", f)
				}
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}
