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

	"shaperd.dev/shaperd/control/internal/fakes"
)

// User and group IDs that are probably unused. readersGID stands for Group.
const (
	readersGID     = 64001
	unprivilegedID = 64002
	otherID        = 64003
	serviceID      = 64004
)

var (
	root          = identity{uid: 0, gid: 0}
	byGroup       = identity{uid: otherID, gid: readersGID}
	bySecondGroup = identity{uid: otherID, gid: otherID, groups: []uint32{otherID, readersGID}}
	unprivileged  = identity{uid: unprivilegedID, gid: unprivilegedID, groups: []uint32{unprivilegedID, otherID}}
	daemonsOwn    = identity{uid: serviceID, gid: serviceID, groups: []uint32{readersGID}}
)

// allRequests returns a valid request for each endpoint, and the role that it requires.
func allRequests(socket string) (all []request, roles []Role) {
	for _, r := range (&handlers{}).routes() {
		method, path, _ := strings.Cut(r.pattern, " ")
		e := endpoints[r.pattern]
		a := e.asks[slices.IndexFunc(e.asks, func(a ask) bool { return a.code == http.StatusOK })]
		all = append(all, request{socket, method, a.target(path), a.body})
		roles = append(roles, r.role)
	}
	return all, roles
}

// checkCodes checks the status codes of requests of a user with a role.
func checkCodes(t *testing.T, has Role, all []request, takes []Role, codes []int) {
	t.Helper()
	for i, r := range all {
		want := http.StatusOK
		switch {
		case has < takes[i]:
			want = http.StatusForbidden
		case strings.HasPrefix(r.Target, "/debug/pprof/profile"):
			want = http.StatusInternalServerError // a profile is running already
		}
		if codes[i] != want {
			t.Errorf("%s %s: %d, want %d", r.Method, r.Target, codes[i], want)
		}
	}
}

// recordingProxy records changes of the proxy, too.
type recordingProxy struct {
	fakes.Proxy
	*fakeDaemon
}

func (n recordingProxy) Kill(id uint64) bool {
	_ = n.record("kill")
	return n.Proxy.Kill(id)
}

func TestRoles(t *testing.T) {
	if err := pprof.StartCPUProfile(io.Discard); err != nil { // a second one is refused, and takes no time
		t.Fatal(err)
	}
	defer pprof.StopCPUProfile()
	daemon := &fakeDaemon{}
	o := options(t, fakes.Shaper(t, 2))
	o.Daemon, o.Proxy = daemon, recordingProxy{fakeDaemon: daemon}
	s := serveOn(t, o, readersGID, nil)
	changes := []string{
		"explain", "revisions", "set aa", "unset aa", "reset aa", "reset quota of aa", "block 192.0.2.0/24", "unblock 192.0.2.0/24", "change blocks", "end penalty 192.0.2.7/32", "bypass", "kill", "drain downstream", "hold", "forget gw2", "configuration", "reload", "rollback 5f0c61", "stop",
	}
	for _, tt := range []struct {
		name string
		user identity
		has  Role
		asks []string // of the daemon
	}{
		{"root", root, Admin, changes},
		{"by group", byGroup, Reader, changes[:2]},
		{"by second group", bySecondGroup, Reader, changes[:2]},
		{"nobody", unprivileged, NoRole, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			daemon.calls = nil
			all, takes := allRequests(s.socket.path)
			checkCodes(t, tt.has, all, takes, tt.user.ask(t, all))
			if d := cmp.Diff(tt.asks, daemon.calls); d != "" {
				t.Errorf("calls of the daemon: %s", d)
			}
		})
	}

	t.Run("by the rights of the file", func(t *testing.T) {
		if err := os.Chmod(s.socket.path, 0o660); err != nil {
			t.Fatal(err)
		}
		one := []request{{s.socket.path, "GET", "/v1/status", ""}}
		for _, tt := range []struct {
			user identity
			want int
		}{{root, 200}, {byGroup, 200}, {bySecondGroup, 200}, {unprivileged, 0}} {
			if got := tt.user.ask(t, one); got[0] != tt.want {
				t.Errorf("%+v: %d, want %d", tt.user, got[0], tt.want)
			}
		}
	})
}

// A daemon that does not run as root is controlled by its own user too, but not by other members
// of its group.
func TestRoles_UnprivilegedDaemon(t *testing.T) {
	path := socketPath(t)
	if err := os.Chown(filepath.Dir(path), serviceID, serviceID); err != nil {
		t.Fatal(err)
	}
	start(t, daemonsOwn.command(t, "serve", serveArgs{path, readersGID}))
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		user identity
		has  Role
	}{
		{"root", root, Admin},
		{"own user", daemonsOwn, Admin},
		{"own user, not in its groups", identity{uid: serviceID, gid: unprivilegedID}, Admin},
		{"own group", identity{uid: otherID, gid: serviceID}, NoRole},
		{"by group", byGroup, Reader},
		{"by second group", bySecondGroup, Reader},
		{"nobody", unprivileged, NoRole},
	} {
		t.Run(tt.name, func(t *testing.T) {
			all, takes := allRequests(path)
			checkCodes(t, tt.has, all, takes, tt.user.ask(t, all))
		})
	}
}

// Without the group no other user is a reader: -1 matches no group.
func TestRolesWithoutGroup(t *testing.T) {
	s := serveOn(t, options(t, fakes.Shaper(t, 1)), -1, nil)
	all := []request{{s.socket.path, "GET", "/v1/status", ""}}
	for _, u := range []identity{byGroup, {uid: otherID, gid: 65534}, {uid: otherID, gid: otherID, groups: []uint32{0}}} {
		if got := u.ask(t, all); got[0] != http.StatusForbidden {
			t.Errorf("%+v: %d", u, got[0])
		}
	}
}
