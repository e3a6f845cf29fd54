package from

import (
	"net/netip"
	"path/filepath"
	"testing"
)

// nginxMain is the rest of a configuration whose block "stream" is in a page.
const nginxMain = `load_module /usr/lib/nginx/modules/ngx_stream_module.so;
daemon off;
user root;
pid nginx.pid;
error_log stderr crit;
worker_processes 2;
events { worker_connections 1000; }
`

func (s *site) startNginx(config string) {
	s.t.Helper()
	s.startPeer(nginxMain+config, netip.AddrPortFrom(proxy, tcpPort), func(path string) []string {
		return []string{"/usr/sbin/nginx", "-p", filepath.Dir(path), "-c", path}
	})
}

func TestFromNginx(t *testing.T) {
	p := readPage(t, "nginx.md")
	for _, tt := range []struct {
		name   string
		start  func(*site)
		beyond [2]float64 // rate times time, in bytes
	}{
		{"nginx", func(s *site) { s.startNginx(p.theirs) }, [2]float64{10e6, 100e6}},
		{"shaperd", func(s *site) { s.startOurs(p.ours) }, [2]float64{0, 400e3}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSite(t)
			server := s.serve()
			tt.start(s)
			// At most 6 of a source, and 10 at the server. All others are refused at once.
			var all []*calls
			for i, want := range []struct{ open, refused int }{{8, 2}, {8, 4}, {3, 3}} {
				c := s.open(clients[i], proxy, want.open, "abc"[i])
				c.await(t, want.refused)
				all = append(all, c)
			}
			waitFor(t, "10 connections", func() bool { return len(server.arrived()) == 10 })
			server.answer(100)
			for i, want := range []int{6, 4, 0} {
				all[i].all.Wait()
				if n, _ := all[i].ended(); n != want {
					t.Errorf("%d connections of source %d passed, want %d", n, i, want)
				}
			}
			if n := server.maximum(); n != 10 {
				t.Errorf("%d connections were at the server at once, want 10", n)
			}
			server.awaitEnd(t)
			s.upload(clients[3], proxy).check(t, 20<<20, tt.beyond)
		})
	}
}

// A queue_timeout is all it takes to let those wait that nginx refuses.
func TestFromNginx_Wait(t *testing.T) {
	p := readPage(t, "nginx.md")
	s := newSite(t)
	server := s.serve()
	s.startOurs(replaceOnce(t, p.ours, `queue_timeout   = "0s"            # refuse at once`, `queue_timeout   = "10s"`))
	for i, n := range []int{6, 4} {
		s.open(clients[i], proxy, n, "ab"[i])
	}
	waitFor(t, "10 connections", func() bool { return len(server.arrived()) == 10 })
	late := s.open(clients[2], proxy, 1, 'c')
	server.answer(1)
	waitFor(t, "the connection that waits", func() bool { return len(server.arrived()) == 11 })
	server.answer(100)
	late.all.Wait()
	if answered, _ := late.ended(); answered != 1 {
		t.Error("the connection that waited was refused")
	}
}
