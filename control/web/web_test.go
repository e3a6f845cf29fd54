package web

import (
	"io/fs"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
)

func TestHandler_Files(t *testing.T) {
	h := Handler()
	for path, contentType := range map[string]string{
		"/":                         "text/html; charset=utf-8",
		"/index.html":               "text/html; charset=utf-8",
		"/app.js":                   "text/javascript; charset=utf-8",
		"/style.css":                "text/css; charset=utf-8",
		"/icon.svg":                 "image/svg+xml",
		"/vendor/uPlot.iife.min.js": "text/javascript; charset=utf-8",
		"/vendor/uPlot.LICENSE":     "text/plain; charset=utf-8",
	} {
		for _, method := range []string{"GET", "HEAD"} {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(method, path, nil))
			if w.Code != http.StatusOK || w.Header().Get("Content-Type") != contentType {
				t.Errorf("%s %s: %d, %s, want 200, %s", method, path, w.Code, w.Header().Get("Content-Type"), contentType)
			}
			if got := w.Body.Len() > 0; got != (method == "GET") {
				t.Errorf("%s %s: %d bytes", method, path, w.Body.Len())
			}
		}
	}
}

func TestHandler_Errors(t *testing.T) {
	h := Handler()
	for _, test := range []struct {
		method, path string
		code         int
	}{
		{"GET", "/no.js", http.StatusNotFound},
		{"GET", "/vendor/", http.StatusNotFound},
		{"GET", "/vendor/../app.js", http.StatusNotFound},
		{"GET", "/web.go", http.StatusNotFound},
		{"POST", "/", http.StatusMethodNotAllowed},
		{"PUT", "/app.js", http.StatusMethodNotAllowed},
		{"DELETE", "/no.js", http.StatusMethodNotAllowed},
		{"OPTIONS", "/", http.StatusMethodNotAllowed},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(test.method, test.path, nil))
		if w.Code != test.code {
			t.Errorf("%s %s: %d, want %d", test.method, test.path, w.Code, test.code)
		}
		if allow := w.Header().Get("Allow"); (allow == "GET, HEAD") != (test.code == http.StatusMethodNotAllowed) {
			t.Errorf("%s %s: Allow is %q", test.method, test.path, allow)
		}
	}
}

func TestHandler_Headers(t *testing.T) {
	h := Handler()
	for _, test := range []struct{ method, path string }{{"GET", "/"}, {"GET", "/app.js"}, {"GET", "/no"}, {"POST", "/"}} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(test.method, test.path, nil))
		for name, want := range map[string]string{
			"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; " +
				"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
			"Cross-Origin-Opener-Policy": "same-origin",
			"Referrer-Policy":            "no-referrer",
			"X-Content-Type-Options":     "nosniff",
			"X-Frame-Options":            "DENY",
			"Cache-Control":              "no-cache",
		} {
			// net/http removes it from errors.
			if name == "Cache-Control" && w.Code != http.StatusOK {
				continue
			}
			if got := w.Header().Get(name); got != want {
				t.Errorf("%s %s: %s is %q, want %q", test.method, test.path, name, got, want)
			}
		}
	}
}

func TestHandler_NotModified(t *testing.T) {
	h := Handler()
	tags := make(map[string]string)
	for _, path := range []string{"/", "/app.js", "/style.css"} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
		tag := w.Header().Get("ETag")
		if other, ok := tags[tag]; ok || tag == "" {
			t.Errorf("%s has the ETag %q of %q", path, tag, other)
		}
		tags[tag] = path

		r := httptest.NewRequest("GET", path, nil)
		r.Header.Set("If-None-Match", tag)
		w = httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != http.StatusNotModified || w.Body.Len() > 0 {
			t.Errorf("%s unchanged: %d, %d bytes, want 304 and none", path, w.Code, w.Body.Len())
		}
	}
}

// The Content-Security-Policy blocks these in a browser; this test shows where they are.
func TestStatic_HasNoInlineCode(t *testing.T) {
	forbidden := regexp.MustCompile(`(?i)\sstyle\s*=|\son[a-z]+\s*=\s*["']|javascript:|<style|<script>|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|https?://|@import`)
	err := fs.WalkDir(static, "static", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasPrefix(path, "static/vendor/") {
			return err
		}
		content, err := static.ReadFile(path)
		if err != nil {
			return err
		}
		for _, found := range forbidden.FindAllString(strings.ReplaceAll(string(content), "http://www.w3.org/2000/svg", ""), -1) {
			t.Errorf("%s has %q", path, found)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
