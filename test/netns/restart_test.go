package netns

import (
	"errors"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestRestart has a daemon killed, or stopped, and another one started after a while,
// with the sockets that systemd has kept. Nobody who connects meanwhile is refused.
func TestRestart(t *testing.T) {
	for _, end := range []string{"killed", "stopped"} {
		for _, f := range families {
			t.Run(end+" "+f.name, func(t *testing.T) {
				n := newNetwork(t)
				n.downstream.serveSlowly(t, f.tcp(), 0)
				text := config(f, limit("cap", onTCP, keySource, "max_connections = 50"))
				first := n.shaper.shaperd(t, text)
				ask := func() error {
					_, err := n.client.ask(f.sources[0], f.door())
					return err
				}
				if err := ask(); err != nil {
					t.Fatal(err)
				}
				if len(first.stored) != 12 {
					t.Fatalf("%d sockets are kept, want one of TCP and 11 of UDP", len(first.stored))
				}
				if end == "killed" {
					first.kill()
				} else {
					first.terminate()
					first.waitExit(5 * time.Second)
				}
				var asked sync.WaitGroup
				failed := make(chan error, 100)
				for range 40 {
					asked.Go(func() {
						if err := ask(); err != nil {
							failed <- err
						}
					})
					time.Sleep(40 * time.Millisecond)
				}
				second := n.shaper.shaperdWith(t, first.stored, text)
				asked.Wait()
				close(failed)
				for err := range failed {
					t.Errorf("a client that connected meanwhile: %v", err)
				}
				if strings.Contains(second.log.String(), "handed over") {
					t.Errorf("a socket was not used")
				}
			})
		}
	}
}

// TestStoredSockets has ports come and go.
func TestStoredSockets(t *testing.T) {
	f := ipv4
	n := newNetwork(t)
	text := config(f, limit("cap", onTCP, keySource, "max_connections = 50"))
	port := func(port uint16) string { return netip.AddrPortFrom(f.any, port).String() }
	d := n.shaper.shaperd(t, text)
	had := len(d.stored)
	door := port(tcpPort)
	d.reload(strings.Replace(text, `"tcp://`+door+`"`, `"tcp://`+door+`", "tcp://`+port(7777)+`"`, 1))
	if len(d.stored) != had+1 {
		t.Errorf("%d sockets are kept with another port, %d before", len(d.stored), had)
	}
	d.reload(text)
	if len(d.stored) != had {
		t.Errorf("%d sockets are kept when it has gone, want %d", len(d.stored), had)
	}
	d.kill()
	again := n.shaper.shaperdWith(t, d.stored, strings.ReplaceAll(text, door, port(7778)))
	waitFor(t, 5*time.Second, func() error {
		if !strings.Contains(again.log.String(), "no listener has the address of a socket that was handed over") {
			return errors.New("nothing was said of a socket that is not used any more")
		}
		return nil
	})
}
