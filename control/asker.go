package control

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
)

// asker is who asks, for the record.
type asker struct {
	uid   uint32
	pid   int32
	login string // the user who logged in, whatever sudo made of him; "" when that is not known
}

// askerKey is the key of the asker in the context of a request.
type askerKey struct{}

// loginHeader is the login user by the word of a client of root's: under systemd's
// ProtectProc= the daemon does not see other users' processes.
const loginHeader = "Shaperd-Login"

// withAsker notes in the context of q who p is.
func withAsker(q *http.Request, p *peer) *http.Request {
	a := asker{p.uid, p.pid, loginOf(strconv.Itoa(int(p.pid)))}
	if a.login == "" && a.uid == 0 {
		if n, err := strconv.ParseUint(q.Header.Get(loginHeader), 10, 32); err == nil {
			a.login = strconv.FormatUint(n, 10)
		}
	}
	return q.WithContext(context.WithValue(q.Context(), askerKey{}, a))
}

// loginOf returns who logged in to have a process started, by its number or "self"; "" when
// the kernel does not tell, or nobody did. See loginuid in proc(5).
func loginOf(process string) string {
	text, err := os.ReadFile("/proc/" + process + "/loginuid")
	id := strings.TrimSpace(string(text))
	if err != nil || id == fmt.Sprint(^uint32(0)) {
		return ""
	}
	return id
}

// Asker returns who asked for what is done with ctx, as attributes for the log; none when
// nobody did over the control socket.
func Asker(ctx context.Context) (attrs []any) {
	a, ok := ctx.Value(askerKey{}).(asker)
	if !ok {
		return nil
	}
	attrs = []any{"uid", a.uid, "pid", a.pid}
	if a.login != "" {
		attrs = append(attrs, "login", a.login)
	}
	return attrs
}
