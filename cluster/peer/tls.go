package peer

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"slices"
	"strings"
)

// Files are the names of PEM files: the certificates of the authorities of the group, and the
// certificate of this host with its private key. They are read at each handshake, so that they can be
// renewed at any time.
type Files struct{ CA, Cert, Key string }

func (f *Files) certificate() (*tls.Certificate, error) {
	c, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return nil, fmt.Errorf("load certificate: %w", err)
	}
	return &c, nil
}

func (f *Files) authorities() (*x509.CertPool, error) {
	text, err := os.ReadFile(f.CA)
	if err != nil {
		return nil, fmt.Errorf("load certificates of the authorities: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("load certificates of the authorities: %s has none", f.CA)
	}
	return pool, nil
}

// server returns the configuration of a server's connection.
func (f *Files) server() (*tls.Config, error) {
	pool, err := f.authorities()
	if err != nil {
		return nil, err
	}
	own, err := f.certificate()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*own},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
		SessionTicketsDisabled: true, // the authorities may have changed since
	}, nil
}

// client returns the configuration of a client of a server whose certificate is for host.
func (f *Files) client(host string) (*tls.Config, error) {
	pool, err := f.authorities()
	if err != nil {
		return nil, err
	}
	own, err := f.certificate()
	if err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool, Certificates: []tls.Certificate{*own}, ServerName: host}, nil
}

// speaksFor reports whether the holder of a certificate may call for a host.
func speaksFor(c *x509.Certificate, host string) bool {
	return strings.EqualFold(c.Subject.CommonName, host) || slices.ContainsFunc(c.DNSNames, func(name string) bool {
		label, _, _ := strings.Cut(name, ".")
		return strings.EqualFold(name, host) || strings.EqualFold(label, host)
	})
}
