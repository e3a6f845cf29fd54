// Package web serves the files of the dashboard, which are part of the binary. The dashboard
// reads the API of package control, at the same port. No state is kept, and no goroutine started.
package web

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"io/fs"
	"net/http"
	"path"
	"strings"
	"time"
)

//go:embed static
var static embed.FS

// headers isolate the dashboard: it runs only its own scripts, sends requests only to
// this server, and cannot be framed. Text chosen by attackers, such as reverse names of sources
// and log messages about them, is never markup in it, and would not run if it were.
var headers = map[string]string{
	"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; " +
		"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
	"Cross-Origin-Opener-Policy":   "same-origin",
	"Cross-Origin-Resource-Policy": "same-origin",
	"Referrer-Policy":              "no-referrer",
	"X-Content-Type-Options":       "nosniff",
	"X-Frame-Options":              "DENY",

	// The next daemon may have other files: revalidate, which costs a 304.
	"Cache-Control": "no-cache",
}

// contentTypes are the content types of the files, independent of those of the host.
var contentTypes = map[string]string{
	".css":  "text/css; charset=utf-8",
	".html": "text/html; charset=utf-8",
	".js":   "text/javascript; charset=utf-8",
	".svg":  "image/svg+xml",
}

// Handler serves the files of the dashboard under "/", for GET and HEAD. It may be used
// concurrently.
func Handler() http.Handler {
	type file struct {
		content     []byte
		contentType string
		etag        string
	}
	files := make(map[string]file)
	err := fs.WalkDir(static, "static", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := static.ReadFile(name)
		if err != nil {
			return err
		}
		f := file{content: content, contentType: contentTypes[path.Ext(name)]}
		if f.contentType == "" {
			f.contentType = "text/plain; charset=utf-8"
		}
		sum := sha256.Sum256(content)
		f.etag = `"` + base64.RawURLEncoding.EncodeToString(sum[:12]) + `"`
		files[strings.TrimPrefix(name, "static")] = f
		return nil
	})
	if err != nil {
		panic(err) // impossible: the files are embedded
	}
	files["/"] = files["/index.html"]

	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for k, v := range headers {
			w.Header().Set(k, v)
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "method not allowed: use GET or HEAD", http.StatusMethodNotAllowed)
			return
		}
		f, ok := files[r.URL.Path]
		if !ok {
			http.Error(w, "not found", http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Type", f.contentType)
		w.Header().Set("ETag", f.etag)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(f.content))
	})
}
