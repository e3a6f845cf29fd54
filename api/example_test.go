package api_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"

	"shaperd.dev/shaperd/api"
)

// serve answers requests on a control socket as a daemon does.
func serve() (path string, stop func(), err error) {
	folder, err := os.MkdirTemp("", "shaperd")
	if err != nil {
		return "", nil, err
	}
	path = filepath.Join(folder, "control.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		return "", nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"state": "running", "mode": "enforce"}`)
	})
	mux.HandleFunc("GET /v1/talkers", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `[{"name": "192.0.2.7", "rate": {"value": 125000}}, {"name": "2001:db8::7", "rate": {"value": 1250}}]`)
	})
	s := httptest.NewUnstartedServer(mux)
	s.Listener.Close()
	s.Listener = l
	s.Start()
	return path, func() { s.Close(); os.RemoveAll(folder) }, nil
}

func ExampleClient() {
	path, stop, err := serve() // a daemon has its socket at /run/shaperd/control.sock
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()

	ctx := context.Background()
	c := api.NewClient(path)
	status, err := c.Status(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(status.State, status.Mode)
	talkers, err := c.Talkers(ctx, "source", "rate", 10)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, t := range talkers {
		fmt.Printf("%-12s %.0f B/s\n", t.Name, t.Rate.Value)
	}
	// Output:
	// running enforce
	// 192.0.2.7    125000 B/s
	// 2001:db8::7  1250 B/s
}
