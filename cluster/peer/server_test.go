package peer

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/internal/testutil"
)

func TestServer_IsTheLedgerOfAGroup(t *testing.T) {
	a := newAuthority(t)
	server := startServer(t, a.host("gw1"), defaultBounds, "")
	own := NewClient(ClientOptions{
		Addresses: []string{server.address}, Group: "default", Local: server.Server, LocalAddress: server.address,
	})
	defer own.Close()
	capital := a.host("capital", func(c *x509.Certificate) { c.DNSNames = []string{"GW2.example.net"} })
	hosts := map[string]*Client{
		"gw1": own, "gw2": newClient(t, capital, server.address), "gw3.example.net": newClient(t, a.host("gw3"), server.address),
	}
	for name, c := range hosts {
		mustCall(t, c, newHost(name, params))
	}
	for name, c := range hosts {
		shot, err := c.Snapshot(t.Context())
		if err != nil || len(shot.Hosts) != 3 || shot.Hosts[1].Name != "gw2" || shot.Params != params {
			t.Errorf("%s: snapshot %+v, %v", name, shot, err)
		}
		if ok, err := c.Forget(t.Context(), "gw1"); ok || err != nil {
			t.Errorf("%s: a host that has just called is forgotten: %v, %v", name, ok, err)
		}
	}
	if other, err := hosts["gw2"].Snapshot(t.Context(), "none"); err != nil || len(other.Buckets) != 0 || other.Epoch == 0 {
		t.Errorf("snapshot of an unknown bucket: %+v, %v", other, err)
	}
}

// TestServer_KeepsGroupsApart has two groups with hosts of the same name.
func TestServer_KeepsGroupsApart(t *testing.T) {
	a := newAuthority(t)
	server := startServer(t, a.host("gw1"), defaultBounds, "")
	files := a.host("gw2")
	for i := range maxGroups + 1 {
		c := NewClient(ClientOptions{Addresses: []string{server.address}, Group: fmt.Sprintf("group-%d", i), Files: files})
		defer c.Close()
		h := newHost("gw2", params)
		if i == maxGroups {
			mustFail(t, c, h, "16 other groups")
			break
		}
		h.Want("db", cluster.Whole, 1)
		mustCall(t, c, h)
		if shot, err := c.Snapshot(t.Context()); err != nil || len(shot.Hosts) != 1 || shot.Hot != 1 {
			t.Errorf("group %d: %+v, %v", i, shot, err)
		}
	}
}

// TestServer_KeepsGroupsThatCall has a host ask for groups that do not exist, and one more group than there may be.
func TestServer_KeepsGroupsThatCall(t *testing.T) {
	now := cluster.Second
	s := &Server{groups: map[string]*served{}, clock: func() cluster.Time { return now }}
	call := func(group string) error {
		_, err := local{s, group}.Call(t.Context(), newHost("gw1", params).Request(0, nil))
		return err
	}
	for i := range maxGroups + 1 {
		l := local{s, fmt.Sprint("wrong-", i)}
		shot, err1 := l.Snapshot(t.Context())
		forgotten, err2 := l.Forget(t.Context(), "gw1")
		if err := errors.Join(err1, err2, l.Ping(t.Context(), "gw1")); err != nil || shot.Epoch != 0 || forgotten {
			t.Fatalf("a group without calls: %+v, %v, %v", shot, forgotten, err)
		}
	}
	for i := range maxGroups {
		if err := call(fmt.Sprint("group-", i)); err != nil {
			t.Fatal(err)
		}
		now += cluster.Second
	}
	expiry := cluster.Second + 2*params.Lease + params.Step // of the first
	for _, test := range []struct {
		at    cluster.Time
		group string
		want  error
	}{
		{expiry - 1, "late", errGroups},
		{expiry - 1, "group-1", nil},
		{expiry, "late", nil},
		{expiry + cluster.Second, "group-0", errGroups}, // as group-1 has called
		{expiry + 2*cluster.Second, "group-0", nil},
	} {
		now = test.at
		if err := call(test.group); !errors.Is(err, test.want) {
			t.Errorf("%s calls at %v: %v, want %v", test.group, test.at, err, test.want)
		}
	}
}

