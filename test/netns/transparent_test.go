package netns

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// plcPort is the TCP and UDP port of the downstream behind a gateway.
const plcPort = 502

func (f family) plc() netip.AddrPort { return netip.AddrPortFrom(f.downstream, plcPort) }

// transparentConfig returns a configuration with two transparent listeners: the door of
// config, and one with the address of its own downstream.
func transparentConfig(f family, limits ...string) string {
	text := strings.Replace(config(f, limits...), "\n\n[[limit]]", "\ntransparent = true\n\n[[limit]]", 1)
	if len(limits) == 0 {
		text += "transparent = true\n"
	}
	return text + fmt.Sprintf("\n[[listen]]\nname = \"plc\"\naddress = [\"tcp://%[1]v\", \"udp://%[1]v\"]\ndownstream = [\"%[1]v\"]\ntransparent = true\n", f.plc())
}

// clientLog records the clients of a server.
type clientLog struct {
	mu   sync.Mutex
	from []netip.AddrPort
}

func (s *clientLog) record(from netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.from = append(s.from, netip.AddrPortFrom(from.Addr().Unmap(), from.Port()))
}

// take returns the clients since the last call.
func (s *clientLog) take() []netip.AddrPort {
	s.mu.Lock()
	defer s.mu.Unlock()
	from := s.from
	s.from = nil
	return from
}

// echoTCP sends back all data, and records the clients.
func (h *host) echoTCP(t testing.TB, at netip.AddrPort, s *clientLog) {
	t.Helper()
	h.serveTCP(t, at, func(c *net.TCPConn) {
		s.record(c.RemoteAddr().(*net.TCPAddr).AddrPort())
		_, _ = io.Copy(c, c)
	})
}

// echoAndRecordUDP sends datagrams back, and records the clients.
func (h *host) echoAndRecordUDP(t testing.TB, at netip.AddrPort, s *clientLog) {
	t.Helper()
	h.answerUDP(t, at, func(_ []byte, from netip.AddrPort) bool { s.record(from); return true })
}

// exchange sends a text on c and closes it, and expects the text back.
func exchange(c *net.TCPConn, text string) error {
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := io.WriteString(c, text); err != nil {
		return err
	}
	if err := c.CloseWrite(); err != nil {
		return err
	}
	got, err := io.ReadAll(c)
	if err == nil && string(got) != text {
		err = fmt.Errorf("%q came back for %q", got, text)
	}
	return err
}

// exchangeUDP sends one datagram and expects it back from the same address.
func (h *host) exchangeUDP(t testing.TB, from netip.Addr, to netip.AddrPort, size int) {
	t.Helper()
	c, err := h.DialUDP(from, to)
	must(t, err)
	defer c.Close()
	mustEchoBytes(t, c, size)
}

// mustEchoBytes sends one datagram on c and expects it back.
func mustEchoBytes(t testing.TB, c net.Conn, size int) {
	t.Helper()
	must(t, c.SetDeadline(time.Now().Add(patience)))
	_, err := c.Write(make([]byte, size))
	must(t, err)
	n, err := c.Read(make([]byte, 1<<16)) // only from its peer, because it is connected
	if err != nil || n != size {
		t.Errorf("UDP from %v to %v: %d bytes came back, %v; want %d", c.LocalAddr(), c.RemoteAddr(), n, err, size)
	}
}

