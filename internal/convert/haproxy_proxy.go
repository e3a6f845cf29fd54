package convert

import (
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
)

// A haServer is a server of a backend.
type haServer struct {
	st          *haStatement
	address     string
	weight      int
	maxconn     int    // 0 is no bound
	maxqueue    int    // 0 is no bound
	check, send string // values of the keys "check" and "send_proxy", or ""
}

// proxy converts a frontend, or a listen section.
func (h *haproxy) proxy(s *haSection) {
	if s.why != "" {
		return
	}
	if h.full("listen") {
		s.why = tooMany
		return
	}
	if mode := s.setting("mode"); mode != nil && !slices.Equal(mode.words, []string{"mode", "tcp"}) {
		s.why = "the proxy has " + mode.text() + ", and shaperd forwards TCP"
		return
	}
	if s.setting("disabled") != nil {
		s.why = "it is disabled"
		return
	}
	backend := s
	if st := s.setting("default_backend"); st != nil && len(st.words) == 2 {
		backend = h.named[st.words[1]]
		if backend == nil || backend.why != "" {
			s.why = fmt.Sprintf("its backend %q is not converted", st.words[1])
			return
		}
		if backend.setting("disabled") != nil {
			s.why, backend.why = "its backend is disabled", "it is disabled"
			return
		}
		if mode := backend.setting("mode"); mode != nil && !slices.Equal(mode.words, []string{"mode", "tcp"}) {
			s.why, backend.why = "its backend has "+mode.text(), "the backend has "+mode.text()
			return
		}
	}
	binds, accept, why := h.binds(s)
	servers, whyNot := h.servers(backend)
	if why == "" {
		why = whyNot
	}
	if why != "" {
		s.why = why
		return
	}
	s.used, backend.used = true, true
	t := h.add("listen", s.name, s.line, s.kind+" "+s.name)
	t.set("address", quoteList(binds), s.all("bind")[0].line, s.all("bind")[0].text())
	h.downstreams(t, s, backend, servers)
	if accept != nil {
		t.set("accept_proxy_from", `["0.0.0.0/0", "::/0"]`, accept.line, accept.text()+"; name your proxies instead")
	}
	if d, st := backend.time(&h.draft, "connect"); st != nil {
		t.option("connect_timeout", duration(d), st.line, st.text())
	}
	client, fromClient := s.time(&h.draft, "client")
	server, fromServer := backend.time(&h.draft, "server")
	switch {
	case fromClient != nil && (fromServer == nil || client <= server):
		t.option("tcp_idle_timeout", duration(client), fromClient.line, fromClient.text())
	case fromServer != nil:
		t.option("tcp_idle_timeout", duration(server), fromServer.line, fromServer.text())
	}
	h.serverLimit(t, s, backend, servers)
	inFlight := 0
	for _, server := range servers {
		if inFlight += server.maxconn; server.maxconn == 0 {
			inFlight = 0
			break
		}
	}
	h.sourceLimits(t, s, inFlight)
	for _, side := range []*haSection{s, backend} {
		h.bandwidth(t, side, s)
		if side == backend {
			break
		}
	}
}

// binds returns the addresses of a frontend, and the statement that accepts the PROXY protocol, or why they cannot be
// converted.
func (h *haproxy) binds(s *haSection) (all []string, accept *haStatement, why string) {
	for _, st := range s.all("bind") {
		if len(st.words) < 2 {
			return nil, nil, "a bind without an address"
		}
		st.used = true
		for one := range strings.SplitSeq(st.words[1], ",") {
			address, ok := haAddress(one)
			if !ok {
				return nil, nil, fmt.Sprintf("%q is not an IP address with one port", one)
			}
			all = append(all, "tcp://"+address)
		}
		if first := s.all("bind")[0]; slices.Contains(st.words, "accept-proxy") != slices.Contains(first.words, "accept-proxy") {
			return nil, nil, "some of its binds accept the PROXY protocol, and others do not: make it two frontends"
		}
		for i := 2; i < len(st.words); i++ {
			switch option := st.words[i]; option {
			case "accept-proxy":
				accept = st
			case "ssl":
				return nil, nil, "shaperd does not terminate TLS"
			case "name", "maxconn", "backlog", "interface", "mss", "tcp-ut", "process", "thread", "shards", "id", "nice", "uid", "gid", "mode", "user", "group":
				i++
				h.leaveOut(st.line, strings.Join(st.words[i-1:min(i+1, len(st.words))], " "), "an option of the socket")
			default:
				h.leaveOut(st.line, option, "an option of the socket")
			}
		}
	}
	if len(all) == 0 {
		return nil, nil, "it has no bind"
	}
	return all, accept, ""
}

