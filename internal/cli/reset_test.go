package cli

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestReset uses up what a source may do in a quarter of an hour; a reset gives it that again, and nobody else.
func TestReset(t *testing.T) {
	t.Parallel()
	listen := testutil.FreeAddr(t, "tcp")
	d := startControlled(t, writeConfig(t, "", `
[daemon]
metrics = ""
dashboard = ""
pin_path = "/nowhere/pins"
[[listen]]
name = "db"
address = ["tcp://`+listen+`"]
downstream = ["`+testutil.ServeTCP(t, testutil.Echo)+`"]
[[limit]]
name = "logins"
key = ["source"]
new_connections = "2/15min"
algorithm = "sliding-log"
queue_timeout = "0s"
[[limit]]
name = "all"
new_connections = "1/min"
burst_connections = 4
queue_timeout = "0s"
`))
	passes := func() bool {
		c, err := net.Dial("tcp4", listen)
		if err != nil {
			return false
		}
		defer c.Close()
		return ping(c) == nil
	}
	for i, want := range []bool{true, true, false} {
		if passes() != want {
			t.Fatalf("connection %d: %v", i, !want)
		}
	}
	d.must("reset logins --source 127.0.0.1", "The bucket of 127.0.0.1 under limit logins is reset.")
	for i, want := range []bool{true, true, false} {
		if passes() != want {
			t.Fatalf("connection %d after a reset: %v", i, !want)
		}
	}
	d.must("reset logins --source 127.0.0.1")
	if passes() {
		t.Error("more than 4 have passed under the limit of all")
	}
	d.must("reset all", "The bucket of limit all is reset.")
	if !passes() {
		t.Error("none has passed after a reset of the limit of all")
	}
	for line, want := range map[string]string{
		"reset logins":                   "has a bucket for each source: name one with --source",
		"reset all --source 127.0.0.1":   "has one bucket for all sources: leave out the source",
		"reset logins --source 10.0.0.0": "",
		"reset logins --source x":        "is not an address",
		"reset login --source 127.0.0.1": `unknown limit "login"`,
	} {
		if out, err := d.verb(strings.Fields(line)...); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q\n%s", line, err, want, out)
		}
	}
	d.waitLog(`msg="bucket reset by operator" limit=logins source=127.0.0.1`)
}

// TestReset_Told has clients refused that are told later and later times; after a reset the next one is told the first time again.
func TestReset_Told(t *testing.T) {
	t.Parallel()
	listen := testutil.FreeAddr(t, "tcp")
	config, _, _ := strings.Cut(configText(listen, "", testutil.ServeTCP(t, testutil.Echo), "1MB/s"), limitPerSource[:10])
	d := startControlled(t, writeConfig(t, "", config+`
[[limit]]
name = "few"
new_connections = "1/min"
queue_timeout = "0s"
refuse_with = "reply"
reply = "Come back in {retry_after}."
`))
	told := func() (seconds int) { // 0 if it passes
		c, err := net.Dial("tcp4", listen)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write([]byte("ping")); err != nil {
			t.Fatal(err)
		}
		answer := make([]byte, 100)
		n, err := c.Read(answer)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Sscanf(string(answer[:n]), "Come back in %d.", &seconds)
		return seconds
	}
	if s := told(); s != 0 {
		t.Fatalf("the first is told to come back in %d s", s)
	}
	for i := range 5 {
		if s := told(); s <= i*60 || s > (i+1)*60+5 {
			t.Errorf("refused client %d is told to come back in %d s", i, s)
		}
	}
	d.must("reset few")
	if first, second := told(), told(); first != 0 || second < 1 || second > 61 {
		t.Errorf("after a reset the first is told %d s, the second %d s", first, second)
	}
}
