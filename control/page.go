package control

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"path"
	"strings"
	"time"
)

//go:embed page
var pageFiles embed.FS

// pageHeaders keep what the page shows to the page: it runs its own scripts alone, asks
// nobody but this server, and is shown in no frame. Text that attackers have chosen, the
// names of sources and what is logged of them, is never markup in it, and were it, nothing
// in it would run.
var pageHeaders = map[string]string{
	"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; " +
		"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
	"Cross-Origin-Opener-Policy":   "same-origin",
	"Cross-Origin-Resource-Policy": "same-origin",
	"Referrer-Policy":              "no-referrer",
	"X-Content-Type-Options":       "nosniff",
	"X-Frame-Options":              "DENY",

	// The daemon may be another one the next time: ask, and be told that nothing has changed.
	"Cache-Control": "no-cache",
}

// pageTypes are the content types of the page's files. What the host says of them does
// not matter.
var pageTypes = map[string]string{
	".css":  "text/css; charset=utf-8",
	".html": "text/html; charset=utf-8",
	".js":   "text/javascript; charset=utf-8",
	".svg":  "image/svg+xml",
}

// PageHandler serves the web page's files under "/". It answers GET and HEAD, and may be
// used by several goroutines.
func PageHandler() http.Handler {
	type file struct {
		content     []byte
		contentType string
		etag        string
	}
	files := make(map[string]file)
	err := fs.WalkDir(pageFiles, "page", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := pageFiles.ReadFile(name)
		if err != nil {
			return err
		}
		f := file{content: content, contentType: pageTypes[path.Ext(name)]}
		if f.contentType == "" {
			f.contentType = "text/plain; charset=utf-8"
		}
		sum := sha256.Sum256(content)
		f.etag = `"` + base64.RawURLEncoding.EncodeToString(sum[:12]) + `"`
		files[strings.TrimPrefix(name, "page")] = f
		return nil
	})
	if err != nil {
		panic(err) // the files are in the binary
	}
	files["/"] = files["/index.html"]

	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for k, v := range pageHeaders {
			w.Header().Set(k, v)
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "the page is only read: GET or HEAD", http.StatusMethodNotAllowed)
			return
		}
		f, ok := files[r.URL.Path]
		if !ok {
			http.Error(w, "there is no such page", http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Type", f.contentType)
		w.Header().Set("ETag", f.etag)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(f.content))
	})
}

// guardHost passes to next what asks for a host that can only be this one, whatever the
// port: "localhost", a loopback address, and the host of addr, where next is listened for.
// When addr is every address of the host, so is any address. Everything else gets 421: a
// page elsewhere whose name was made to point here (DNS rebinding) must not read what a
// browser in the same network may.
func guardHost(addr string, next http.Handler) http.Handler {
	own := hostOf(addr)
	ownIP, err := netip.ParseAddr(own)
	every := own == "" || err == nil && ownIP.IsUnspecified()

	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host := hostOf(r.Host)
		ip, err := netip.ParseAddr(host)
		ok := host == "localhost" || host != "" && host == own
		if err == nil {
			ip = ip.Unmap()
			ok = every || ip.IsLoopback() || ip == ownIP.Unmap()
		}
		if !ok {
			http.Error(w, "This server does not answer to the host that was asked for.\n"+
				"Ask for its address, or for localhost by way of a tunnel: ssh -L 9465:localhost:9465 HOST",
				http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// ownOrigin keeps pages of other origins from asking next, and from having its answers.
func ownOrigin(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cross-Origin-Resource-Policy", "same-origin")
		switch r.Header.Get("Sec-Fetch-Site") {
		case "", "same-origin", "none": // no browser, the page, who typed the address
			next.ServeHTTP(w, r)
		default:
			http.Error(w, "this is not for pages of other sites", http.StatusForbidden)
		}
	})
}

// Loopback reports whether only this host can connect to addr, a host:port.
func Loopback(addr string) bool {
	host := hostOf(addr)
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

// hostOf returns the host in host:port or host, in lower case and without brackets.
func hostOf(s string) string {
	if h, _, err := net.SplitHostPort(s); err == nil {
		s = h
	} else if strings.HasPrefix(s, "[") && strings.HasSuffix(s, "]") {
		s = s[1 : len(s)-1]
	}
	return strings.ToLower(s)
}