func TestServer_RefusesStrangers(t *testing.T) {
	a, foreign := newAuthority(t), newAuthority(t)
	server := startServer(t, a.host("gw1"), defaultBounds, "")
	stranger := foreign.host("gw2")
	stranger.CA = a.path("ca.pem") // it trusts the server, which does not trust it
	renamed := func(names ...string) func(*x509.Certificate) {
		return func(c *x509.Certificate) { c.DNSNames, c.Subject.CommonName = names, "gw3" }
	}
	for name, test := range map[string]struct {
		files Files
		host  string
		err   string
	}{
		"a client of another authority":  {stranger, "gw2", "it refuses the certificate of this host: remote error: tls: unknown certificate authority"},
		"a server of another authority":  {foreign.host("gw2"), "gw2", "x509: certificate signed by unknown authority"},
		"an expired certificate":         {a.host("old", expired), "old", "it refuses the certificate of this host: remote error: tls: expired certificate"},
		"one of servers only":            {a.host("web", func(c *x509.Certificate) { c.ExtKeyUsage = c.ExtKeyUsage[1:] }), "web", "it refuses the certificate"},
		"a call for another host":        {a.host("gw2"), "gw3", "does not name this host"},
		"for the common name":            {a.host("renamed-0", renamed("gw2")), "gw3", `certificate for ["gw2"]`},
		"for a part of a label":          {a.host("renamed-1", renamed("gw2-a.example.net")), "gw2", "does not name this host"},
		"for a label in the middle":      {a.host("renamed-2", renamed("a.gw2.example.net")), "gw2", "does not name this host"},
		"for another spelling":           {a.host("gw2"), "GW2", "does not name this host"},
		"for that of the certificate":    {a.host("renamed-4", renamed("GW2.example.net")), "GW2", "does not name this host"},
		"for another spelling of all":    {a.host("gw2"), "gw2.Example.net", "does not name this host"},
		"a wildcard":                     {a.host("renamed-3", renamed("*.example.net")), "gw2.example.net", "does not name this host"},
		"a key of another certificate":   {Files{a.path("ca.pem"), a.host("gw2").Cert, a.host("gw4").Key}, "gw2", "gw4.key: tls: private key does not match"},
		"no key":                         {Files{a.path("ca.pem"), a.path("gw2.pem"), a.path("none")}, "gw2", "no such file"},
		"authorities that are no such":   {Files{a.path("gw2.key"), a.path("gw2.pem"), a.path("gw2.key")}, "gw2", "no certificate in"},
		"a folder in place of a file":    {Files{filepath.Dir(a.CAFile), a.path("gw2.pem"), a.path("gw2.key")}, "gw2", "is not a regular file"},
		"an endless file in place of it": {Files{"/dev/zero", a.path("gw2.pem"), a.path("gw2.key")}, "gw2", "is not a regular file"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newClient(t, test.files, server.address)
			mustFail(t, c, newHost(test.host, params), test.err)
			mustFail(t, c, newHost(test.host, params), "ask the ledger at "+server.address)
		})
	}
	if shot, _ := (local{server.Server, "default"}).Snapshot(t.Context()); len(shot.Hosts) != 0 {
		t.Errorf("the ledger knows %+v", shot.Hosts)
	}
}

