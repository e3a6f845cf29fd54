package control

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control/internal/fakes"
	"shaperd.dev/shaperd/control/metrics"
)

// slowPackets is a packet plane that hangs until released is closed.
type slowPackets struct {
	fakes.Packets
	attachments []api.AttachmentStatus
	released    chan struct{} // nil does not hang
	err         error
}

func (p slowPackets) PacketStatus() (s metrics.PacketStatus, ok bool, err error) {
	if p.released != nil {
		<-p.released
	}
	s.Attachments = p.attachments
	return s, p.attachments != nil, p.err
}

func TestProbes(t *testing.T) {
	up := api.AttachmentStatus{Name: "uplink", Interface: "eth0", Up: true}
	down := api.AttachmentStatus{Name: "wan", Interface: "eth1"}
	missing := api.AttachmentStatus{Name: "lost"}
	for _, tt := range []struct {
		name           string
		change         func(*Options, *fakeDaemon)
		ready, healthz string // response bodies
	}{
		{"ready", func(*Options, *fakeDaemon) {}, "ready", "ok"},
		{"starting", func(o *Options, _ *fakeDaemon) { o.Ready = make(chan struct{}) }, "starting", "ok"},
		{"stopping", func(_ *Options, d *fakeDaemon) { d.stopping.Store(true) }, "stopping", "ok"},
		{"slow", func(_ *Options, d *fakeDaemon) { d.silence.Store(int64(silentAfter)) }, "ready", "ok"},
		{
			"silent", func(_ *Options, d *fakeDaemon) { d.silence.Store(int64(silentAfter + 1500*time.Millisecond)) },
			"silent: no answer for 6s", "silent: no answer for 6s",
		},
		{"attached", func(o *Options, _ *fakeDaemon) { o.Packets = slowPackets{attachments: []api.AttachmentStatus{up}} }, "ready", "ok"},
		{
			"not attached", func(o *Options, _ *fakeDaemon) {
				o.Packets = slowPackets{attachments: []api.AttachmentStatus{up, down, missing}}
			}, "not attached: wan at eth1, lost", "ok",
		},
		{
			"unreadable", func(o *Options, _ *fakeDaemon) { o.Packets = slowPackets{err: errors.New("secret")} },
			"not attached: the packet plane cannot be read", "ok",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := &fakeDaemon{}
			o := options(t, fakes.Shaper(t, 1))
			o.Daemon, o.Packets = d, slowPackets{}
			tt.change(o, d)
			mux := http.NewServeMux()
			o.view().withProbes(mux)
			for path, want := range map[string]string{"/ready": tt.ready, "/healthz": tt.healthz} {
				code := http.StatusOK
				if want != "ok" && want != "ready" {
					code = http.StatusServiceUnavailable
				}
				w := httptest.NewRecorder()
				mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
				if w.Code != code || w.Body.String() != want+"\n" {
					t.Errorf("%s: %d %q, want %d %q", path, w.Code, w.Body, code, want)
				}
			}
			w := httptest.NewRecorder()
			admin := context.WithValue(t.Context(), peerKey{}, &peer{role: Admin})
			newAPI(o).ServeHTTP(w, httptest.NewRequestWithContext(admin, http.MethodGet, "/v1/health", nil))
			var h api.Health
			if err := json.Unmarshal(w.Body.Bytes(), &h); err != nil || w.Code != http.StatusOK || h.String() != tt.ready {
				t.Errorf("GET /v1/health: %d %s, %v", w.Code, w.Body, err)
			}
		})
	}
}

// TestProbes_HungPacketPlane checks that probers get an answer while the packet plane gives none,
// that they do not pile up, and that the next one after the end of the hang gets the truth.
func TestProbes_HungPacketPlane(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := options(t, fakes.Shaper(t, 1))
		released := make(chan struct{})
		o.Packets = slowPackets{released: released}
		mux := http.NewServeMux()
		o.view().withProbes(mux)
		probe := func() string {
			w := httptest.NewRecorder()
			mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/ready", nil))
			return strings.TrimSpace(w.Body.String())
		}
		for range 3 {
			begun := time.Now()
			if got := probe(); got != "not attached: the packet plane does not answer" || time.Since(begun) != attachmentsTimeout {
				t.Errorf("%q after %v", got, time.Since(begun))
			}
		}
		if v := o.view(); v.attachmentsProbe.pending == nil {
			t.Error("nothing is pending")
		}
		close(released)
		synctest.Wait()
		if got := probe(); got != "ready" {
			t.Errorf("%q after the hang", got)
		}
	})
}
