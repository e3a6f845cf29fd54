package peer

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	"golang.org/x/time/rate"

	"shaperd.dev/shaperd/cluster"
)

// FuzzCall has two hosts with valid certificates send anything to a ledger: each line is the body of a request,
// whose first byte says who sends what, and how much later.
func FuzzCall(f *testing.F) {
	q := newHost("gw1", params).Request(0, nil)
	q.Items = []cluster.Item{{Key: "db", Want: cluster.Whole, Weight: 1}, {Key: "web", Has: 5, Want: 7, Weight: 3}}
	first := encode(f, q)
	q.N, q.Got, q.Epoch, q.Leased, q.Claim, q.Known, q.Items[0].Has = 2, 1, 1_000_000, true, true, 3, cluster.Whole
	q.Gone = []cluster.Gone{{Host: "gw2", Start: 1, N: 1}, {Host: "gw3"}}
	second := encode(f, q)
	q.N, q.Leave, q.Claim = 3, true, false
	third := encode(f, q)
	lines := func(all ...[]byte) []byte { return bytes.Join(all, []byte("\n")) }
	f.Add(first)
	f.Add(lines(append([]byte{0}, first...), append([]byte{0x10}, second...), append([]byte{0x40}, third...)))
	f.Add(lines(append([]byte{1}, bytes.ReplaceAll(first, []byte("gw1"), []byte("gw2"))...), append([]byte{0x22}, `{"Keys":["db"]}`...), append([]byte{0x34}, `{"Host":"gw1"}`...)))
	f.Add([]byte("\x06{\"Host\":\"gw1\"}\n\x00null\n\x00{\"Params\":{\"Hosts\":1000000000}}"))
	f.Fuzz(func(t *testing.T, script []byte) {
		now := cluster.Second
		s := &Server{bounds: defaultBounds, groups: map[string]*served{}, clock: func() cluster.Time { return now }}
		h := s.handler(&refusalLog{slog.New(slog.DiscardHandler), rate.NewLimiter(1, 1)})
		for _, line := range bytes.Split(script, []byte("\n")) {
			if len(line) == 0 {
				continue
			}
			choice, body := line[0], line[1:]
			if choice == '{' {
				choice, body = 0, line
			}
			now += cluster.Time(choice>>4) * cluster.Second / 4
			r := httptest.NewRequest(http.MethodPost, path("default", []string{opCall, opSnapshot, opForget, opPing}[choice>>1&3]), bytes.NewReader(body))
			names := []string{"gw1.example.net"}
			if choice&1 != 0 {
				names = []string{"gw2", "gw3"}
			}
			r.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{{DNSNames: names}}}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			switch w.Code {
			case http.StatusOK:
				if !json.Valid(w.Body.Bytes()) {
					t.Fatalf("%q is answered with %q", line, w.Body)
				}
			case http.StatusBadRequest, http.StatusForbidden, http.StatusRequestEntityTooLarge:
			default:
				t.Fatalf("%q is answered with status %d", line, w.Code)
			}
			checkLedger(t, s, now)
		}
	})
}

// checkLedger checks what a ledger must keep whatever hosts say.
func checkLedger(t *testing.T, s *Server, now cluster.Time) {
	t.Helper()
	l := s.groups["default"]
	if l == nil {
		return
	}
	shot := l.Snapshot(now)
	if len(shot.Hosts)+len(shot.Gone) > max(1, shot.Params.Hosts) || shot.Params.Hosts > cluster.MaxHosts {
		t.Fatalf("%d hosts and %d that are gone, of %d", len(shot.Hosts), len(shot.Gone), shot.Params.Hosts)
	}
	for _, b := range shot.Buckets {
		var sum int64
		for _, h := range b.Holders {
			if h.Parts < 0 || h.Want < 0 || h.Want > cluster.Whole || h.Weight < 1 || h.Weight > cluster.MaxWeight {
				t.Fatalf("bucket %q: %+v", b.Key, h)
			}
			sum += h.Parts
		}
		if sum > cluster.Whole {
			t.Fatalf("bucket %q: hosts have %d of %d parts", b.Key, sum, cluster.Whole)
		}
	}
}