func TestServer_LogsRefusals(t *testing.T) {
	a, foreign := newAuthority(t), newAuthority(t)
	server := startServer(t, a.host("gw1"), defaultBounds, "")
	stranger := foreign.host("gw2")
	stranger.CA = a.path("ca.pem")
	mustFail(t, newClient(t, stranger, server.address), newHost("gw2", params), "unknown certificate authority")
	mustFail(t, newClient(t, a.host("gw2"), server.address), newHost("gw3", params), "does not name")
	for range 3 { // port scans are not logged
		c, err := net.Dial("tcp", server.address)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	client := newClient(t, a.host("gw4"), server.address)
	for range 100 {
		_, _ = call(client, newHost("gw5", params))
	}
	for _, reason := range []string{"from=127.0.0.1:", "certificate signed by unknown authority", "does not name this host"} {
		server.log.WaitFor(t, reason)
	}
	text := server.log.String()
	if n := strings.Count(text, "\n"); n > 15 || strings.Contains(text, "EOF") || strings.Contains(text, "PRIVATE") {
		t.Errorf("%d lines:\n%s", n, text)
	}
}

func TestServer_OfAnotherName(t *testing.T) {
	a := newAuthority(t)
	files := a.host("gw1", func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(10, 0, 0, 1)} })
	server := startServer(t, files, defaultBounds, "")
	mustFail(t, newClient(t, a.host("gw2"), server.address), newHost("gw2", params), "x509: certificate is valid for 10.0.0.1, not 127.0.0.1")
}

func TestServe_Fails(t *testing.T) {
	a := newAuthority(t)
	files := a.host("gw1")
	used := startServer(t, files, defaultBounds, "")
	for want, o := range map[string]ServerOptions{
		"address already in use": {Address: used.address, Files: files},
		"no such file":           {Address: "127.0.0.1:0", Files: Files{files.CA, files.Cert, a.path("none")}},
	} {
		if _, err := Serve(o); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "serve the ledger at "+o.Address) {
			t.Errorf("%v; want an error with %q and the address", err, want)
		}
	}
}

// TestServer_RefusesGarbage sends what no host sends, with a valid certificate.
func TestServer_RefusesGarbage(t *testing.T) {
	a := newAuthority(t)
	server := startServer(t, a.host("gw1"), defaultBounds, "")
	files := a.host("gw2")
	valid := string(encode(t, newHost("gw2", params).Request(0, nil)))
	with := func(old, new string) string {
		if !strings.Contains(valid, old) {
			t.Fatalf("%s is not in %s", old, valid)
		}
		return strings.Replace(valid, old, new, 1)
	}
	call := path("default", opCall)
	for name, test := range map[string]struct {
		path, body string
		status     int
		reason     string
	}{
		"nothing":           {call, "", 400, "decode the request: EOF"},
		"no JSON":           {call, "\x16\x03\x01", 400, "decode the request"},
		"null":              {call, "null", 403, "does not name this host"},
		"a list":            {call, "[]", 400, "decode the request"},
		"two requests":      {call, valid + valid, 400, "something follows it"},
		"an unknown field":  {call, with(`"Leave"`, `"Stay"`), 400, `unknown field "Stay"`},
		"a fraction":        {call, with(`"N":1`, `"N":1.5`), 400, "decode the request"},
		"a huge number":     {call, with(`"N":1`, `"N":1e300`), 400, "decode the request"},
		"a negative number": {call, with(`"N":1`, `"N":-1`), 400, "call -1: must be 0 to"},
		"too many hosts":    {call, with(`"Hosts":4`, `"Hosts":1000000000`), 400, "1000000000 hosts"},
		"too many items":    {call, with(`"Items":null`, `"Items":[{}`+strings.Repeat(",{}", cluster.MaxItems)+`]`), 400, "101 items"},
		"too large":         {call, with(`"Info":""`, `"Info":"`+strings.Repeat("x", maxBody)+`"`), 413, "request body too large"},
		"deep":              {call, with(`"Items":null`, `"Items":`+strings.Repeat("[", maxBody/2)), 400, "decode the request"},
		"an unknown group":  {path(strings.Repeat("g", 65), opCall), valid, 400, "group"},
		"an unknown op":     {path("default", "drop"), valid, 404, "not found"},
		"another version":   {"/v0/default/call", valid, 404, "not found"},
	} {
		status, reply := post(t, files, server.address, test.path, []byte(test.body))
		if status != test.status || !strings.Contains(reply, test.reason) {
			t.Errorf("%s: %d %.200s; want %d with %q", name, status, reply, test.status, test.reason)
		}
	}
	if status, reply := post(t, files, server.address, call, []byte(valid)); status != 200 {
		t.Errorf("a valid call after all of that: %d %s", status, reply)
	}
}

