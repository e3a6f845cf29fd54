package control

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"shaperd.dev/shaperd/control/internal/fakes"
	"shaperd.dev/shaperd/control/monitor"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// No request causes a panic or an internal error.
func FuzzRequests(f *testing.F) {
	for _, r := range (&handlers{}).routes() {
		method, path, _ := strings.Cut(r.pattern, " ")
		for _, a := range endpoints[r.pattern].asks {
			f.Add(method, a.target(path), []byte(a.body), uint8(Admin))
		}
	}
	s := shaper.New(1000)
	p, err := s.Compile([]shaper.Limit{{Name: "aa", Rate: 8e6}}, []shaper.Listener{{Name: "l", Addresses: []shaper.Address{{Protocol: shaper.TCP}}}}, nil, nil, false)
	if err != nil {
		f.Fatal(err)
	}
	s.Swap(p, 0)
	m := monitor.New(s, fakes.Proxy{}.Downstreams, noLog)
	f.Cleanup(m.Close)
	h := newAPI(&Options{
		Shaper: s, Proxy: fakes.Proxy{}, Packets: fakes.Packets{}, Clock: func() leaky.Time { return 0 }, Monitor: m,
		Reloads: &monitor.Reloads{}, Events: monitor.NewEvents(10), Daemon: &fakeDaemon{}, Log: noLog,
	})
	f.Fuzz(func(t *testing.T, method, target string, body []byte, role uint8) {
		if strings.HasPrefix(target, "/debug/") {
			return
		}
		q, err := http.NewRequest(method, "http://shaperd"+target, strings.NewReader(string(body)))
		if err != nil || strings.HasPrefix(q.URL.Path, "/debug/") {
			return
		}
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), peerKey{}, &peer{role: Role(role % 3)}))
		cancel() // otherwise a stream would not end
		w := httptest.NewRecorder()
		h.ServeHTTP(w, q.WithContext(ctx))
		if w.Code >= 500 && w.Code != http.StatusServiceUnavailable {
			t.Errorf("%s %s: %d, %s", method, target, w.Code, w.Body)
		}
		if w.Code == http.StatusOK && w.Header().Get("Content-Type") == "application/json" && !json.Valid(w.Body.Bytes()) {
			t.Errorf("%s %s: %s", method, target, w.Body)
		}
	})
}
