package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/shaper"
)

// fakeDaemon serves its fields on a control socket.
type fakeDaemon struct {
	path string

	mu      sync.Mutex
	health  api.Health
	status  api.Status
	limits  []api.Limit
	keys    []api.Key
	talkers []api.Talker
	conns   api.Connections
	explain api.Explanation
	events  []api.Event
	reload  api.ReloadStatus
	shared  api.Shared
	changes []string // requests that change something: method and path
}

// Start time and current time of the fake daemon.
var (
	fakeStart = time.Date(2026, 3, 1, 10, 0, 0, 0, time.Local)
	fakeNow   = fakeStart.Add(2*time.Hour + 3*time.Minute)
)

// newFakeDaemon returns a daemon that throttles one source.
func newFakeDaemon() *fakeDaemon {
	down := []api.DownstreamStatus{
		{Listener: "db", Downstream: "10.0.0.5:5432", State: "up", InFlight: 12, MaxConnections: 50, Connect: api.Delay{Count: 9, P50: 0.00021}, TurnsRate: 1220.4, Answer: api.Delay{Count: 73000, P50: 0.0042, P99: 0.061}},
		{Listener: "db", Downstream: "10.0.0.6:5432", State: "down", DialsRefused: 5, DialsTimedOut: 2, DialsFailed: 1, Resets: 1},
	}
	bucket := &api.Bucket{BacklogBytes: 123456, Queued: 3, NextDeparture: 0.0351, InFlight: 5, Waiting: 7}
	first := api.Connection{
		ID: 4711, Protocol: "tcp", Source: "192.0.2.7:40000", ASN: 64500, ASName: "Example \x1b[31mLtd", Listener: "db", Port: 5432,
		Downstream: "10.0.0.5:5432", Stage: "open", Age: 61, Idle: 0.02, ToDownstream: 1234567, FromDownstream: 99, Waited: 12.34, ThrottledBy: "per-source", MostlyThrottledBy: "per-source",
	}
	return &fakeDaemon{
		health: api.Health{State: api.Ready},
		status: api.Status{
			Version: "v1", PID: 99, Config: "/etc/shaperd/shaperd.toml", Started: fakeStart, Now: fakeNow,
			State: "running", Mode: "enforce", Conformance: "conformant",
			Reload: api.ReloadStatus{OK: true, At: fakeStart, Loaded: fakeStart, Duration: 0.0021},
			Listeners: []api.ListenerStatus{{
				Name: "db", Addresses: []string{"tcp://0.0.0.0:5432"}, Connections: 12, Flows: 3, ToDownstreamRate: 1.21e6, FromDownstreamRate: 4e5,
				Accepted: 400, DialErrors: 1, Downstreams: down,
			}},
			Attachments: []api.AttachmentStatus{{Name: "plant", Interface: "eth1", Direction: "egress", Mode: "shape", Up: true, Queue: &api.QueueStatus{Packets: 7, Bytes: 9000, Drops: 1}}},
			Process:     api.Process{CPUCores: 0.034, Memory: 23_456_789, Descriptors: 40, MaxDescriptors: 20000, WakeupLatencyP99: 0.0001},
		},
		limits: []api.Limit{
			{
				Name: "per-source", Plane: "proxy", Mode: "enforce", Key: "source", Summary: "10Mbit/s, queue 200ms, 20 connections", Direction: "both",
				Rate: 1.25e6, MaxConnections: 20, Bytes: api.Rates{S1: 1.3e6, S10: 1.25e6, S60: 1.2e6}, BytesTotal: 5e9, DelayedShare: 0.84, Throttling: true,
				InFlight: 20, Waiting: 7, QueueDelay: api.Delay{Count: 9, P50: 0.035, P99: 0.18},
				Refused: map[string]uint64{"queue-full": 100, "wait-timeout": 4}, RefusedRate: map[string]float64{"queue-full": 3.2, "wait-timeout": 4.1},
				Conformance: api.Conformance{Conformant: true, Sigma: 14000, Allowed: 15000, Sampled: true},
			},
			{
				Name: "watch", Plane: "packet", Mode: "observe", Key: "all", Single: true, Summary: "100pps packets, queue 200ms", Direction: "egress",
				Packets: 100, PacketsRate: api.Rates{S10: 250}, DelayedShare: 0.5, Throttling: true, Conformance: api.Conformance{Conformant: true, Unmonitored: true},
			},
			{
				Name: "database", Plane: "proxy", Mode: "enforce", Key: "all", Single: true, Summary: "80Mbit/s, queue 200ms", Direction: "both",
				Rate: 1e7, Bytes: api.Rates{S10: 1.61e6}, Conformance: api.Conformance{Conformant: true, Sigma: 9000, Allowed: 15000},
			},
		},
		keys: []api.Key{
			{
				Key: "source 192.0.2.7/32", Source: "192.0.2.7/32", ASN: 64500, ASName: "Example", Rate: api.Estimate{Value: 1.2e6},
				Delayed: api.Estimate{Value: 0.84}, Dropped: api.Estimate{Value: 3, Error: 2}, Bucket: bucket,
			},
			{Key: "source 198.51.100.1/32", Source: "198.51.100.1/32", Rate: api.Estimate{Value: 5e4}, Delayed: api.Estimate{Value: 0.001}},
		},
		talkers: []api.Talker{
			{Name: "192.0.2.7", ASName: "Example", Rate: api.Estimate{Value: 1.2e6}, Delayed: api.Estimate{Value: 0.84}, Dropped: api.Estimate{Value: 3, Error: 2}},
			{Name: "evil\x1b]0;x\a", Rate: api.Estimate{Value: 10}},
		},
		conns: api.Connections{Total: 12, Connections: []api.Connection{first}},
		explain: api.Explanation{
			Source: "192.0.2.7", To: "tcp/5432", Listener: "db", ASN: 64500, ASName: "Example", Verdict: "delay", Reason: "rate", By: "per-source",
			Limits: []api.LimitBucket{
				{Limit: "per-source", Key: "source 192.0.2.7/32", Direction: "both", Summary: "10Mbit/s, queue 200ms", Mode: "enforce", Bucket: bucket},
				{Limit: "database", Key: "all", Direction: "both", Summary: "80Mbit/s, queue 200ms", Mode: "enforce"},
			},
			Bottlenecks: []api.Bottleneck{{Resource: "Bytes to the downstream", Limit: "per-source"}},
			Connections: []api.Connection{first},
		},
		events: []api.Event{
			{ID: 1, Time: fakeStart, Level: "info", Message: "ready", Attrs: map[string]string{"limits": "3"}},
			{ID: 2, Time: fakeNow, Level: "error", Message: "reload", Attrs: map[string]string{"err": "a b\x1b", "n": ""}},
		},
		reload: api.ReloadStatus{OK: true, Duration: 0.0021},
		shared: api.Shared{State: "none"},
	}
}