// TestServer_NoTLS sends other protocols, and nothing.
func TestServer_NoTLS(t *testing.T) {
	a := newAuthority(t)
	server := startServer(t, a.host("gw1"), fast, "")
	for _, text := range []string{"", "POST /v1/default/call HTTP/1.1\r\nHost: x\r\n\r\n", "\x16\x03\x01\x02\x00\x01", strings.Repeat("\xff", 100_000)} {
		c, err := net.Dial("tcp", server.address)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, text)
		if reply, _ := io.ReadAll(c); bytes.Contains(reply, []byte("200 OK")) {
			t.Errorf("%.20q is answered with %q", text, reply)
		}
		c.Close()
	}
	if c := newClient(t, a.host("gw2"), server.address); c != nil {
		mustCall(t, c, newHost("gw2", params))
	}
}

// TestServer_SlowClients has clients with a certificate send a request bit by bit, or half of it, or nothing.
func TestServer_SlowClients(t *testing.T) {
	a := newAuthority(t)
	server := startServer(t, a.host("gw1"), fast, "")
	files := a.host("gw2")
	for name, text := range map[string]string{
		"nothing":        "",
		"half a header":  "POST /v1/default/call HTTP/1.1\r\nHost:",
		"half a request": "POST /v1/default/call HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{",
	} {
		c := dialTLS(t, files, server.address)
		_, _ = io.WriteString(c, text)
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := io.Copy(io.Discard, c); err != nil && os.IsTimeout(err) {
			t.Errorf("%s: the connection stays open", name)
		}
	}
	c := dialTLS(t, files, server.address)
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	for text := "POST /" + strings.Repeat("x", maxHeader/2); ; {
		if _, err := io.WriteString(c, text[:1]); err != nil {
			if os.IsTimeout(err) {
				t.Error("a request that comes byte by byte is waited for")
			}
			break
		}
		text = text[1:] + text[:1]
		time.Sleep(10 * time.Millisecond)
	}
}

