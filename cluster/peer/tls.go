package peer

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"slices"
	"strings"

	"shaperd.dev/shaperd/internal/safefile"
)

// Files are the names of PEM files: the certificates of the authorities of the group, and the
// certificate of this host with its private key. They are read at each handshake, so that they can be
// renewed at any time.
type Files struct{ CA, Cert, Key string }

// maxFile is the maximum size of a file in bytes.
const maxFile = 1 << 20

// load reads the files.
func (f *Files) load() (authorities *x509.CertPool, own tls.Certificate, err error) {
	texts := [3][]byte{}
	for i, name := range []string{f.CA, f.Cert, f.Key} {
		if texts[i], err = safefile.ReadRegular(name, maxFile); err != nil {
			return nil, own, fmt.Errorf("read certificates: %w", err)
		}
	}
	authorities = x509.NewCertPool()
	if !authorities.AppendCertsFromPEM(texts[0]) {
		return nil, own, fmt.Errorf("read certificates: no certificate in %s", f.CA)
	}
	if own, err = tls.X509KeyPair(texts[1], texts[2]); err != nil {
		return nil, own, fmt.Errorf("read certificates: %s with %s: %w", f.Cert, f.Key, err)
	}
	return authorities, own, nil
}

// server returns the configuration of a connection to a server.
func (f *Files) server() (*tls.Config, error) {
	authorities, own, err := f.load()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{own},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: authorities,
		SessionTicketsDisabled: true, // the authorities may have changed since
	}, nil
}

// client returns the configuration of a connection of a client to a server whose certificate is for host.
func (f *Files) client(host string) (*tls.Config, error) {
	authorities, own, err := f.load()
	if err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: authorities, Certificates: []tls.Certificate{own}, ServerName: host}, nil
}

// names reports whether a certificate is that of a host. DNS names are the same in capitals, but names of hosts are not:
// to a ledger "GW1" would be a host beside "gw1", with a place of its own. So only that in lower case is the host's.
func names(c *x509.Certificate, host string) bool {
	return slices.ContainsFunc(c.DNSNames, func(name string) bool {
		name = strings.ToLower(name)
		label, _, _ := strings.Cut(name, ".")
		return host == name || host == label
	})
}