// haAddress returns an address to bind as shaperd writes it.
func haAddress(s string) (string, bool) {
	s = strings.TrimPrefix(strings.TrimPrefix(s, "ipv4@"), "ipv6@")
	colon := strings.LastIndexByte(s, ':')
	if colon < 0 {
		return "", false
	}
	host, port := strings.Trim(s[:colon], "[]"), s[colon+1:]
	switch host {
	case "", "*":
		host = "0.0.0.0"
	case "::":
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil || net.ParseIP(host) == nil {
		return "", false
	}
	return net.JoinHostPort(host, port), true
}

// servers returns the servers of a backend, or why they cannot be converted.
func (h *haproxy) servers(backend *haSection) (all []haServer, why string) {
	for _, st := range backend.all("server") {
		if len(st.words) < 3 {
			return nil, "a server without an address"
		}
		st.used = true
		host, port, err := net.SplitHostPort(st.words[2])
		if err != nil || host == "" {
			return nil, fmt.Sprintf("%q is not an address with a port", st.words[2])
		}
		s := haServer{st: st, address: net.JoinHostPort(host, port), weight: 1}
		if s, why = h.serverOptions(s, backend, st.words[3:]); why != "" {
			return nil, why
		}
		if s.address != "" {
			all = append(all, s)
		}
	}
	if len(all) == 0 {
		return nil, "it has no server"
	}
	return all, ""
}

// serverOptions reads the options of a server. Without an address, the server is left out.
func (h *haproxy) serverOptions(s haServer, backend *haSection, words []string) (_ haServer, why string) {
	if defaults := backend.setting("default-server"); defaults != nil {
		words = slices.Concat(defaults.words[1:], words)
	}
	checked, every := false, map[string]string{}
	for i := 0; i < len(words); i++ {
		option, value := words[i], ""
		if slices.Contains([]string{"weight", "maxconn", "maxqueue", "minconn", "inter", "rise", "fall", "fastinter", "downinter", "slowstart", "port", "on-marked-down", "on-error", "id", "cookie", "observe", "error-limit", "resolvers", "init-addr"}, option) {
			if i++; i == len(words) {
				return s, option + " without a value"
			}
			value = words[i]
		}
		number, err := strconv.Atoi(value)
		switch {
		case option == "ssl":
			return s, "shaperd does not open TLS connections"
		case option == "backup" || option == "disabled":
			h.leaveOut(s.st.line, s.st.text(), "shaperd uses all downstreams")
			s.address = ""
			return s, ""
		case option == "check":
			checked = true
		case option == "send-proxy":
			s.send = "v1"
		case option == "send-proxy-v2":
			s.send = "v2"
		case option == "weight" && err == nil && number >= 1 && number <= 256:
			s.weight = number
		case option == "maxconn" && err == nil && number >= 0 && number <= 1<<20:
			s.maxconn = number
		case option == "maxqueue" && err == nil && number >= 0 && number <= 1<<20:
			s.maxqueue = number
		case option == "inter" || option == "rise" || option == "fall":
			every[option] = value
		default:
			h.leaveOut(s.st.line, strings.TrimSpace(option+" "+value), "an option of a server that shaperd does not have")
		}
	}
	if checked {
		s.check = haCheck(every)
	}
	return s, ""
}

// haCheck returns the value of the key "check". Defaults are those of HAProxy.
func haCheck(options map[string]string) string {
	parts := []string{`interval = "2s"`, "rise = 2", "fall = 3"}
	if v, ok := haTime(options["inter"]); ok {
		parts[0] = "interval = " + duration(v)
	}
	for i, name := range []string{"rise", "fall"} {
		if n, ok := count(options[name]); ok {
			parts[i+1] = fmt.Sprintf("%s = %d", name, n)
		}
	}
	return "{ " + strings.Join(parts, ", ") + " }"
}

// downstreams sets the keys of the servers.
func (h *haproxy) downstreams(t *table, s, backend *haSection, servers []haServer) {
	first := servers[0]
	if len(servers) == 1 {
		t.set("downstream", quote(first.address), first.st.line, first.st.text())
	} else {
		h.severalServers(t, s, backend, servers)
	}
	for _, server := range servers {
		if server.check != first.check || server.send != first.send {
			h.leaveOut(server.st.line, server.st.text(), "check and send-proxy are for all downstreams of a listener: they are those of the first server")
		}
	}
	if first.check != "" {
		t.option("check", first.check, first.st.line, first.st.text())
	}
	if first.send != "" {
		t.set("send_proxy", quote(first.send), first.st.line, first.st.text())
	}
}

func (h *haproxy) severalServers(t *table, s, backend *haSection, servers []haServer) {
	var all []string
	capped := false
	for _, server := range servers {
		one := "{ address = " + quote(server.address)
		if server.weight != 1 {
			one += fmt.Sprintf(", weight = %d", server.weight)
		}
		if server.maxconn > 0 {
			one += fmt.Sprintf(", max_connections = %d", server.maxconn)
			capped = true
		}
		if server.maxqueue > 0 {
			h.leaveOut(server.st.line, fmt.Sprintf("maxqueue %d", server.maxqueue), "the connections of a listener wait for any of its downstreams: see max_queue")
		}
		all = append(all, one+" }")
	}
	t.set("downstream", "["+strings.Join(all, ", ")+"]", servers[0].st.line, fmt.Sprintf("the servers of %s %s", backend.kind, backend.name))
	balances := map[string]string{"roundrobin": "round-robin", "leastconn": "least-connections", "source": "source-hash"}
	if st := backend.setting("balance"); st != nil {
		if to := balances[st.words[min(1, len(st.words)-1)]]; to != "" && len(st.words) == 2 {
			t.option("balance", quote(to), st.line, st.text())
		} else {
			h.leaveOut(st.line, st.text(), "shaperd has round-robin, least-connections and source-hash")
		}
	}
	if !capped {
		return
	}
	if d, st := backend.time(&h.draft, "queue"); st != nil {
		connect, of := backend.time(&h.draft, "connect")
		if of == nil || d != connect {
			h.leaveOut(st.line, st.text(), "a connection waits for one of several downstreams for connect_timeout")
		}
	}
	if st := s.setting("maxconn"); st != nil {
		if n, ok := count(st.words[min(1, len(st.words)-1)]); ok {
			t.option("max_queue", strconv.Itoa(n), st.line, st.text())
		}
	}
}

// serverLimit converts the maxconn of a single server, which frontends share, and that of the frontend.
func (h *haproxy) serverLimit(listen *table, s, backend *haSection, servers []haServer) {
	name := listen.name
	frontend := 0
	st := s.setting("maxconn")
	if st != nil {
		n, ok := count(st.words[min(1, len(st.words)-1)])
		if !ok || len(st.words) != 2 {
			h.leaveOut(st.line, st.text(), "not a number of connections")
		}
		frontend = n
	}
	server := servers[0]
	switch {
	case len(servers) > 1 && slices.ContainsFunc(servers, func(s haServer) bool { return s.maxconn > 0 }):
		return // each downstream has its cap
	case len(servers) > 1 || server.maxconn == 0:
		if frontend > 0 {
			t := h.add("limit", name+"-maxconn", st.line, st.text())
			t.match(name, s.line, s.kind+" "+s.name)
			t.set("max_connections", strconv.Itoa(frontend), st.line, st.text())
			t.implied("queue_timeout", `"1h"`, "those beyond wait; in HAProxy they do in the backlog of the socket, without an end")
		}
		return
	}
	if t := h.limited[backend]; t != nil {
		t.addListen(name)
		if frontend > 0 {
			h.leaveOut(st.line, st.text(), "the frontends of backend %s share one queue: set max_queue", backend.name)
		}
		return
	}
	t := h.add("limit", server.st.words[1]+"-maxconn", server.st.line, server.st.text())
	h.limited[backend] = t
	t.match(name, s.line, s.kind+" "+s.name)
	t.set("max_connections", strconv.Itoa(server.maxconn), server.st.line, fmt.Sprintf("maxconn %d", server.maxconn))
	if d, from := backend.time(&h.draft, "queue"); from != nil {
		t.option("queue_timeout", duration(d), from.line, from.text())
	} else if d, from := backend.time(&h.draft, "connect"); from != nil {
		t.option("queue_timeout", duration(d), from.line, from.text()+", as there is no timeout queue")
	}
	switch queue := frontend - server.maxconn; {
	case server.maxqueue > 0 && (frontend == 0 || server.maxqueue < queue):
		t.set("max_queue", strconv.Itoa(server.maxqueue), server.st.line, fmt.Sprintf("maxqueue %d", server.maxqueue))
	case frontend > 0:
		t.set("max_queue", strconv.Itoa(max(queue, 0)), st.line, fmt.Sprintf("%s, of which %d are with the server; HAProxy leaves those beyond in the backlog, shaperd refuses them", st.text(), server.maxconn))
	}
}
