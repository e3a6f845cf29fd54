package cli

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

// TestAuditLog_RecordsEveryChange makes every change as root, after a login as another user: the
// log names both.
func TestAuditLog_RecordsEveryChange(t *testing.T) {
	listen, downstream := testutil.FreeAddr(t, "tcp"), testutil.ServeTCP(t, testutil.Echo)
	const aDay = "[[limit]]\nname = \"a-day\"\nkey = [\"source\"]\nquota = \"1GB/day\"\n"
	config := writeConfig(t, "", configText(listen, "", downstream, "1MB/s")+aDay)
	s := startControlled(t, config, "--state", filepath.Join(filepath.Dir(config), "state"))
	writeConfig(t, config, configText(listen, "", downstream, "3MB/s")+aDay)
	s.must("reload")
	testutil.WaitFor(t, "another revision", func() bool {
		out, err := s.verb("revisions")
		return err == nil && strings.Count(out, "\n") >= 3
	})
	before := len(s.log.String())
	c, err := net.Dial("tcp4", listen)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := ping(c); err != nil {
		t.Fatal(err)
	}
	all, err := api.NewClient(s.socket).Connections(t.Context(), api.ConnectionQuery{})
	if err != nil || len(all.Connections) != 1 {
		t.Fatalf("%+v, %v", all, err)
	}
	changes := [][2]string{
		{"set limit per-source rate=2MB/s", "limit overridden by operator"},
		{"unset limit per-source", "limit override removed by operator"},
		{"reset per-source --source 192.0.2.1", "bucket reset by operator"},
		{"quota reset a-day --source 127.0.0.1", "quota reset by operator"},
		{"observe per-source", `set="observe=true"`},
		{"enforce per-source", `set="observe=false"`},
		{"block 192.0.2.1", "prefix blocked by operator"},
		{"unblock 192.0.2.1", "prefix unblocked by operator"},
		{"bypass on", "BYPASS on"},
		{"bypass off", "BYPASS off"},
		{"downstreams drain " + downstream, "drained=true"},
		{"downstreams enable " + downstream, "drained=false"},
		{"hold db --for 1m", "listener held by operator"},
		{"resume db", "listener resumed by operator"},
		{"connections kill " + strconv.FormatUint(all.Connections[0].ID, 10), "connection killed by operator"},
		{"rollback", "rolled back by operator"},
		{"reload", "reload requested by operator"},
		{"stop", "stop requested by operator"}, // last
	}
	script := "echo 64001 >/proc/self/loginuid || exit 9\n"
	given := map[string]bool{}
	for _, change := range changes {
		given[strings.Fields(change[0])[0]] = true
		script += `"$0" ` + change[0] + " || exit 1\n"
	}
	for _, verb := range rootCommand(env{flags: new(rootFlags)}).Commands() {
		if verb.GroupID == groupControl && !given[verb.Name()] {
			t.Errorf("the test does not cover %s", verb.Name())
		}
	}
	cmd := exec.Command("sh", "-c", script, os.Args[0])
	cmd.Env = append(os.Environ(), asShaperd+"=1", noRaceSleep, "SHAPERD_CONTROL="+s.socket)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, change := range changes {
		line, msg := change[0], change[1]
		found := false
		for logged := range strings.Lines(s.log.String()[before:]) {
			if strings.Contains(logged, msg) {
				found = true
				if !strings.Contains(logged, "uid=0 pid=") || !strings.Contains(logged, "login=64001") {
					t.Errorf("%s: %s", line, logged)
				}
			}
		}
		if !found {
			t.Errorf("%s: %q is not in the log", line, msg)
		}
	}
	if !strings.Contains(s.log.String(), "source="+c.LocalAddr().String()) {
		t.Error("the source of the killed connection is not in the log")
	}
}
