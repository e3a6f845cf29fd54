package lab

import (
	"context"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var starAddrs = []netip.Addr{
	netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("10.9.0.2"), netip.MustParseAddr("10.9.0.3"),
}

func newStar(t testing.TB) (*Star, []*Host) {
	t.Helper()
	s, err := NewStar(24)
	must(t, err)
	t.Cleanup(s.Remove)
	var hosts []*Host
	for _, a := range starAddrs {
		h, err := s.Add("host", a)
		must(t, err)
		hosts = append(hosts, h)
	}
	return s, hosts
}

// TestCut sends a datagram that must not arrive and one that must: packets of one host to another
// keep their order.
func TestCut(t *testing.T) {
	_, hosts := newStar(t)
	at := netip.AddrPortFrom(starAddrs[0], 5000)
	socket, err := hosts[0].ListenUDP(at)
	must(t, err)
	defer socket.Close()
	must(t, socket.SetReadDeadline(time.Now().Add(time.Minute)))
	send := func(from int, text string) {
		t.Helper()
		c, err := hosts[from].DialUDP(starAddrs[from], at)
		must(t, err)
		defer c.Close()
		_, _ = c.Write([]byte(text)) // EPERM if it must not leave
	}
	receive := func(want string) {
		t.Helper()
		var buf [16]byte
		n, err := socket.Read(buf[:])
		if err != nil || string(buf[:n]) != want {
			t.Fatalf("received %q, %v, want %q", buf[:n], err, want)
		}
	}
	for _, test := range []struct {
		name string
		at   int
		cut  Cut
	}{
		{"arriving", 0, Cut{From: starAddrs[1:2]}},
		{"leaving", 1, Cut{To: starAddrs[:1]}},
		{"both", 0, Cut{From: starAddrs[1:2], To: starAddrs[1:2]}},
	} {
		t.Run(test.name, func(t *testing.T) {
			must(t, hosts[test.at].Apply(test.cut))
			send(1, "lost")
			send(2, "of another")
			receive("of another")
			must(t, hosts[test.at].Apply(Cut{}))
			send(1, "mended")
			receive("mended")
		})
	}
	must(t, hosts[0].Apply(Cut{To: starAddrs[1:2]})) // the other direction passes
	send(1, "one way")
	receive("one way")
}

func TestRedis(t *testing.T) {
	_, hosts := newStar(t)
	at := netip.AddrPortFrom(starAddrs[0], 6379)
	ask := func(question, want string) {
		t.Helper()
		c, err := hosts[1].Dial(t.Context(), starAddrs[1], at, 30*time.Second)
		must(t, err)
		defer c.Close()
		_, err = io.WriteString(c, question+"\r\nQUIT\r\n")
		must(t, err)
		answer, err := io.ReadAll(c)
		if err != nil || !strings.HasPrefix(string(answer), want) {
			t.Fatalf("%s was answered with %q, %v, want %q", question, answer, err, want)
		}
	}
	for range 2 { // the second starts empty
		r, err := StartRedis(t.Context(), hosts[0], at)
		must(t, err)
		ask("INCR visits", ":1\r\n")
		must(t, r.Signal(unix.SIGTERM)) // would save
		<-r.Exited()
		must(t, r.Close())
	}
	if _, err := StartRedis(context.Background(), hosts[0], at, "--no-such-option", "1"); err == nil || !strings.Contains(err.Error(), "no-such-option") {
		t.Errorf("a server with a wrong option: %v", err)
	}
}