// TestTransparent checks that downstreams see the clients' addresses: behind a proxy that
// clients address directly, and behind a gateway.
func TestTransparent(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			n := newNetwork(t)
			n.forward(t)
			var tcp, udp clientLog
			n.downstream.echoTCP(t, f.tcp(), &tcp)
			n.downstream.echoTCP(t, f.plc(), &tcp)
			n.downstream.echoAndRecordUDP(t, f.udp(), &udp)
			n.downstream.echoAndRecordUDP(t, f.plc(), &udp)
			d := n.shaper.shaperd(t, transparentConfig(f))

			text := strings.Repeat("all of it\n", 20_000)
			asked := 0
			for _, to := range []netip.AddrPort{f.listenAddr(), f.plc()} {
				for _, from := range f.sources {
					c := n.client.mustDial(t, from, to)
					if err := exchange(c, text); err != nil {
						t.Errorf("TCP from %v to %v: %v", from, to, err)
					}
					if got := tcp.take(); len(got) != 1 || got[0].Addr() != from {
						t.Errorf("TCP from %v to %v reached the downstream from %v", from, to, got)
					}
					asked++
				}
			}
			for _, to := range []netip.AddrPort{f.udpListenAddr(), f.plc()} {
				for _, size := range []int{0, 1, 1472, 9000, 60_000} {
					n.client.exchangeUDP(t, f.sources[1], to, size)
					if got := udp.take(); len(got) != 1 || got[0].Addr() != f.sources[1] {
						t.Errorf("UDP from %v to %v reached the downstream from %v", f.sources[1], to, got)
					}
				}
			}
			d.awaitMetric(float64(asked), "shaperd_listener_connections_accepted_total") // none has bypassed it

			// Nothing bypasses a stopped gateway until its rules are removed.
			d.Kill()
			d.Notify.DropStored()
			if c, err := n.client.Dial(t.Context(), f.sources[0], f.plc(), 500*time.Millisecond); err == nil {
				c.Close()
				t.Error("a connection bypassed a stopped gateway")
			}
			if got := tcp.take(); len(got) != 0 {
				t.Errorf("%v bypassed a stopped gateway", got)
			}
			must(t, n.shaper.Run(daemonPath(t), "rules", "--remove", "--config", d.Config))
			c := n.client.mustDial(t, f.sources[0], f.plc())
			if err := exchange(c, "direct"); err != nil {
				t.Errorf("without rules: %v", err)
			}
			n.shaper.mustHaveNoRules(t)

			// A daemon without transparent listeners reports leftover rules.
			must(t, n.shaper.Run(daemonPath(t), "rules", "--install", "--config", d.Config))
			again := n.shaper.shaperd(t, config(f))
			again.awaitLog("rules --remove --mark 21320")
			must(t, n.shaper.Run(daemonPath(t), "rules", "--remove", "--mark", "21320"))
			n.shaper.mustHaveNoRules(t)
		})
	}
}

// TestTransparentReload makes a listener transparent and not transparent again.
func TestTransparentReload(t *testing.T) {
	f := ipv4
	n := newNetwork(t)
	var tcp, udp clientLog
	n.downstream.echoTCP(t, f.tcp(), &tcp)
	n.downstream.echoAndRecordUDP(t, f.udp(), &udp)
	d := n.shaper.shaperd(t, config(f))
	var open *net.TCPConn // opened while the listener was transparent
	flow, err := n.client.DialUDP(f.sources[0], f.udpListenAddr())
	must(t, err)
	defer flow.Close()
	for _, step := range []struct {
		config string
		from   netip.Addr
	}{
		{transparentConfig(f), f.sources[0]},
		{strings.Replace(transparentConfig(f), "[[listen]]", "[transparent]\nmark = 7\n\n[[listen]]", 1), f.sources[0]},
		{config(f), f.inner},
		{transparentConfig(f), f.sources[0]},
		{strings.Replace(transparentConfig(f), "[[listen]]", "[transparent]\nmark = 8\nrules = \"manual\"\n\n[[listen]]", 1), f.sources[0]}, // leaves the rules alone
		{transparentConfig(f), f.sources[0]},
		{config(f), f.inner},
	} {
		d.reload(step.config)
		c, err := n.client.Dial(t.Context(), f.sources[0], f.listenAddr(), patience)
		must(t, err)
		if err := exchange(c, "hello"); err != nil {
			t.Error(err)
		}
		if got := tcp.take(); len(got) != 1 || got[0].Addr() != step.from {
			t.Errorf("the downstream saw the client %v, want %v", got, step.from)
		}
		mustEcho(t, flow)
		if got := udp.take(); len(got) != 1 || got[0].Addr() != step.from {
			t.Errorf("the downstream saw the UDP client %v, want %v", got, step.from)
		}
		if open == nil {
			open = n.client.mustDial(t, f.sources[1], f.listenAddr())
			_, err := open.Write([]byte("hello, "))
			must(t, err)
			waitFor(t, patience, func() error {
				if got := tcp.take(); len(got) == 0 {
					return errors.New("a connection did not reach the downstream")
				}
				return nil
			})
			_, err = io.ReadFull(open, make([]byte, 7))
			must(t, err)
		}
	}
	if err := exchange(open, "and goodbye"); err != nil {
		t.Errorf("a connection opened while its listener was transparent: %v", err)
	}
	if rules := n.shaper.rules(t); strings.Contains(rules, "drop") {
		t.Errorf("packets are dropped although no listener is transparent:\n%s", rules)
	}

	// A listener that is its own downstream is an error, not a forwarding loop.
	d.reload(config(f) + fmt.Sprintf("\n[[listen]]\nname = \"loop\"\naddress = [\"tcp://%[1]v\"]\ndownstream = [\"%[1]v\"]\ntransparent = true\n",
		netip.AddrPortFrom(f.inner, plcPort)))
	d.awaitLog("is on this host")
}

