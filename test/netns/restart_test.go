package netns

import (
	"errors"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestRestart kills or stops a daemon, and starts another one after a while with the
// sockets in systemd's descriptor store. Connections made meanwhile must not be refused.
func TestRestart(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"killed", "stopped"} {
		for _, f := range families {
			t.Run(end+" "+f.name, func(t *testing.T) {
				n := newNetwork(t)
				n.downstream.serveSlowly(t, f.tcp(), 0)
				text := config(f, limit("cap", onTCP, keySource, "max_connections = 50"))
				first := n.shaper.shaperd(t, text)
				ask := func() error {
					_, err := n.client.request(f.sources[0], f.listenAddr())
					return err
				}
				if err := ask(); err != nil {
					t.Fatal(err)
				}
				if len(first.Notify.Stored) != 12 {
					t.Fatalf("%d sockets are stored, want one TCP and 11 UDP", len(first.Notify.Stored))
				}
				if end == "killed" {
					first.Kill()
				} else {
					first.terminate()
					first.waitExit(patience)
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
				second := n.shaper.shaperdWith(t, first.Notify.Stored, text)
				asked.Wait()
				close(failed)
				for err := range failed {
					t.Errorf("a client that connected meanwhile: %v", err)
				}
				if strings.Contains(second.Log.String(), "inherited") {
					t.Errorf("an inherited socket was not used")
				}
			})
		}
	}
}

// TestStoredSockets checks that the descriptor store follows added and removed ports.
func TestStoredSockets(t *testing.T) {
	t.Parallel()
	f := ipv4
	n := newNetwork(t)
	text := config(f, limit("cap", onTCP, keySource, "max_connections = 50"))
	port := func(port uint16) string { return netip.AddrPortFrom(f.any, port).String() }
	d := n.shaper.shaperd(t, text)
	had := len(d.Notify.Stored)
	door := port(tcpPort)
	d.reload(strings.Replace(text, `"tcp://`+door+`"`, `"tcp://`+door+`", "tcp://`+port(7777)+`"`, 1))
	if len(d.Notify.Stored) != had+1 {
		t.Errorf("%d sockets are stored with another port, %d before", len(d.Notify.Stored), had)
	}
	d.reload(text)
	if len(d.Notify.Stored) != had {
		t.Errorf("%d sockets are stored after its removal, want %d", len(d.Notify.Stored), had)
	}
	d.Kill()
	second := n.shaper.shaperdWith(t, d.Notify.Stored, strings.ReplaceAll(text, door, port(7778)))
	waitFor(t, patience, func() error {
		if !strings.Contains(second.Log.String(), "closed inherited socket: no listener has its address") {
			return errors.New("an unused inherited socket was not logged")
		}
		return nil
	})
}
