package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// TestAttach_InterfaceAppears creates, deletes and recreates an interface.
func TestAttach_InterfaceAppears(t *testing.T) {
	t.Parallel()
	f := ipv4
	n := newNetwork(t)
	n.forward(t)
	pins := newPinPath(t)
	d := n.shaper.shaperd(t, attachConfig(pins, attach("late?", "police"), flood{rate: 1, depth: 1}.lines()))
	wantUp := func(at string, want float64) {
		t.Helper()
		waitFor(t, patience, func() error {
			m := d.metrics()
			if got, ok := attachmentUp(m, at, "police"); !ok || got != want {
				return fmt.Errorf("shaperd_attachment_up of %q is %v, %v, want %v:\n%s", at, got, ok, want, m)
			}
			return nil
		})
	}
	wantWaiting := func(last string) {
		t.Helper()
		waitFor(t, patience, func() error {
			m := d.metrics()
			_, missing := attachmentUp(m, "", "police")
			_, present := attachmentUp(m, last, "police")
			if missing || present {
				return fmt.Errorf("no interface matches the pattern, but the metrics have one as missing (%v) or present (%v)", missing, present)
			}
			return nil
		})
	}
	wantWaiting("late0")
	n.downstream.discardUDP(t, netip.AddrPortFrom(f.any, udpPort))
	for _, name := range []string{"late0", "late0", "late1"} {
		before := len(d.Log.String())
		must(t, errors.Join(
			lab.Join(n.shaper.Host, name, n.downstream.Host, "new"),
			n.shaper.AddAddress(name, 24, netip.MustParseAddr("10.3.0.1")),
			n.downstream.AddAddress("new", 24, netip.MustParseAddr("10.3.0.5"))))
		wantUp(name, 1)
		if _, ok := attachmentUp(d.metrics(), "", "police"); ok {
			t.Error("the metrics also have the attachment without an interface")
		}
		// One datagram per source passes each second.
		to := netip.AddrPortFrom(netip.MustParseAddr("10.3.0.5"), udpPort)
		c := n.downstream.capture(t, "new", udpPort, 1<<12)
		p := n.client.newPaced(t, f.sources[0], to, paced{size: datagramSize, rate: 1000})
		sent, err := p.send(500 * time.Millisecond)
		must(t, err)
		took := c.Elapsed()
		// The first one, and one a second.
		if got, most := len(c.stop()), 2+int(took/time.Second); got < 1 || got > most || sent < 100 {
			t.Errorf("%d of %d datagrams passed %s in %v, want 1", got, sent, name, took)
		}
		if err := n.shaper.Links.LinkDel(n.shaper.mustLink(t, name)); err != nil {
			t.Fatal(err)
		}
		wantWaiting(name)
		for _, want := range []string{
			"level=INFO msg=attached attachment=wall interface=" + name,
			`level=WARN msg="interface removed" attachment=wall interface=` + name,
		} {
			waitFor(t, patience, func() error {
				if logged := d.Log.String()[before:]; !strings.Contains(logged, want) {
					return fmt.Errorf("the log lacks %q:\n%s", want, logged)
				}
				return nil
			})
		}
		time.Sleep(1100 * time.Millisecond) // until the next datagram conforms
	}
	d.terminate()
	d.waitExit(patience)
	n.shaper.mustBeClean(t, pins)
}

// TestAttach_InterfaceRenamed moves the name of an attachment's interface to another interface.
func TestAttach_InterfaceRenamed(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	d := n.shaper.shaperd(t, attachConfig(newPinPath(t), attach(lab.MiddleRight, "police"), flood{rate: 1, depth: 1}.lines()))
	rename := func(from, to string) {
		t.Helper()
		l := n.shaper.mustLink(t, from)
		if err := errors.Join(n.shaper.Links.LinkSetDown(l), n.shaper.Links.LinkSetName(l, to), n.shaper.Links.LinkSetUp(l)); err != nil {
			t.Fatal(err)
		}
	}
	programs := func(want ...string) {
		t.Helper()
		waitFor(t, patience, func() error {
			if got := n.shaper.programs(t); !slices.Equal(got, want) {
				return fmt.Errorf("attached: %v, want %v", got, want)
			}
			return nil
		})
	}
	programs("TCXEgress at " + lab.MiddleRight)
	rename(lab.MiddleRight, "aside")
	programs()
	rename(lab.MiddleLeft, lab.MiddleRight)
	programs("TCXEgress at " + lab.MiddleRight)
	if up, ok := attachmentUp(d.metrics(), lab.MiddleRight, "police"); !ok || up != 1 {
		t.Error("shaperd_attachment_up is not 1")
	}
}
