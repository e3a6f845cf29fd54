package control

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"shaperd.dev/shaperd/control/internal/fakes"
	"shaperd.dev/shaperd/internal/testutil"
)

// A type error names JSON types, not Go types.
func TestWrongTypeIsNamed(t *testing.T) {
	client := testutil.UnixClient(t, serveOn(t, options(t, fakes.Shaper(t, 1)), -1, nil).socket.path)
	for _, tt := range []struct{ method, path, body, want string }{
		{"PUT", "/v1/bypass", `{"on":"yes"}`, `on must be true or false, not "yes"`},
		{"PUT", "/v1/bypass", ` { "on" : 1 } `, `on must be true or false, not 1`},
		{"PUT", "/v1/bypass", `{"on":true,"duration_seconds":"1m"}`, `duration_seconds must be a number, not "1m"`},
		{"PUT", "/v1/bypass", `{"on":true,"duration_seconds":1e999}`, `duration_seconds must be a smaller number, not 1e999`},
		{"PUT", "/v1/bypass", `{"on":true,"duration_seconds":{"a":[1,{"b":2}]}}`, `duration_seconds must be a number, not an object`},
		{"PUT", "/v1/bypass", `{"duration_seconds":[[1],2],"on":true}`, `duration_seconds must be a number, not an array`},
		{"PUT", "/v1/bypass", `["on"]`, `must be an object, not an array`},
		{"PUT", "/v1/bypass", `"on"`, `must be an object, not "on"`},
		{"PUT", "/v1/bypass", `{"what":1}`, `unknown field "what"`},
		{"POST", "/v1/blocks", `{"prefix":["192.0.2.1"]}`, `prefix must be a string, not an array`},
		{"POST", "/v1/blocks", `{"prefix":17}`, `prefix must be a string, not 17`},
		{"POST", "/v1/blocks", `{"prefix":"192.0.2.1","duration_seconds":"` + strings.Repeat("9", 4000) + `"}`, `duration_seconds must be a number, not "` + strings.Repeat("9", maxShown-1) + `...`},
		{"PATCH", "/v1/limits/aa", `{"set":"rate=1MB/s"}`, `set must be an object, not "rate=1MB/s"`},
		{"PATCH", "/v1/limits/aa", `{"set":{"rate":1}}`, `set.rate must be a string, not 1`},
		{"PATCH", "/v1/limits/aa", `{"set":{"rate":false}}`, `set.rate must be a string, not false`},
	} {
		t.Run(tt.body[:min(len(tt.body), 40)], func(t *testing.T) {
			q, err := http.NewRequestWithContext(t.Context(), tt.method, "http://shaperd"+tt.path, strings.NewReader(tt.body))
			if err != nil {
				t.Fatal(err)
			}
			a, err := client.Do(q)
			if err != nil {
				t.Fatal(err)
			}
			defer a.Body.Close()
			got, err := io.ReadAll(a.Body)
			if err != nil {
				t.Fatal(err)
			}
			want := `{"error":"invalid request body: ` + strings.ReplaceAll(tt.want, `"`, `\"`) + "\"}\n"
			if a.StatusCode != http.StatusBadRequest || string(got) != want {
				t.Errorf("%d %s\nwant %s", a.StatusCode, got, want)
			}
		})
	}
}
