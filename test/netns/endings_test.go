package netns

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"
)

// randomBytes returns n pseudo-random bytes that depend only on n.
func randomBytes(n int) []byte {
	p := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(n), byte(n >> 8), byte(n >> 16)}).Read(p)
	return p
}

// slowTCP limits both directions, so that a FIN or reset arrives while data is queued.
var slowTCP = []string{
	limit("slow-to", onTCP, `key = ["connection"]`, `rate = "4MiB/s"`),
	limit("slow-from", onTCP, `key = ["connection"]`, `rate = "4MiB/s"`, `direction = "from-downstream"`),
}

const testTimeout = patience

// TestHalfClose closes one direction and checks that the other continues.
func TestHalfClose(t *testing.T) {
	request, response := randomBytes(1<<20), randomBytes(1<<20+1)
	for _, f := range families {
		t.Run(f.name+"/client first", func(t *testing.T) {
			n := newNetwork(t)
			got := make(chan error, 1)
			n.downstream.serveTCP(t, f.tcp(), func(c *net.TCPConn) {
				all, err := io.ReadAll(c)
				if err == nil && !bytes.Equal(all, request) {
					err = fmt.Errorf("the request arrived with %d bytes of %d", len(all), len(request))
				}
				got <- err
				_, _ = c.Write(response)
			})
			n.shaper.shaperd(t, config(f, slowTCP...))
			c := dialWithDeadline(t, n, f)
			if _, err := c.Write(request); err != nil {
				t.Fatal(err)
			}
			if err := c.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if err := receive(got); err != nil {
				t.Fatalf("downstream: %v", err)
			}
			if all, err := io.ReadAll(c); err != nil || !bytes.Equal(all, response) {
				t.Errorf("the response has %d bytes of %d, and ended with %v", len(all), len(response), err)
			}
		})
		t.Run(f.name+"/downstream first", func(t *testing.T) {
			n := newNetwork(t)
			got := make(chan error, 1)
			n.downstream.serveTCP(t, f.tcp(), func(c *net.TCPConn) {
				_, err := c.Write(response)
				err = errors.Join(err, c.CloseWrite())
				all, readErr := io.ReadAll(c)
				if readErr == nil && !bytes.Equal(all, request) {
					readErr = fmt.Errorf("the request arrived with %d bytes of %d", len(all), len(request))
				}
				got <- errors.Join(err, readErr)
			})
			n.shaper.shaperd(t, config(f, slowTCP...))
			c := dialWithDeadline(t, n, f)
			if all, err := io.ReadAll(c); err != nil || !bytes.Equal(all, response) {
				t.Fatalf("the response has %d bytes of %d, and ended with %v", len(all), len(response), err)
			}
			if _, err := c.Write(request); err != nil {
				t.Fatal(err)
			}
			if err := c.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if err := receive(got); err != nil {
				t.Errorf("downstream: %v", err)
			}
		})
	}
}

// TestReset checks that a reset is forwarded as a reset, not as a clean end.
func TestReset(t *testing.T) {
	for _, f := range families {
		t.Run(f.name+"/client", func(t *testing.T) {
			n := newNetwork(t)
			got := make(chan error, 1)
			n.downstream.serveTCP(t, f.tcp(), func(c *net.TCPConn) {
				_, _ = c.Write([]byte{1})
				_, err := io.Copy(io.Discard, c)
				got <- err
			})
			n.shaper.shaperd(t, config(f, slowTCP...))
			c := dialWithDeadline(t, n, f)
			if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			abort(c)
			if err := receive(got); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the downstream sees %v, want a reset", err)
			}
		})
		t.Run(f.name+"/downstream", func(t *testing.T) {
			n := newNetwork(t)
			n.downstream.serveTCP(t, f.tcp(), func(c *net.TCPConn) {
				_, _ = io.ReadFull(c, make([]byte, 1))
				abort(c)
			})
			n.shaper.shaperd(t, config(f, slowTCP...))
			c := dialWithDeadline(t, n, f)
			if _, err := c.Write([]byte{1}); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, c); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the client sees %v, want a reset", err)
			}
		})
	}
	t.Run("no downstream", func(t *testing.T) {
		n := newNetwork(t)
		n.shaper.shaperd(t, config(ipv4, slowTCP...))
		if err := n.client.dialUntilClosed(ipv4.sources[0], ipv4.listenAddr()); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("without a downstream the client sees %v, want a reset", err)
		}
	})
}