// mustHaveNoRules fails the test if rules of transparent listeners are left.
func (h *host) mustHaveNoRules(t testing.TB) {
	t.Helper()
	if got := h.rules(t); strings.Contains(got, "shaperd") || strings.Contains(got, "fwmark") || strings.Contains(got, "local default") {
		t.Errorf("rules are left:\n%s", got)
	}
}

// rules returns all nftables rules, policy rules and routes of the host.
func (h *host) rules(t testing.TB) string {
	t.Helper()
	var all string
	for _, args := range [][]string{
		{"nft", "list", "ruleset"},
		{"ip", "-4", "rule"},
		{"ip", "-6", "rule"},
		{"ip", "-4", "route", "show", "table", "all"},
		{"ip", "-6", "route", "show", "table", "all"},
	} {
		out, err := h.Output(args[0], args[1:]...)
		must(t, err)
		all += out
	}
	return all
}

// TestRulesCommands checks that the printed commands and --install have the same result.
func TestRulesCommands(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "shaperd.toml")
	text := transparentConfig(ipv4) + fmt.Sprintf("\n[[listen]]\nname = \"six\"\naddress = [\"udp://[%v]:8000-8010\"]\ndownstream = [\"[%v]\"]\ntransparent = true\n",
		ipv6.alias, ipv6.downstream)
	must(t, os.WriteFile(file, []byte(text), 0o644))
	h := newHost(t, "rules")
	before := h.rules(t)
	shaperd := func(args ...string) string {
		out, err := h.Output(daemonPath(t), append([]string{"rules", "--config", file}, args...)...)
		must(t, err)
		return out
	}
	run := func(script string) {
		cmd := exec.Command("sh", "-ec", script)
		cmd.Stderr = os.Stderr
		must(t, h.Start(cmd))
		must(t, cmd.Wait())
	}
	var install, remove string
	for line := range strings.Lines(shaperd()) {
		if command, ok := strings.CutPrefix(line, "# "); ok {
			remove += command
		} else {
			install += line
		}
	}
	shaperd("--install")
	shaperd("--install") // replaces the existing rules
	installed := h.rules(t)
	if installed == before {
		t.Error("nothing was installed")
	}
	for range 2 {
		run(install)
		if printed := h.rules(t); printed != installed {
			t.Errorf("the printed commands result in\n%s\nand --install to\n%s", printed, installed)
		}
	}
	run(remove)
	if left := h.rules(t); left != before {
		t.Errorf("the printed commands leave\n%s\nwant\n%s", left, before)
	}
	shaperd("--install")
	shaperd("--remove")
	shaperd("--remove")
	if left := h.rules(t); left != before {
		t.Errorf("--remove leaves\n%s\nwant\n%s", left, before)
	}
}

// TestReject checks that refused datagrams are rejected by ICMP.
func TestReject(t *testing.T) {
	t.Parallel()
	for _, f := range families {
		for name, limits := range map[string]string{
			"queue": limit("slow", onUDP, keyAll, `packets = "1/min"`, `burst_packets = 1`, `max_delay = "0s"`, `refuse_with = "reject"`),
			"flows": limit("few", onUDP, keyAll, `max_connections = 1`, `refuse_with = "reject"`),
			"drop":  limit("few", onUDP, keyAll, `max_connections = 1`),
		} {
			t.Run(f.name+"/"+name, func(t *testing.T) {
				n := newNetwork(t)
				n.downstream.echoUDP(t, f.udp())
				n.shaper.shaperd(t, config(f, limits))
				first, err := n.client.DialUDP(f.sources[0], f.udpListenAddr())
				must(t, err)
				defer first.Close()
				for range 2 { // an answered flow keeps its slot
					mustEchoBytes(t, first, 100)
				}
				for _, to := range []netip.Addr{f.proxy, f.alias} {
					c, err := n.client.DialUDP(f.sources[1], netip.AddrPortFrom(to, udpPort))
					must(t, err)
					defer c.Close()
					_, err = c.Write(make([]byte, 1400))
					must(t, err)
					want, timeout := error(syscall.ECONNREFUSED), patience
					if name == "drop" {
						want, timeout = os.ErrDeadlineExceeded, time.Second
					}
					must(t, c.SetReadDeadline(time.Now().Add(timeout)))
					_, err = c.Read(make([]byte, 1<<16))
					if !errors.Is(err, want) {
						t.Errorf("a refused datagram to %v ended with %v, want %v", to, err, want)
					}
				}
			})
		}
	}
}
