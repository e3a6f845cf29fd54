package peer

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/internal/testutil"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// authority signs certificates of hosts.
type authority struct{ *testutil.Authority }

func newAuthority(t testing.TB) authority { return authority{testutil.NewAuthority(t)} }

// issue returns the files of a host whose certificate is valid until notAfter.
func (a authority) issue(name string, notAfter time.Time) Files {
	cert, key := a.Issue(name, notAfter)
	return Files{a.CAFile, cert, key}
}

func (a authority) host(name string) Files { return a.issue(name, time.Now().Add(time.Hour)) }

// serve returns a server at a free port of 127.0.0.1, or at address.
func serve(t testing.TB, files Files, address string) (s *Server, at string) {
	if address == "" {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		address = l.Addr().String()
		l.Close()
	}
	start := time.Now()
	s, err := Serve(ServerOptions{
		Address: address, Files: files, Hosts: 3, Log: slog.New(slog.DiscardHandler),
		Clock: func() cluster.Time { return cluster.Second + cluster.FromDuration(time.Since(start)) },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s, address
}

func client(t testing.TB, files Files, addresses ...string) *Client {
	c := NewClient(addresses, files, nil, "")
	t.Cleanup(c.Close)
	return c
}

func newHost(name string) *cluster.Host {
	p := cluster.Params{Hosts: 3, Lease: cluster.Second, Step: cluster.Second / 2}
	return cluster.NewHost(cluster.HostOptions{Params: p, Name: name, Start: 1}, 0)
}

// call makes calls of h until it need not call again.
func call(t testing.TB, c *Client, h *cluster.Host) error {
	t.Helper()
	for {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		r, err := c.Call(ctx, h.Request(0, nil))
		cancel()
		if err != nil || !h.Reply(0, r) {
			return err
		}
	}
}

func TestClient_JoinsThroughServer(t *testing.T) {
	a := newAuthority(t)
	server, at := serve(t, a.host("gw1"), "")
	remote := client(t, a.host("gw2"), at)
	local := NewClient([]string{at}, a.host("gw1"), server, at)
	own, other, third := newHost("gw1"), newHost("gw2"), newHost("gw3")
	for _, h := range []struct {
		*Client
		*cluster.Host
	}{{local, own}, {remote, other}, {client(t, a.host("gw3"), at), third}} {
		for range 3 {
			if err := call(t, h.Client, h.Host); err != nil {
				t.Fatal(err)
			}
		}
	}
	shot, err := remote.Snapshot(t.Context())
	if err != nil || len(shot.Hosts) != 3 || shot.Hosts[1].Name != "gw2" {
		t.Errorf("snapshot: %+v, %v", shot, err)
	}
	if ok, err := remote.Forget(t.Context(), "gw1"); ok || err != nil {
		t.Errorf("a host that has just called was forgotten: %v, %v", ok, err)
	}
}

func TestServer_RefusesStrangers(t *testing.T) {
	a, stranger := newAuthority(t), newAuthority(t)
	_, at := serve(t, a.host("gw1"), "")
	mixed := stranger.host("gw2")
	mixed.CA = a.CAFile // trusts the server, which does not trust it
	for name, test := range map[string]struct {
		files Files
		host  string
		err   string
	}{
		"a certificate of another authority": {mixed, "gw2", "unknown certificate authority"},
		"a server of another authority":      {stranger.host("gw2"), "gw2", "unknown authority"},
		"an expired certificate":             {a.issue("old", time.Now().Add(-time.Minute)), "old", "expired certificate"},
		"a call for another host":            {a.host("gw2"), "gw3", "does not name this host"},
		"an invalid name":                    {a.host("gw2"), "gw 2", "must be 1 to 64 letters"},
	} {
		t.Run(name, func(t *testing.T) {
			err := call(t, client(t, test.files, at), newHost(test.host))
			if err == nil || !strings.Contains(err.Error(), test.err) || !strings.Contains(err.Error(), at) {
				t.Errorf("%v; want an error with %q and the address", err, test.err)
			}
		})
	}
	c, err := net.Dial("tcp", at) // no TLS at all
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = io.WriteString(c, "POST /v1/call HTTP/1.1\r\nHost: x\r\n\r\n")
	if text, _ := io.ReadAll(c); bytes.Contains(text, []byte("200")) {
		t.Errorf("a client without TLS got %q", text)
	}
}

func TestClient_CertificatesAreRenewed(t *testing.T) {
	a := newAuthority(t)
	_, at := serve(t, a.host("gw1"), "")
	files := a.issue("gw2", time.Now().Add(-time.Minute))
	c := client(t, files, at)
	if err := call(t, c, newHost("gw2")); err == nil {
		t.Fatal("an expired certificate is accepted")
	}
	a.host("gw2") // in the same files
	if err := call(t, c, newHost("gw2")); err != nil {
		t.Error(err)
	}
}

func TestClient_ServerThatDoesNotAnswer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a := newAuthority(t)
	c := client(t, a.host("gw2"), l.Addr().String())
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := c.Call(ctx, newHost("gw2").Request(0, nil)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v; want a deadline", err)
	}
}

func TestClient_GoesOnAndReturns(t *testing.T) {
	a := newAuthority(t)
	first, firstAt := serve(t, a.host("gw1"), "")
	_, secondAt := serve(t, a.host("gw3"), "")
	c := client(t, a.host("gw2"), firstAt, secondAt)
	h := newHost("gw2")
	if err := call(t, c, h); err != nil {
		t.Fatal(err)
	}
	first.Close()
	if err := call(t, c, h); err == nil {
		t.Fatal("a closed server answers")
	}
	if err := call(t, c, h); err != nil || c.current != 1 {
		t.Fatalf("the second server does not answer: %v", err)
	}
	serve(t, a.host("gw1"), firstAt)
	deadline := time.Now().Add(20 * time.Second)
	for c.current != 0 && time.Now().Before(deadline) {
		if err := call(t, c, h); err != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond)
	}
	if c.current != 0 {
		t.Error("the client does not return to the first server")
	}
}

// FuzzCall sends any bytes as a call to a live ledger.
func FuzzCall(f *testing.F) {
	a := newAuthority(f)
	s, at := serve(f, a.host("gw1"), "")
	config, err := func() (*tls.Config, error) { files := a.host("gw2"); return files.client("127.0.0.1") }()
	if err != nil {
		f.Fatal(err)
	}
	h := &http.Client{Transport: &http.Transport{TLSClientConfig: config}}
	f.Cleanup(h.CloseIdleConnections)
	q := newHost("gw2").Request(0, nil)
	q.Items = []cluster.Item{{Key: "db", Want: 5, Weight: 1}}
	seed, _ := json.Marshal(q)
	f.Add(seed)
	f.Add([]byte(`{"Host":"gw2","N":1,"Params":{"Hosts":1000000000}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := h.Post("https://"+at+"/v1/call", "application/json", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, r.Body)
		r.Body.Close()
		if shot, _ := s.Snapshot(t.Context()); len(shot.Hosts) > shot.Params.Hosts || shot.Hot > 100_000 {
			t.Errorf("%d hosts and %d buckets after %q", len(shot.Hosts), shot.Hot, body)
		}
	})
}

func BenchmarkCall(b *testing.B) {
	a := newAuthority(b)
	_, at := serve(b, a.host("gw1"), "")
	c, h := client(b, a.host("gw2"), at), newHost("gw2")
	for b.Loop() {
		r, err := c.Call(b.Context(), h.Request(0, nil))
		if err != nil {
			b.Fatal(err)
		}
		h.Reply(0, r)
	}
}
