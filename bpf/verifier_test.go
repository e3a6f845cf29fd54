package bpf

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"shaperd.dev/shaperd/shaper"
)

// TestVerifierBudget keeps the programs well below the verifier's limit of a million
// instructions, and those for few limits quick to load.
func TestVerifierBudget(t *testing.T) {
	t.Parallel()
	for limits, most := range map[uint32]uint32{fewLimits: 160_000, shaper.MaxLimits: 500_000} {
		b := newBench(t, kernelConfig{Ethernet: 1, Keep: 1, MaxLimits: limits})
		for name, program := range map[string]*ebpf.Program{
			"shaperd_tc": b.ShaperdTc, "shaperd_xdp": b.ShaperdXdp, "shaperd_replies": b.ShaperdReplies,
		} {
			info, err := program.Info()
			if err != nil {
				t.Fatal(err)
			}
			n, _ := info.VerifiedInstructions()
			size, _ := info.TranslatedSize()
			t.Logf("%s, up to %d limits: %d instructions verified, %d bytes", name, limits, n, size)
			if n > most {
				t.Errorf("%s, up to %d limits: %d instructions to verify", name, limits, n)
			}
		}
	}
}

// TestLimits_MoreThanLoadedFor lets a policy grow beyond the number of limits that programs are
// loaded for: they are replaced, and until then drop packets for which they cannot enforce all limits.
func TestLimits_MoreThanLoadedFor(t *testing.T) {
	t.Parallel()
	limits := []shaper.Limit{tenAnHour("here")}
	limits[0].Key, limits[0].Match.Source = 0, []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}
	for i := range fewLimits {
		limits = append(limits, shaper.Limit{
			Name: fmt.Sprint("wide", i), Match: limits[0].Match, Packets: perSecond(1e6), BurstPackets: 1000, MaxConnections: 1000 * (i % 2),
		})
	}
	slices.Reverse(limits)
	t.Run("before the replacement", func(t *testing.T) {
		b := newBench(t, kernelConfig{Mode: programModes[shaper.AttachPolice], Ethernet: 1, Keep: 1})
		for n, want := range map[int]uint32{fewLimits: tcNext, len(limits): tcDrop} {
			b.loadLimits(t, limits[:n], nil)
			for name, packet := range map[string][]byte{"datagram": datagram(1), "SYN": dial(fmt.Sprint("10.0.0.1:", 1000+n)).nextSegment(client, syn, 0)} {
				if action, d, _ := b.run(t, &sample{data: packet}, uint64(time.Hour), (*bench).tc); action != want {
					t.Errorf("%s under %d limits: %d, %+v", name, n, action, d)
				}
			}
		}
	})
	t.Run("after the replacement", func(t *testing.T) {
		w, p := newWire(t, "many"), openPlane(t)
		a := shaper.Attachment{Name: "here", Interfaces: []string{"many0"}, Mode: shaper.AttachPolice}
		for i, n := range []int{1, len(limits), 1} {
			limits[len(limits)-1].Name = fmt.Sprint("ten", i) // another bucket
			p.apply(limits[len(limits)-n:], a)
			w.want(p, 1, 20, 10)
		}
	})
}