// serve starts d. It serves until the test ends, or until stop is called.
func (d *fakeDaemon) serve(t *testing.T) (stop func()) {
	t.Helper()
	if d.path == "" {
		dir, err := os.MkdirTemp("", "shaperd") // the path of a socket has 107 bytes at most
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		d.path = filepath.Join(dir, "control.sock")
	}
	l, err := net.Listen("unix", d.path)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(d.routes())
	s.Listener.Close()
	s.Listener = l
	s.Start()
	stop = sync.OnceFunc(s.Close)
	t.Cleanup(stop)
	return stop
}

func respond(w http.ResponseWriter, code int, body any) {
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(body)
}

// respondWith responds with *v.
func respondWith[T any](v *T) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { respond(w, 200, *v) }
}

func (d *fakeDaemon) routes() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /v1/status", respondWith(&d.status))
	mux.Handle("GET /v1/health", respondWith(&d.health))
	mux.Handle("GET /v1/limits", respondWith(&d.limits))
	mux.Handle("GET /v1/talkers", respondWith(&d.talkers))
	mux.Handle("GET /v1/connections", respondWith(&d.conns))
	mux.Handle("GET /v1/explain", respondWith(&d.explain))
	mux.Handle("GET /v1/blocks", respondWith(&d.status.Blocks))
	mux.Handle("GET /v1/downstreams", respondWith(&d.status.Listeners[0].Downstreams))
	mux.HandleFunc("GET /v1/events", func(w http.ResponseWriter, r *http.Request) {
		var since uint64
		fmt.Sscan(r.FormValue("since"), &since)
		respond(w, 200, slices.DeleteFunc(slices.Clone(d.events), func(e api.Event) bool { return e.ID <= since }))
	})
	mux.HandleFunc("GET /v1/limits/{limit}", d.withLimit(func(l *api.Limit) (any, error) { return l, nil }))
	mux.HandleFunc("GET /v1/limits/{limit}/keys", func(w http.ResponseWriter, r *http.Request) {
		d.withLimit(func(*api.Limit) (any, error) {
			return slices.DeleteFunc(slices.Clone(d.keys), func(k api.Key) bool {
				return map[string]api.Estimate{"delayed": k.Delayed, "dropped": k.Dropped, "rate": k.Rate}[r.FormValue("sort")].Value == 0
			}), nil
		})(w, r)
	})
	mux.HandleFunc("PATCH /v1/limits/{limit}", d.set)
	mux.HandleFunc("DELETE /v1/limits/{limit}/override", d.withLimit(func(l *api.Limit) (any, error) {
		l.Override, l.Summary = nil, "10Mbit/s, queue 200ms, 20 connections"
		return l, nil
	}))
	mux.HandleFunc("PUT /v1/bypass", func(w http.ResponseWriter, r *http.Request) {
		var s api.SetBypass
		json.NewDecoder(r.Body).Decode(&s)
		d.status.Bypass = nil
		if s.On {
			d.status.Bypass = &api.Bypass{Since: fakeNow, Until: fakeUntil(s.Duration)}
		}
		respond(w, 200, d.status)
	})
	mux.HandleFunc("POST /v1/blocks", func(w http.ResponseWriter, r *http.Request) {
		var s api.SetBlock
		json.NewDecoder(r.Body).Decode(&s)
		d.status.Blocks = append(d.status.Blocks, api.Block{Prefix: s.Prefix, Since: fakeNow, Until: fakeUntil(s.Duration)})
	})
	mux.HandleFunc("DELETE /v1/blocks", func(w http.ResponseWriter, r *http.Request) {
		n := len(d.status.Blocks)
		d.status.Blocks = slices.DeleteFunc(d.status.Blocks, func(b api.Block) bool { return b.Prefix == r.FormValue("prefix") })
		if len(d.status.Blocks) == n {
			respond(w, 404, api.Error{Message: r.FormValue("prefix") + " is not blocked"})
		}
	})
	mux.HandleFunc("PATCH /v1/downstreams", func(w http.ResponseWriter, r *http.Request) {
		var s api.SetDownstream
		json.NewDecoder(r.Body).Decode(&s)
		for i, down := range d.status.Listeners[0].Downstreams {
			if down.Downstream == s.Downstream && (s.Listener == "" || s.Listener == d.status.Listeners[0].Name) {
				d.status.Listeners[0].Downstreams[i].State = map[bool]string{true: "drained", false: "up"}[s.Drained]
				return
			}
		}
		respond(w, 404, api.Error{Message: fmt.Sprintf("unknown downstream %q", s.Downstream)})
	})
	mux.HandleFunc("DELETE /v1/connections/{id}", func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("id") != "4711" {
			respond(w, 404, api.Error{Message: "unknown connection " + r.PathValue("id")})
		}
	})
	mux.Handle("GET /v1/shared", respondWith(&d.shared))
	mux.HandleFunc("DELETE /v1/shared/hosts/{host}", func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("host") == "gw1" {
			respond(w, 422, api.Error{Message: `the ledger keeps the part of "gw1"`})
			return
		}
		respond(w, 200, d.shared)
	})
	mux.HandleFunc("POST /v1/reload", func(w http.ResponseWriter, _ *http.Request) {
		respond(w, map[bool]int{true: 200, false: 422}[d.reload.OK], d.reload)
	})
	mux.HandleFunc("POST /v1/stop", func(w http.ResponseWriter, _ *http.Request) {
		d.status.State = "stopping"
		respond(w, 200, d.status)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d.mu.Lock()
		defer d.mu.Unlock()
		if r.Method != "GET" {
			d.changes = append(d.changes, r.Method+" "+r.URL.Path)
		}
		mux.ServeHTTP(w, r)
	})
}

