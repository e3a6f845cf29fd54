package control

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// TestReady checks that requests wait for a daemon that is starting, for a bounded time, and that
// the request to stop it does not.
func TestReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ready := make(chan struct{})
		o := options(t, shaper.New(1024))
		o.Ready = ready
		socket, dashboard := newAPI(o), newReadOnlyAPI(o)
		admin := context.WithValue(t.Context(), peerKey{}, &peer{role: Admin})
		ask := func(h http.Handler, method, path string) (code int, took time.Duration) {
			w, start := httptest.NewRecorder(), time.Now()
			h.ServeHTTP(w, httptest.NewRequestWithContext(admin, method, path, nil))
			return w.Code, time.Since(start)
		}
		if code, took := ask(socket, http.MethodPost, "/v1/stop"); code != http.StatusOK || took != 0 {
			t.Errorf("stop: %d after %v", code, took)
		}
		for name, h := range map[string]http.Handler{"socket": socket, "dashboard": dashboard} {
			if code, took := ask(h, http.MethodGet, "/v1/status"); code != http.StatusServiceUnavailable || took != startWait {
				t.Errorf("%s: %d after %v", name, code, took)
			}
		}
		time.AfterFunc(time.Second, func() { close(ready) })
		for name, h := range map[string]http.Handler{"socket": socket, "dashboard": dashboard} {
			if code, took := ask(h, http.MethodGet, "/v1/status"); code != http.StatusOK || took > time.Second {
				t.Errorf("%s, then ready: %d after %v", name, code, took)
			}
		}
	})
}
