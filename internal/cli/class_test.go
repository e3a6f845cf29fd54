package cli

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

// explain tells the class of a source, its weight and priority, and the slots that are reserved for it; connections have it; a reload
// changes it for those that are open.
func TestClasses(t *testing.T) {
	downstream := testutil.ServeTCP(t, testutil.Discard)
	const text = `[daemon]
metrics = ""
dashboard = ""
pin_path = "/nowhere/pins"
[[listen]]
name = "db"
address = "tcp://%s"
downstream = "%s"
[[class]]
name = "local"
match.source = "127.0.0.1"
weight = %d
priority = 3
[[limit]]
name = "slots"
rate = "8MB/s"
max_connections = 10
reserve = { local = "25%%" }
turns = ["prefix24", "source"]
`
	at := testutil.FreeAddr(t, "tcp")
	path := writeConfig(t, "", fmt.Sprintf(text, at, downstream, 7))
	s := startControlled(t, path)
	c, err := net.Dial("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, port, _ := strings.Cut(at, ":")
	for _, of := range []string{"--control " + s.socket, "--config " + path} {
		for source, want := range map[string][]string{
			"127.0.0.1": {`Class "local": weight 7, priority 3.`, `Limit "slots" reserves 2 slots and 25% of its rate for class "local".`, "turns by prefix24, source, reserved: local 25%"},
			"127.0.0.9": {`Class "default": weight 1, priority 0.`},
		} {
			out, _, err := command(t, strings.Fields("explain --source "+source+" --to tcp/"+port+" "+of)...)
			for _, text := range want {
				if err != nil || !strings.Contains(out, text) {
					t.Errorf("explain %s %s: %v, want %q\n%s", source, of, err, text, out)
				}
			}
		}
	}
	testutil.WaitFor(t, "the class of a connection", func() bool {
		out, _, err := command(t, "connections", "--control", s.socket)
		return err == nil && strings.Contains(out, "CLASS") && strings.Contains(out, "local")
	})
	planned := writeConfig(t, "", fmt.Sprintf(text, at, downstream, 8))
	out, _, err := command(t, "plan", planned, "--control", s.socket)
	if want := "class  local, weight 7, priority 3  ->  local, weight 8, priority 3"; err != nil || !strings.Contains(out, want) {
		t.Errorf("plan: %v, want %q\n%s", err, want, out)
	}
	writeConfig(t, path, strings.Replace(fmt.Sprintf(text, at, downstream, 9), "127.0.0.1\"\nweight", "127.0.0.9\"\nweight", 1))
	if _, _, err := command(t, "reload", "--control", s.socket); err != nil {
		t.Fatal(err)
	}
	testutil.WaitFor(t, "another class", func() bool {
		out, _, err := command(t, "connections", "--control", s.socket)
		return err == nil && strings.Contains(out, "default")
	})
}