// TestDrain sends SIGTERM while connections are busy: they continue until they end, and
// so do datagram flows; new connections are refused, because the sockets are not in the
// descriptor store, and the daemon exits with the last connection.
func TestDrain(t *testing.T) {
	t.Parallel()
	f := ipv4
	request := randomBytes(1 << 20)
	n := newNetwork(t)
	n.downstream.serveTCP(t, f.tcp(), func(c *net.TCPConn) {
		all, err := io.ReadAll(c)
		if err == nil && bytes.Equal(all, request) {
			_, _ = io.WriteString(c, "whole")
		}
	})
	n.downstream.echoUDP(t, f.udp())
	d := n.shaper.shaperd(t, config(f, limit("slow", onTCP, keySource, `rate = "2MiB/s"`)), "--drain-timeout", "2m")
	d.Notify.DropStored()
	b := &bulk{}
	for range 3 {
		b.conns = append(b.conns, dialWithDeadline(t, n, f))
	}
	start := time.Now()
	done := make(chan error, 1)
	checked := make(chan struct{})
	check := sync.OnceFunc(func() { close(checked) })
	defer check()
	go func() {
		done <- b.each(func(c *net.TCPConn) error {
			if _, err := c.Write(request); err != nil {
				return err
			}
			<-checked // it lasts until then
			if err := c.CloseWrite(); err != nil {
				return err
			}
			all, err := io.ReadAll(c)
			if err == nil && string(all) != "whole" {
				err = fmt.Errorf("the response is %q", all)
			}
			return err
		})
	}()
	time.Sleep(300 * time.Millisecond)
	d.terminate()
	waitFor(t, patience, func() error {
		c, err := n.client.dialTCP(f.sources[1], f.listenAddr())
		if err == nil {
			abort(c)
			return errors.New("a new connection is accepted after SIGTERM")
		}
		if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.ECONNRESET) {
			return fmt.Errorf("a new connection after SIGTERM: %w", err)
		}
		return nil
	})
	if !d.Running() {
		t.Fatal("shaperd exited before its connections ended")
	}
	n.client.exchangeUDP(t, f.sources[2], f.udpListenAddr(), 100)
	d.awaitNotify("STATUS=Stopping: ")
	check()
	if err := receive(done); err != nil {
		t.Errorf("while stopping: %v", err)
	}
	if took := time.Since(start); took < time.Second {
		t.Errorf("3 MiB took %v: not limited to 2 MiB/s", took)
	}
	d.waitExit(patience)
}

// TestDrainTimeout stops a daemon with a connection that never ends.
func TestDrainTimeout(t *testing.T) {
	t.Parallel()
	f := ipv4
	n := newNetwork(t)
	s := n.downstream.newSink(t, f.tcp())
	d := n.shaper.shaperd(t, config(f, slowTCP...), "--drain-timeout", "700ms")
	b := n.client.newBulk(t, f.sources[0], f.listenAddr(), 1, 'x')
	s.wait(t, 'x', 1, patience)
	start := time.Now()
	d.terminate()
	d.waitExit(20 * time.Second) // by default it would be after 30 s
	if took := time.Since(start); took < 600*time.Millisecond {
		t.Errorf("the daemon exited after %v, before the drain timeout of 700 ms", took)
	}
	if err := awaitClose(b.conns[0]); err == nil || errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("the connection ended with %v", err)
	}
}

// dialWithDeadline connects to the listener, with testTimeout as the deadline.
func dialWithDeadline(t *testing.T, n *network, f family) *net.TCPConn {
	t.Helper()
	c := n.client.mustDial(t, f.sources[0], f.listenAddr())
	if err := c.SetDeadline(time.Now().Add(testTimeout)); err != nil {
		t.Fatal(err)
	}
	return c
}

// receive returns the next value of ch, or an error after testTimeout.
func receive(ch <-chan error) error {
	select {
	case err := <-ch:
		return err
	case <-time.After(testTimeout):
		return fmt.Errorf("no result within %v", testTimeout)
	}
}
