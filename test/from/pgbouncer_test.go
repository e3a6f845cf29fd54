package from

import (
	"bufio"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

func (s *site) startPgbouncer(config string) {
	s.t.Helper()
	s.startPeer(config, netip.AddrPortFrom(proxy, tcpPort), func(path string) []string {
		must(s.t, os.Chmod(filepath.Dir(path), 0o755))
		must(s.t, os.Chmod(path, 0o644))
		return []string{"/usr/sbin/pgbouncer", "-q", "-u", "postgres", path}
	})
}

func TestFromPgbouncer(t *testing.T) {
	p := readPage(t, "pgbouncer.md")
	row := newSite(t)
	server, err := lab.NewPostgreSQL(row.Downstream, netip.AddrPortFrom(backend, tcpPort))
	if server != nil {
		t.Cleanup(func() { must(t, server.Close()) })
	}
	must(t, err)
	must(t, server.Start())
	must(t, server.AwaitReady(t.Context()))
	for _, tt := range []struct {
		name    string
		start   func(*site)
		refusal string // what a client beyond max_client_conn is told
		servers string // connections to PostgreSQL
		leaked  int    // sessions that have the setting of another one
	}{
		{"pgbouncer", func(s *site) { s.startPgbouncer(p.theirs) }, "no more connections allowed", "5", 1},
		{"shaperd", func(s *site) { s.startOurs(p.ours) }, "too many connections", "20", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &site{row.Row, t}
			tt.start(s)
			var all []*session
			for range 20 {
				all = append(all, s.session())
			}
			if out, err := s.Client.Output("psql", psqlArgs()...); err == nil || !strings.Contains(out, tt.refusal) {
				t.Errorf("the 21st client was not refused, or not told %q: %v: %s", tt.refusal, err, out)
			}

			// All have a transaction at once, and each counts those that are open.
			var mu sync.Mutex
			most := ""
			each(all, func(c *session) {
				n := c.ask("begin; select pg_sleep(0.5); select count(*) from pg_stat_activity where state in ('active', 'idle in transaction') and usename = 'postgres' and backend_type = 'client backend'; commit;")
				mu.Lock()
				defer mu.Unlock()
				most = max(most, strings.TrimSpace(n))
			})
			if most != "5" {
				t.Errorf("%q transactions were open at once, want 5", most)
			}
			got, err := s.Downstream.Output("psql", "-XAtq", "-h", backend.String(), "-p", fmt.Sprint(tcpPort), "-U", "postgres",
				"-c", "select count(*) from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()")
			if err != nil || strings.TrimSpace(got) != tt.servers {
				t.Errorf("%q connections to PostgreSQL, want %s: %v", got, tt.servers, err)
			}

			all[0].ask("set statement_timeout = '77s';")
			leaked := 0
			each(all[1:6], func(c *session) {
				value := c.ask("begin; select pg_sleep(1); show statement_timeout; commit;")
				mu.Lock()
				defer mu.Unlock()
				if strings.Contains(value, "77s") {
					leaked++
				}
			})
			if leaked != tt.leaked {
				t.Errorf("%d sessions have the setting of another one, want %d", leaked, tt.leaked)
			}
		})
	}
}

func psqlArgs() []string {
	return []string{"-XAtq", "-h", proxy.String(), "-p", fmt.Sprint(tcpPort), "-U", "postgres", "-d", "postgres"}
}

// A session is a client of PostgreSQL.
type session struct {
	in  io.Writer
	out *bufio.Reader
}

// session connects a client.
func (s *site) session() *session {
	s.t.Helper()
	cmd := exec.Command("psql", psqlArgs()...)
	in, err := cmd.StdinPipe()
	must(s.t, err)
	out, err := cmd.StdoutPipe()
	must(s.t, err)
	cmd.Stderr = cmd.Stdout
	must(s.t, s.Client.Start(cmd))
	late := time.AfterFunc(2*time.Minute, func() { _ = cmd.Process.Kill() })
	s.t.Cleanup(func() {
		late.Stop()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	c := &session{in, bufio.NewReader(out)}
	if got := c.ask("select 'ready';"); got != "ready\n" {
		s.t.Fatalf("psql said %q", got)
	}
	return c
}

// ask returns the output of statements.
func (c *session) ask(sql string) string {
	_, _ = io.WriteString(c.in, sql+"\n\\echo END\n")
	var all strings.Builder
	for {
		line, err := c.out.ReadString('\n')
		if err != nil || line == "END\n" {
			return all.String()
		}
		all.WriteString(line)
	}
}

// each calls f for all sessions at once.
func each(all []*session, f func(*session)) {
	var group sync.WaitGroup
	for _, c := range all {
		group.Go(func() { f(c) })
	}
	group.Wait()
}
