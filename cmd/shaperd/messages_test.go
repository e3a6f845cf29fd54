package main

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"shaperd/control"
)

// A status stays short however much is blocked; blocks has all.
func TestStatusOfManyBlocks(t *testing.T) {
	d := newFakeDaemon()
	d.serve(t)
	d.change(func() {
		d.status.Blocks, d.status.BlocksTotal = nil, 20_000
		for i := range 100 {
			d.status.Blocks = append(d.status.Blocks, control.Block{Prefix: fmt.Sprintf("192.0.2.%d/32", i), Since: fakeStart})
		}
	})
	out, _, err := d.ask(t, "status")
	if err != nil || strings.Count(out, "192.0.2.") > 20 || !strings.Contains(out, "and 19990 more: shaperd blocks") {
		t.Errorf("%v:\n%s", err, out)
	}
}

// What a daemon says is never a command to the terminal, whoever plays the daemon.
func TestNothingOfTheSocketIsAnEscape(t *testing.T) {
	const escape = "\x1b]0;pwned\a\x1b[31m"
	d := newFakeDaemon()
	d.serve(t)
	d.change(func() {
		l := &d.limits[0]
		l.HeldTo, l.Mode, l.Direction, l.Plane = escape, escape, escape, escape
		l.Override = map[string]string{"rate": escape}
		d.status.Mode, d.status.Version, d.status.Config = escape, escape, escape
		d.explain.Limits = []control.BucketOf{{Limit: escape, Key: escape, Direction: escape, HeldTo: escape, Mode: escape}}
		d.explain.Unserved = escape
		for i := range d.status.Listeners {
			d.status.Listeners[i].Unserved = escape
			for j := range d.status.Listeners[i].Downstreams {
				d.status.Listeners[i].Downstreams[j].State, d.status.Listeners[i].Downstreams[j].Error = "failing", escape
			}
		}
	})
	for _, args := range []string{"status", "limits", "limits per-source", "set limit per-source rate=1MB/s", "explain --source 192.0.2.7 --to tcp/5432", "downstreams"} {
		out, _, _ := d.ask(t, strings.Fields(args)...)
		if strings.ContainsAny(out, "\x1b\a") {
			t.Errorf("%s: %q", args, out)
		}
	}
}

// A listener that is to move to another address of its port meets its own daemon there.
func TestPortOfThisDaemon(t *testing.T) {
	_, port, err := net.SplitHostPort(freePort(t))
	if err != nil {
		t.Fatal(err)
	}
	path := writeConfig(t, "", configText("0.0.0.0:"+port, "", "127.0.0.1:9", "1MB/s"))
	s := startSteered(t, path)
	writeConfig(t, path, configText("127.0.0.1:"+port, "", "127.0.0.1:9", "1MB/s"))
	_, stderr, err := command(t, "reload", "--control", s.socket)
	want := fmt.Sprintf("listen on tcp://127.0.0.1:%s: this daemon has the port at 0.0.0.0: to move it takes a restart", port)
	if err == nil || !strings.Contains(stderr, want) {
		t.Errorf("%v\n%s\nwant %q", err, stderr, want)
	}
}
