package from

import (
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"shaperd.dev/shaperd/test/lab"
)

// startHAProxy runs HAProxy with the configuration of a page.
func (s *site) startHAProxy(config string) {
	s.t.Helper()
	peers, err := filepath.Abs("../../build/peers")
	must(s.t, err)
	s.startPeer(config, netip.AddrPortFrom(proxy, tcpPort), func(path string) []string {
		return append(lab.HAProxy(peers), "-db", "-f", path)
	})
}

func TestFromHAProxy(t *testing.T) {
	p := readPage(t, "haproxy.md")
	for _, tt := range []struct {
		name     string
		start    func(*site)
		overtake [2]int     // how many of those that waited before the last client are served before it
		beyond   [2]float64 // rate times time, in bytes
	}{
		{"haproxy", func(s *site) { s.startHAProxy(p.theirs) }, [2]int{6, 6}, [2]float64{150e3, 5e6}},
		{"shaperd", func(s *site) { s.startOurs(p.ours) }, [2]int{0, 3}, [2]float64{0, 60e3}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSite(t)
			server := s.serve()
			tt.start(s)

			// At most 8 of a source, refused at once.
			first := s.open(clients[0], proxy, 11, 'a')
			first.await(t, 3)
			waitFor(t, "8 connections of the first source", func() bool { return len(server.arrived()) == 8 })
			// At most 10 at the server: 6 of the second source wait.
			second := s.open(clients[1], proxy, 8, 'b')
			waitFor(t, "10 connections", func() bool { return len(server.arrived()) == 10 })
			second.awaitSent(t, 8)
			settle() // those that are to wait do
			last := s.open(clients[2], proxy, 1, 'c')
			last.awaitSent(t, 1)
			settle()
			if got := server.arrived(); got != "aaaaaaaabb" {
				t.Fatalf("%q are at the server, want 8 of the first source and 2 of the second one", got)
			}
			for n := 10; n < 17; n++ {
				server.answer(1)
				waitFor(t, "one more connection", func() bool { return len(server.arrived()) > n })
			}
			order := server.arrived()
			before := strings.IndexByte(order, 'c') - 10
			if before < tt.overtake[0] || before > tt.overtake[1] {
				t.Errorf("the order is %q: %d of those that waited are before the last client, want %v", order, before, tt.overtake)
			}
			server.answer(100)
			for _, c := range []*calls{first, second, last} {
				c.all.Wait()
			}
			if n := server.maximum(); n != 10 {
				t.Errorf("%d connections were at the server at once, want 10", n)
			}
			if _, refused := first.ended(); refused != 3 {
				t.Errorf("%d connections of the first source were refused, want 3", refused)
			}
			for _, c := range []*calls{second, last} {
				if _, refused := c.ended(); refused != 0 {
					t.Errorf("%d connections that waited were refused", refused)
				}
			}

			server.awaitEnd(t)
			s.upload(clients[3], proxy).check(t, 1.25e6, tt.beyond)
		})
	}
}
