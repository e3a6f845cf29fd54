package redis

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// authority signs certificates in a directory.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t, dir: t.TempDir()}
	a.cert, a.key = a.sign("ca", "")
	return a
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

// sign writes NAME.pem and NAME.key. The first certificate is that of the authority.
func (a *authority) sign(name, host string) (*x509.Certificate, *ecdsa.PrivateKey) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	if host != "" {
		template.IPAddresses = []net.IP{net.ParseIP(host)}
	}
	parent, parentKey := a.cert, a.key
	if parent == nil {
		template.IsCA, template.BasicConstraintsValid = true, true
		parent, parentKey = template, key
	}
	text, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, parentKey)
	if err != nil {
		a.t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	a.write(name+".pem", "CERTIFICATE", text)
	a.write(name+".key", "PRIVATE KEY", private)
	cert, err := x509.ParseCertificate(text)
	if err != nil {
		a.t.Fatal(err)
	}
	return cert, key
}

func (a *authority) write(name, kind string, text []byte) {
	if err := os.WriteFile(a.path(name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: text}), 0o600); err != nil {
		a.t.Fatal(err)
	}
}

func TestTLS(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		ours, other := newAuthority(t), newAuthority(t)
		start := func(name, protocols string) *server {
			return startServer(t, binary, "--port", "0", "--tls-port", "PORT", "--tls-protocols", protocols, "--tls-auth-clients", "yes",
				"--tls-cert-file", ours.path(name+".pem"), "--tls-key-file", ours.path(name+".key"), "--tls-ca-cert-file", ours.path("ca.pem"))
		}
		ours.sign("client", "")
		other.sign("client", "")
		ours.sign("elsewhere", "10.1.2.3")
		ours.sign("server", "127.0.0.1")
		sv := start("server", "TLSv1.3")
		host, _, _ := net.SplitHostPort(sv.address)
		ours.sign("server", host) // read again by the next servers
		sv.kill()
		sv.start()
		options := func(change func(*Options)) Options {
			o := Options{URL: "rediss://" + sv.address, CAFile: ours.path("ca.pem"), CertFile: ours.path("client.pem"), KeyFile: ours.path("client.key")}
			change(&o)
			return o
		}
		newCaller(t, openStore(t, options(func(*Options) {}))).mustCall()

		wrongName, old, plain := start("elsewhere", "TLSv1.3"), start("server", "TLSv1.2"), startServer(t, binary)
		for what, c := range map[string]struct {
			change func(*Options)
			want   string
		}{
			"wrong authority":     {func(o *Options) { o.CAFile = other.path("ca.pem") }, "unknown authority"},
			"that of the system":  {func(o *Options) { o.CAFile = "" }, "unknown authority"},
			"no certificate":      {func(o *Options) { o.CertFile, o.KeyFile = "", "" }, ""},
			"unknown certificate": {func(o *Options) { o.CertFile, o.KeyFile = other.path("client.pem"), other.path("client.key") }, ""},
			"missing file":        {func(o *Options) { o.CAFile = other.path("none.pem") }, "no such file"},
			"not a file":          {func(o *Options) { o.CAFile = os.DevNull }, "not a regular file"},
			"key of another":      {func(o *Options) { o.KeyFile = other.path("client.key") }, "certificate of the client"},
			"wrong name":          {func(o *Options) { o.URL = "rediss://" + wrongName.address }, "valid for 10.1.2.3"},
			"TLS 1.2":             {func(o *Options) { o.URL = "rediss://" + old.address }, "protocol version"},
			"no TLS at all":       {func(o *Options) { o.URL = "rediss://" + plain.address }, "TLS"},
			"no TLS at the host":  {func(o *Options) { o.URL = "redis://" + sv.address }, ""},
		} {
			_, err := newCaller(t, openStore(t, options(c.change))).call()
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v, want %q", what, err, c.want)
			}
		}
	})
}
