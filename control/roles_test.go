package control

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// IDs that hardly anybody has. The group is in place of Group.
const (
	readers = 64001
	alone   = 64002
	other   = 64003
	service = 64004
)

var (
	root          = person{uid: 0, gid: 0}
	byGroup       = person{uid: other, gid: readers}
	bySecondGroup = person{uid: other, gid: other, groups: []uint32{other, readers}}
	somebody      = person{uid: alone, gid: alone, groups: []uint32{alone, other}}
	daemonsOwn    = person{uid: service, gid: service, groups: []uint32{readers}}
)

// everything is a request of each endpoint that would succeed, and the role it takes.
func everything(socket string) (all []request, roles []Role) {
	for _, r := range (&api{}).routes() {
		method, path, _ := strings.Cut(r.pattern, " ")
		e := endpoints[r.pattern]
		a := e.asks[slices.IndexFunc(e.asks, func(a ask) bool { return a.code == http.StatusOK })]
		all = append(all, request{socket, method, a.target(path), a.body})
		roles = append(roles, r.role)
	}
	return all, roles
}

// check tells which requests were not answered as they are to be for who has a role.
func check(t *testing.T, has Role, all []request, takes []Role, codes []int) {
	t.Helper()
	for i, r := range all {
		want := http.StatusOK
		switch {
		case has < takes[i]:
			want = http.StatusForbidden
		case strings.HasPrefix(r.Target, "/debug/pprof/profile"):
			want = http.StatusInternalServerError // there is one already
		}
		if codes[i] != want {
			t.Errorf("%s %s: %d, want %d", r.Method, r.Target, codes[i], want)
		}
	}
}

// noted notes of the proxy, too, what is changed.
type noted struct {
	fakeProxy
	*fakeDaemon
}

func (n noted) Kill(id uint64) bool {
	_ = n.note("kill")
	return n.fakeProxy.Kill(id)
}

func TestRoles(t *testing.T) {
	if err := pprof.StartCPUProfile(io.Discard); err != nil { // a second one is refused, and takes no time
		t.Fatal(err)
	}
	defer pprof.StopCPUProfile()
	daemon := &fakeDaemon{}
	o := options(t, busy(t, 2))
	o.Daemon, o.Proxy = daemon, noted{fakeDaemon: daemon}
	s := serveOn(t, o, readers, nil)
	changes := []string{
		"explain", "set aa", "unset aa", "block 192.0.2.0/24", "unblock 192.0.2.0/24", "bypass", "kill", "drain downstream", "reload", "drain",
	}
	for _, tt := range []struct {
		name string
		user person
		has  Role
		asks []string // of the daemon
	}{
		{"root", root, Admin, changes},
		{"by group", byGroup, Reader, changes[:1]},
		{"by second group", bySecondGroup, Reader, changes[:1]},
		{"nobody", somebody, Nobody, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			daemon.asked = nil
			all, takes := everything(s.socket.path)
			check(t, tt.has, all, takes, tt.user.ask(t, all))
			if d := cmp.Diff(tt.asks, daemon.asked); d != "" {
				t.Errorf("what the daemon was asked: %s", d)
			}
		})
	}

	t.Run("by the rights of the file", func(t *testing.T) {
		if err := os.Chmod(s.socket.path, 0o660); err != nil {
			t.Fatal(err)
		}
		one := []request{{s.socket.path, "GET", "/v1/status", ""}}
		for _, tt := range []struct {
			user person
			want int
		}{{root, 200}, {byGroup, 200}, {bySecondGroup, 200}, {somebody, 0}} {
			if got := tt.user.ask(t, one); got[0] != tt.want {
				t.Errorf("%+v: %d, want %d", tt.user, got[0], tt.want)
			}
		}
	})
}

// A daemon that is not root's is steered by its own user too, but not by another one that
// its group has.
func TestRolesOfDaemonThatIsNotRoots(t *testing.T) {
	path := socketPath(t)
	if err := os.Chown(filepath.Dir(path), service, service); err != nil {
		t.Fatal(err)
	}
	start(t, daemonsOwn.command(t, "serve", place{path, readers}))
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		user person
		has  Role
	}{
		{"root", root, Admin},
		{"own user", daemonsOwn, Admin},
		{"own user, not in its groups", person{uid: service, gid: alone}, Admin},
		{"own group", person{uid: other, gid: service}, Nobody},
		{"by group", byGroup, Reader},
		{"by second group", bySecondGroup, Reader},
		{"nobody", somebody, Nobody},
	} {
		t.Run(tt.name, func(t *testing.T) {
			all, takes := everything(path)
			check(t, tt.has, all, takes, tt.user.ask(t, all))
		})
	}
}

// Without the group nobody reads, whatever groups they are in: -1 is no group.
func TestRolesWithoutGroup(t *testing.T) {
	s := serveOn(t, options(t, busy(t, 1)), -1, nil)
	all := []request{{s.socket.path, "GET", "/v1/status", ""}}
	for _, u := range []person{byGroup, {uid: other, gid: 65534}, {uid: other, gid: other, groups: []uint32{0}}} {
		if got := u.ask(t, all); got[0] != http.StatusForbidden {
			t.Errorf("%+v: %d", u, got[0])
		}
	}
}
