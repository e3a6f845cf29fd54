package control

import (
	"net/http"
	"net/http/httptest"
	"testing"
)

func TestGuardHost(t *testing.T) {
	for _, test := range []struct {
		listen string
		yes    []string
		no     []string
	}{
		{
			"127.0.0.1:9464",
			[]string{"127.0.0.1:9464", "127.0.0.1", "127.8.9.1:80", "localhost", "LocalHost:9464", "localhost:1", "[::1]:9464", "[::1]", "[::ffff:127.0.0.1]:9464"},
			[]string{
				"", ":9464", "evil.example", "evil.example:9464", "127.0.0.1.evil.example", "localhost.evil.example:9464", "evil-localhost",
				"192.0.2.1:9464", "[2001:db8::1]:9464", "0.0.0.0:9464", "[::]:9464", "0x7f000001", "2130706433", "127.1", "127.0.0.1:9464:9464", "[127.0.0.1", "a b",
			},
		},
		{
			"192.0.2.1:9464",
			[]string{"192.0.2.1:9464", "192.0.2.1:80", "192.0.2.1", "[::ffff:192.0.2.1]", "localhost:9464", "127.0.0.1"},
			[]string{"192.0.2.2:9464", "shaper.example:9464", "[2001:db8::1]"},
		},
		{
			"[2001:db8::1]:9464",
			[]string{"[2001:db8::1]:9464", "[2001:DB8:0::1]", "[::1]"},
			[]string{"[2001:db8::2]:9464", "192.0.2.1", "evil.example"},
		},
		{
			"shaper.example:9464",
			[]string{"shaper.example:9464", "SHAPER.example", "localhost", "127.0.0.1"},
			[]string{"evil.example", "shaper.example.evil.example", "192.0.2.1"},
		},
		{
			":9464",
			[]string{"192.0.2.1:9464", "[2001:db8::1]:9464", "localhost", "127.0.0.1"},
			[]string{"", "evil.example", "shaper.example:9464"},
		},
		{
			"0.0.0.0:9464",
			[]string{"192.0.2.1:9464", "10.0.0.1", "localhost"},
			[]string{"evil.example", "evil.example:9464", "", "192.0.2.1.evil.example"},
		},
		{
			"[::]:9464",
			[]string{"192.0.2.1:9464", "[2001:db8::1]"},
			[]string{"evil.example"},
		},
	} {
		passed := false
		h := guardHost(test.listen, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { passed = true }))
		ask := func(host string) int {
			passed = false
			r := httptest.NewRequest("GET", "/v1/status", nil)
			r.Host = host
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			return w.Code
		}
		for _, host := range test.yes {
			if code := ask(host); !passed || code != http.StatusOK {
				t.Errorf("listening on %q, host %q: %d", test.listen, host, code)
			}
		}
		for _, host := range test.no {
			if code := ask(host); passed || code != http.StatusMisdirectedRequest {
				t.Errorf("listening on %q, host %q: %d, want 421", test.listen, host, code)
			}
		}
	}
}