// TestServer_ManyConnections has strangers and hosts hold more connections than there may be.
func TestServer_ManyConnections(t *testing.T) {
	a := newAuthority(t)
	b := defaultBounds
	b.strangers = 8
	server := startServer(t, a.host("gw1"), b, "")
	client, host := newClient(t, a.host("gw2"), server.address), newHost("gw2", params)
	mustCall(t, client, host)
	for range 10 * b.strangers {
		c, err := net.Dial("tcp", server.address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	mustCall(t, client, host) // on its connection
	mustCall(t, newClient(t, a.host("gw3"), server.address), newHost("gw3", params))

	files := a.host("gw4")
	for range 30 { // more than 2 * 4 hosts + 16
		c := dialTLS(t, files, server.address)
		fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n{\"Host\":\"gw4\"}", path("default", opPing))
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
		reply := make([]byte, 15)
		if _, err := io.ReadFull(c, reply); err != nil || string(reply) != "HTTP/1.1 200 OK" {
			t.Fatalf("a ping is answered with %q, %v", reply, err)
		}
		mustCall(t, client, host)
	}
	testutil.WaitFor(t, "connections beyond the maximum are closed", func() bool { return server.open() <= b.strangers+24 })
}

// open returns the number of connections.
func (s *testServer) open() (n int) {
	l := s.listener
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.strangers.Len() + l.hosts.Len()
}

// TestServer_Close closes a server while calls arrive.
func TestServer_Close(t *testing.T) {
	a := newAuthority(t)
	server := startServer(t, a.host("gw1"), defaultBounds, "")
	var processed atomic.Int64
	server.mu.Lock()
	server.clock = func() cluster.Time { return cluster.Time(processed.Add(1)) }
	server.mu.Unlock()
	own := local{server.Server, "default"}
	client, host := newClient(t, a.host("gw2"), server.address), newHost("gw2", params)
	var calls sync.WaitGroup
	calls.Go(func() {
		for {
			if _, err := call(client, host); err != nil {
				return
			}
		}
	})
	testutil.WaitFor(t, "calls are processed", func() bool { return processed.Load() > 10 })
	server.Close()
	closed := processed.Load()
	calls.Wait()
	for _, err := range []error{
		own.Ping(t.Context(), "gw1"),
		func() error { _, err := own.Call(t.Context(), newHost("gw1", params).Request(0, nil)); return err }(),
	} {
		if err == nil || err.Error() != "the server is closed" {
			t.Errorf("in this process the closed server replies with %v", err)
		}
	}
	mustFail(t, client, host, "connection refused")
	if n := processed.Load(); n != closed {
		t.Errorf("%d calls were processed after the server was closed", n-closed)
	}
	// Another one at the same address knows nothing.
	startServer(t, a.host("gw1"), defaultBounds, server.address)
	r, err := call(client, host)
	if err != nil || r.Live != 0 || r.Settled {
		t.Errorf("the next server replies with %+v, %v", r, err)
	}
}

// TestProtocol has all fields of the protocol. When it fails, servers and clients of before do not understand
// those of now: raise protocolVersion if a field has another meaning; a new field is refused anyway.
func TestProtocol(t *testing.T) {
	q := cluster.Request{
		Params: params, Host: "gw1", Start: 1, N: 2, Got: 3, GotAge: 4, Epoch: 5, Leased: true, Claim: true, More: true, Over: true, Left: true,
		Known: 6, Told: true, Items: []cluster.Item{{Key: "db", Has: 7, Want: 8, Weight: 9, Every: 12, Burst: 13}}, Digest: 1<<64 - 1, Info: "\x00é", Leave: true,
		Gone: []cluster.Gone{{Host: "gw2", Start: 10, N: 11}},
	}
	r := cluster.Reply{
		N: 1, Start: 2, Latest: 3, Epoch: 4, Refused: cluster.RefusedParams, Params: params, Live: 5, Counted: true, Settled: true, AllTold: true, Resync: true,
		Renew: true, Version: 6, Events: []cluster.Event{{Version: 7, Key: "db", Cold: true}},
		Grants: []cluster.Grant{{Key: "db", Parts: 8, Short: true, Tight: true}}, Sales: []cluster.Sale{{Key: "@sms", N: 14, At: -15, Every: 16}},
		Gone: q.Gone, Differ: 9, AskInfo: true,
	}
	for _, test := range []struct {
		value any
		want  string
	}{
		{q, `{"Params":{"Hosts":4,"Lease":20000000,"Step":1000000,"Strict":false},"Host":"gw1","Start":1,"N":2,"Got":3,"GotAge":4,"Epoch":5,` +
			`"Leased":true,"Claim":true,"More":true,"Over":true,"Left":true,"Known":6,"Told":true,"Items":[{"Key":"db","Has":7,"Want":8,"Weight":9,"Every":12,"Burst":13}],` +
			`"Digest":18446744073709551615,"Info":"\u0000é","Leave":true,"Gone":[{"Host":"gw2","Start":10,"N":11}]}`},
		{r, `{"N":1,"Start":2,"Latest":3,"Epoch":4,"Refused":3,"Params":{"Hosts":4,"Lease":20000000,"Step":1000000,"Strict":false},"Live":5,` +
			`"Counted":true,"Settled":true,"AllTold":true,"Resync":true,"Renew":true,"Version":6,"Events":[{"Version":7,"Key":"db","Cold":true}],` +
			`"Grants":[{"Key":"db","Parts":8,"Short":true,"Tight":true}],"Sales":[{"Key":"@sms","N":14,"At":-15,"Every":16}],"Gone":[{"Host":"gw2","Start":10,"N":11}],"Differ":9,"AskInfo":true}`},
	} {
		if got := string(encode(t, test.value)); got != test.want {
			t.Errorf("got  %s\nwant %s", got, test.want)
		}
	}
	var back cluster.Request
	if err := json.Unmarshal(encode(t, q), &back); err != nil || string(encode(t, back)) != string(encode(t, q)) {
		t.Errorf("decoded: %+v, %v", back, err)
	}
}
