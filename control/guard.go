package control

import (
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// guardHost passes requests to next if their Host header can only mean this host, whatever the
// port: "localhost", a loopback address, the host of addr, which is the listening address, or
// any address if addr is a wildcard. All others get 421: a page elsewhere whose name was made
// to resolve to this address (DNS rebinding) must not read what a browser in this network may.
func guardHost(addr string, next http.Handler) http.Handler {
	own := hostOf(addr)
	ownIP, err := netip.ParseAddr(own)
	wildcard := own == "" || err == nil && ownIP.IsUnspecified()

	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host := hostOf(r.Host)
		ip, err := netip.ParseAddr(host)
		ok := host == "localhost" || host != "" && host == own
		if err == nil {
			ip = ip.Unmap()
			ok = wildcard || ip.IsLoopback() || ip == ownIP.Unmap()
		}
		if !ok {
			http.Error(w, "This server does not serve the requested host name.\n"+
				"Use its IP address, or localhost through a tunnel: ssh -L 9465:localhost:9465 HOST",
				http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// sameOrigin rejects requests of pages of other origins, and keeps them from embedding responses.
func sameOrigin(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cross-Origin-Resource-Policy", "same-origin")
		switch r.Header.Get("Sec-Fetch-Site") {
		case "", "same-origin", "none": // no browser, the dashboard, or a typed address
			next.ServeHTTP(w, r)
		default:
			http.Error(w, "cross-site requests are not allowed", http.StatusForbidden)
		}
	})
}

// Loopback reports whether addr, a host:port, is reachable from this host only.
func Loopback(addr string) bool {
	host := hostOf(addr)
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

// hostOf returns the host of host:port or host, in lower case and without brackets.
func hostOf(s string) string {
	if h, _, err := net.SplitHostPort(s); err == nil {
		s = h
	} else if strings.HasPrefix(s, "[") && strings.HasSuffix(s, "]") {
		s = s[1 : len(s)-1]
	}
	return strings.ToLower(s)
}
