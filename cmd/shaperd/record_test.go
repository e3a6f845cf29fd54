package main

import (
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"shaperd/control"
)

// TestEveryOrderIsOnRecord has somebody who logged in as another user, and is root by now, give
// every order that there is: the log says who it was.
func TestEveryOrderIsOnRecord(t *testing.T) {
	listen, downstream := freePort(t), echoServer(t)
	s := startSteered(t, writeConfig(t, "", configText(listen, "", downstream, "1MB/s")))
	c, err := net.Dial("tcp4", listen)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := ping(c); err != nil {
		t.Fatal(err)
	}
	all, err := control.NewClient(s.socket).Connections(t.Context(), control.ConnectionQuery{})
	if err != nil || len(all.Connections) != 1 {
		t.Fatalf("%+v, %v", all, err)
	}
	orders := [][2]string{
		{"set limit per-source rate=2MB/s", "limit set by an operator"},
		{"unset limit per-source", "limit is as in the configuration again"},
		{"observe per-source", `set="observe=true"`},
		{"enforce per-source", `set="observe=false"`},
		{"block 192.0.2.1", "blocked by an operator"},
		{"unblock 192.0.2.1", "unblocked by an operator"},
		{"bypass on", "BYPASS is on"},
		{"bypass off", "BYPASS is off"},
		{"downstreams drain " + downstream, "drained=true"},
		{"downstreams enable " + downstream, "drained=false"},
		{"connections kill " + strconv.FormatUint(all.Connections[0].ID, 10), "connection killed by an operator"},
		{"reload", "reload asked for by an operator"},
		{"drain", "drain asked for by an operator"}, // the last one
	}
	script := "echo 64001 >/proc/self/loginuid || exit 9\n"
	given := map[string]bool{}
	for _, order := range orders {
		given[strings.Fields(order[0])[0]] = true
		script += `"$0" ` + order[0] + " || exit 1\n"
	}
	for _, verb := range rootCommand(env{flags: new(rootFlags)}).Commands() {
		if verb.GroupID == groupSteer && !given[verb.Name()] {
			t.Errorf("nobody gave the order %s", verb.Name())
		}
	}
	cmd := exec.Command("sh", "-c", script, os.Args[0])
	cmd.Env = append(os.Environ(), asShaperd+"=1", noRaceSleep, "SHAPERD_CONTROL="+s.socket)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, order := range orders {
		line, msg := order[0], order[1]
		found := false
		for logged := range strings.Lines(s.log.String()) {
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
		t.Error("who was killed is not in the log")
	}
}