// change calls f while d handles no request.
func (d *fakeDaemon) change(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

func fakeUntil(seconds float64) *time.Time {
	if seconds == 0 {
		return nil
	}
	t := fakeNow.Add(time.Duration(seconds * 1e9))
	return &t
}

func (d *fakeDaemon) withLimit(f func(*api.Limit) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		for i := range d.limits {
			if d.limits[i].Name == r.PathValue("limit") {
				v, err := f(&d.limits[i])
				if err != nil {
					respond(w, 422, api.Error{Message: err.Error()})
					return
				}
				respond(w, 200, v)
				return
			}
		}
		respond(w, 404, api.Error{Message: fmt.Sprintf("unknown limit %q", r.PathValue("limit"))})
	}
}

func (d *fakeDaemon) set(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	d.withLimit(func(l *api.Limit) (any, error) {
		var s api.SetLimit
		if err := json.Unmarshal(body, &s); err != nil {
			return nil, err
		}
		for key, value := range s.Set {
			switch {
			case value == "10mbps":
				return nil, fmt.Errorf(`rate: "10mbps" is in bytes to tc and in bits to most people`)
			case key == "observe":
				l.Mode = shaper.Mode(value == "true").String()
			case key == "rate":
				l.Summary = value + ", queue 200ms, 20 connections"
			}
		}
		l.Override = s.Set
		d.status.Overrides = []api.Override{{Limit: l.Name, Set: s.Set, Since: fakeNow, Until: fakeUntil(s.Duration)}}
		return l, nil
	})(w, r)
}
