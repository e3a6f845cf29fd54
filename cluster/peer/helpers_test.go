package peer

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/internal/testutil"
)

// serverProcess is the variable that makes this binary a server: the folder of its files, and its address.
const serverProcess = "PEER_TEST_SERVER"

func TestMain(m *testing.M) {
	dir, address, is := strings.Cut(os.Getenv(serverProcess), " ")
	if !is {
		goleak.VerifyTestMain(m)
		return
	}
	if _, err := Serve(ServerOptions{
		Address: address, Files: Files{dir + "/ca.pem", dir + "/gw1.pem", dir + "/gw1.key"}, Hosts: 4,
		Log: slog.New(slog.DiscardHandler), Clock: func() cluster.Time { return cluster.Second },
	}); err != nil {
		panic(err)
	}
	select {} // until it is killed
}

// authority signs certificates of hosts.
type authority struct{ *testutil.Authority }

func newAuthority(t testing.TB) authority { return authority{testutil.NewAuthority(t)} }

// path returns the path of one of the authority's files.
func (a authority) path(name string) string { return filepath.Join(filepath.Dir(a.CAFile), name) }

// host returns the files of a host, with changes to its certificate.
func (a authority) host(name string, changes ...func(*x509.Certificate)) Files {
	cert, key := a.Sign(name, changes...)
	return Files{a.CAFile, cert, key}
}

// install puts the files of an authority in the place of those of another one.
func (a authority) install(t testing.TB, in authority, names ...string) {
	t.Helper()
	for _, name := range names {
		text, err := os.ReadFile(a.path(name))
		if err == nil {
			err = os.WriteFile(in.path(name), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func expired(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }

// testServer is a server at a port of 127.0.0.1.
type testServer struct {
	*Server
	address string
	log     *testutil.Buffer
}

// fast has timeouts for tests that wait for them, and longer than a stall during a handshake.
var fast = bounds{timeout: 2 * time.Second, idle: 2 * time.Second, age: time.Hour, strangers: 8}

// freeAddress returns an address of those in certificates that is not in use, and that no connection gets.
func freeAddress(t testing.TB) string {
	t.Helper()
	return fmt.Sprint("127.0.0.1:", testutil.FreePort(t, "tcp"))
}

// startServer starts a server at an address, or at a free one if it is "".
func startServer(t testing.TB, files Files, b bounds, address string) *testServer {
	t.Helper()
	if address == "" {
		address = freeAddress(t)
	}
	start, log := time.Now(), &testutil.Buffer{}
	s, err := serve(ServerOptions{
		Address: address, Files: files, Hosts: 4, Log: slog.New(slog.NewTextHandler(log, nil)),
		Clock: func() cluster.Time { return cluster.Second + cluster.FromDuration(time.Since(start)) },
	}, b)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return &testServer{s, address, log}
}

func newClient(t testing.TB, files Files, addresses ...string) *Client {
	c := NewClient(ClientOptions{Addresses: addresses, Group: "default", Files: files})
	t.Cleanup(c.Close)
	return c
}

// params are those of calls that must be answered.
var params = cluster.Params{Hosts: 4, Lease: 20 * cluster.Second, Step: cluster.Second}

// patience is far longer than a call takes, on a machine that stalls too.
const patience = 20 * time.Second

func newHost(name string, p cluster.Params) *cluster.Host {
	return cluster.NewHost(cluster.HostOptions{Params: p, Name: name, Start: 1}, 0)
}

// call makes the next call of a host, with the deadline of its parameters. With params it has one that a busy machine
// meets.
func call(c *Client, h *cluster.Host) (*cluster.Reply, error) {
	timeout := h.Params.Timeout().Duration()
	if h.Params == params {
		timeout = patience
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return c.Call(ctx, h.Request(0, nil))
}

// mustCall makes calls of a host until none must follow at once. It repeats a few that are not answered in time: a stall
// may outlast connectTimeout.
func mustCall(t testing.TB, c *Client, h *cluster.Host) {
	t.Helper()
	for late := 0; ; {
		r, err := call(c, h)
		if errors.Is(err, context.DeadlineExceeded) && late < 3 {
			late++
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if !h.Reply(0, r) {
			return
		}
	}
}

// mustFail makes calls that fail, until an error contains a text. The transport may fail to write before
// it has read why the other side has closed the connection: then the next error says it.
func mustFail(t testing.TB, c *Client, h *cluster.Host, text string) {
	t.Helper()
	var err error
	for range 20 {
		if _, err = call(c, h); err == nil {
			t.Fatalf("a call is answered; want an error with %q", text)
		}
		if strings.Contains(err.Error(), text) {
			return
		}
	}
	t.Fatalf("%v; want an error with %q", err, text)
}

// post sends a body to a path of a server, on a connection of its own, and returns the status and the reply.
func post(t testing.TB, files Files, address, path string, body []byte) (int, string) {
	t.Helper()
	config, err := files.client("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{TLSClientConfig: config}
	defer transport.CloseIdleConnections()
	r, err := (&http.Client{Transport: transport}).Post("https://"+address+path, "", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(text)
}

// dialTLS opens a connection to a server, past the handshake.
func dialTLS(t testing.TB, files Files, address string) *tls.Conn {
	t.Helper()
	config, err := files.client("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	c, err := tls.Dial("tcp", address, config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func encode(t testing.TB, v any) []byte {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return text
}
