package cli

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers/legacy"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestAPI_MatchesOpenAPI validates responses of a daemon against its OpenAPI document.
func TestAPI_MatchesOpenAPI(t *testing.T) {
	s, _, listen := startConnected(t)
	client := testutil.UnixClient(t, s.socket)
	ask := func(method, target, body string) (*http.Request, *http.Response, []byte) {
		t.Helper()
		q, err := http.NewRequest(method, "http://shaperd"+target, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		a, err := client.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		defer a.Body.Close()
		text, err := io.ReadAll(a.Body)
		if err != nil {
			t.Fatal(err)
		}
		return q, a, text
	}
	_, _, file := ask("GET", "/v1/openapi.json", "")
	doc, err := openapi3.NewLoader().LoadFromData(file)
	if err != nil {
		t.Fatal(err)
	}
	router, err := legacy.NewRouter(doc)
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(listen)
	shows := []string{
		"/v1/status", "/v1/limits", "/v1/limits/per-source", "/v1/limits/per-source/keys", "/v1/talkers?by=source", "/v1/talkers?by=prefix", "/v1/talkers?by=asn",
		"/v1/connections", "/v1/downstreams", "/v1/explain?source=127.0.0.1&to=tcp/" + port, "/v1/blocks", "/v1/events", "/v1/history", "/v1/config",
	}
	type request struct {
		method, target, body string
		code                 int
	}
	var all []request
	show := func() {
		for _, target := range shows {
			all = append(all, request{"GET", target, "", 200})
		}
	}
	show()
	all = append(
		all,
		request{"PATCH", "/v1/limits/per-source", `{"set":{"rate":"2MB/s"},"duration_seconds":60}`, 200},
		request{"PATCH", "/v1/limits/per-source", `{"set":{"rate":"2"}}`, 422},
		request{"PATCH", "/v1/limits/per-source", `{"set":{"name":"x"}}`, 422},
		request{"POST", "/v1/blocks", `{"prefix":"192.0.2.0/24","duration_seconds":60}`, 200},
		request{"PUT", "/v1/bypass", `{"on":true,"duration_seconds":60}`, 200},
	)
	show()
	all = append(
		all,
		request{"GET", "/v1/explain?source=x&to=tcp/1", "", 422},
		request{"PUT", "/v1/bypass", `{"on":false}`, 200},
		request{"DELETE", "/v1/blocks?prefix=192.0.2.0/24", "", 200},
		request{"DELETE", "/v1/blocks?prefix=192.0.2.0/24", "", 404},
		request{"DELETE", "/v1/limits/per-source/override", "", 200},
		request{"DELETE", "/v1/limits/per-source/override", "", 422},
		request{"DELETE", "/v1/connections/1000000", "", 404},
		request{"POST", "/v1/reload", "", 200},
	)
	check := func(r request) {
		t.Helper()
		q, a, text := ask(r.method, r.target, r.body)
		if a.StatusCode != r.code {
			t.Errorf("%+v: %d, %s", r, a.StatusCode, text)
		}
		route, params, err := router.FindRoute(q)
		if err != nil {
			t.Fatal(r, err)
		}
		if err := openapi3filter.ValidateResponse(t.Context(), &openapi3filter.ResponseValidationInput{
			RequestValidationInput: &openapi3filter.RequestValidationInput{Request: q, PathParams: params, Route: route},
			Status:                 a.StatusCode, Header: a.Header, Body: io.NopCloser(bytes.NewReader(text)),
			Options: &openapi3filter.Options{IncludeResponseStatus: true},
		}); err != nil {
			t.Errorf("%+v: %v", r, err)
		}
	}
	for _, r := range all {
		check(r)
	}
	if err := os.WriteFile(s.config, []byte("wrong = 1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	check(request{"POST", "/v1/reload", "", 422})
	check(request{"GET", "/v1/status", "", 200})
}
