package control

import (
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control/internal/fakes"
	"shaperd.dev/shaperd/internal/testutil"
)

// linesWith returns the lines of a log that contain a text.
func linesWith(log *testutil.Buffer, text string) (found []string) {
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, text) {
			found = append(found, line)
		}
	}
	return found
}

// Denied requests of readers and killed connections are logged with the caller. A flood of
// attempts is not a flood of records.
func TestServer_LogsDeniedRequestsAndKills(t *testing.T) {
	log := new(testutil.Buffer)
	o := options(t, fakes.Shaper(t, 2))
	o.Log = slog.New(slog.NewTextHandler(log, nil))
	s := serveOn(t, o, readersGID, nil)
	change := request{s.socket.path, "PUT", "/v1/bypass", `{"on":true}`}
	byGroup.ask(t, []request{change})
	got := linesWith(log, "permission denied")
	if len(got) != 1 || !strings.Contains(got[0], fmt.Sprintf("uid=%d pid=", byGroup.uid)) || !strings.Contains(got[0], `request="PUT /v1/bypass"`) {
		t.Errorf("a refused attempt: %q", got)
	}
	byGroup.ask(t, slices.Repeat([]request{change}, 100))
	if n := len(linesWith(log, "permission denied")); n < 2 || n > 30 {
		t.Errorf("101 attempts are %d lines", n)
	}
	root.ask(t, []request{{s.socket.path, "DELETE", "/v1/connections/1", ""}})
	if got := linesWith(log, "killed"); len(got) != 1 || !strings.Contains(got[0], "id=1 uid=0 pid=") || !strings.Contains(got[0], "source=192.0.2.1:1000 listener=l") {
		t.Errorf("a connection that was killed: %q", got)
	}
}

// The login user of the kernel takes precedence over that of a client, which only root may send.
func TestCallerAttrs_Login(t *testing.T) {
	const nobodys = 1 << 30 // above any process's number
	ask := func(uid uint32, pid int32, says string) string {
		q, err := http.NewRequest("GET", "/", nil)
		if err != nil {
			t.Fatal(err)
		}
		q.Header.Set(api.LoginHeader, says)
		return fmt.Sprint(CallerAttrs(withCaller(q, &peer{uid: uid, pid: pid}).Context())...)
	}
	for _, tt := range []struct {
		uid       uint32
		says, has string
	}{{0, "64001", "login64001"}, {0, "x\ny", ""}, {0, "", ""}, {0, "-1", ""}, {readersGID, "64001", ""}} {
		if got := ask(tt.uid, nobodys, tt.says); strings.Contains(got, "login") != (tt.has != "") || !strings.HasSuffix(got, tt.has) {
			t.Errorf("user %d says %q: %s", tt.uid, tt.says, got)
		}
	}
	if login := api.LoginUser("self"); login != "" {
		if got := ask(0, int32(os.Getpid()), "64009"); !strings.HasSuffix(got, "login"+login) {
			t.Errorf("logged in as %s: %s", login, got)
		}
	}
}
