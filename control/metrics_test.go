package control

import (
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"testing"

	"go.uber.org/goleak"

	"shaperd.dev/shaperd/control/internal/fakes"
	"shaperd.dev/shaperd/internal/testutil"
)

func TestMain(m *testing.M) {
	if help := helpers[os.Getenv("SHAPERD_TEST_HELPER")]; help != nil {
		if err := help(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	flag.Parse()
	flag.Set("test.parallel", "4") // they wait, mostly
	goleak.VerifyTestMain(m)
}

func TestServeMetrics(t *testing.T) {
	at := testutil.FreeAddr(t, "tcp")
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	waits, err := ServeMetrics(at, options(t, fakes.Shaper(t, 1)))
	if err != nil {
		t.Errorf("a port in use: %v", err)
	}
	waits.Close()
	l.Close()
	if _, err := ServeMetrics("192.0.2.1:9464", options(t, fakes.Shaper(t, 1))); err == nil {
		t.Error("served at an address of another host")
	}
	m, err := ServeMetrics(at, options(t, fakes.Shaper(t, 1)))
	if err != nil {
		t.Fatal(err)
	}
	defer http.DefaultClient.CloseIdleConnections()
	for path, want := range map[string]int{"/metrics": 200, "/healthz": 200, "/ready": 503, "/": 404} {
		r, err := http.Get("http://" + at + path)
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		if r.StatusCode != want {
			t.Errorf("GET %s: %d, want %d", path, r.StatusCode, want)
		}
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	off, err := ServeMetrics("", nil)
	if err != nil || off.Close() != nil {
		t.Errorf("off: %v", err)
	}
}
