package redis

import (
	"errors"
	"fmt"
	"net"
	"strings"

	"shaperd.dev/shaperd/internal/safefile"
)

// Options say where a store is and how to reach it. They contain no secret, and may be shown.
type Options struct {
	// URL is one of
	//
	//	redis://host:port
	//	redis+sentinel://host:port,host:port/master
	//	redis+cluster://host:port,host:port
	//	unix:///path
	//
	// or one with "rediss" in the place of "redis", which requires TLS 1.3: the server's certificate
	// must be for the host in the URL, and signed by an authority in CAFile, or if that is "" by one
	// that the system trusts.
	URL string

	// Files in PEM, which are read at each connect. CertFile and KeyFile are the certificate of this
	// client, if it needs one.
	CAFile, CertFile, KeyFile string

	// Username is that of an ACL, or "". Password, unless nil, is called at each connect, by several
	// goroutines if several Sentinels ask for it. An error of it must not contain the password.
	Username string
	Password func() (string, error)

	// Prefix and Group are part of the keys, which are in one slot of a cluster. Hosts with
	// the same ones share their limits.
	Prefix, Group string

	// ClientName is shown by CLIENT LIST on the server. It is best effort.
	ClientName string
}

// PasswordFile returns a function for [Options.Password] that reads a file. A newline at its end
// does not count.
func PasswordFile(path string) func() (string, error) {
	return func() (string, error) {
		text, err := safefile.ReadRegular(path, maxFile)
		if err != nil {
			return "", fmt.Errorf("password: %w", err)
		}
		password := strings.TrimSuffix(strings.TrimSuffix(string(text), "\n"), "\r")
		if password == "" {
			return "", fmt.Errorf("password: %s is empty", path)
		}
		return password, nil
	}
}

// maxFile is the maximum size of a file with a password, certificates or a key, in bytes.
const maxFile = 1 << 20

// target is a store with its URL taken apart.
type target struct {
	Options
	addresses []string // of a server, of Sentinels, or of nodes of a cluster
	master    string   // the name by which Sentinels know the server, or ""
	cluster   bool
	tls       bool
}

// newTarget returns an error if the options are wrong. It does not contain the URL, which might contain a
// password.
func newTarget(o Options) (*target, error) {
	t := &target{Options: o}
	if err := t.parseURL(); err != nil {
		return t, fmt.Errorf("URL of the store: %w", err)
	}
	for _, word := range []string{o.Prefix, o.Group} {
		if word == "" || strings.ContainsAny(word, "{}") {
			return t, fmt.Errorf("%q is not part of a key: it is empty or has braces", word)
		}
	}
	if (o.CertFile == "") != (o.KeyFile == "") {
		return t, errors.New("a certificate of the client needs its key, and a key its certificate")
	}
	return t, nil
}

func (t *target) parseURL() error {
	scheme, rest, _ := strings.Cut(t.URL, "://")
	if scheme == "unix" && strings.HasPrefix(rest, "/") {
		t.addresses = []string{rest}
		return nil
	}
	protocol, kind, _ := strings.Cut(scheme, "+")
	hosts, path, _ := strings.Cut(rest, "/")
	t.addresses, t.master, t.cluster, t.tls = strings.Split(hosts, ","), path, kind == "cluster", protocol == "rediss"
	switch {
	case protocol != "redis" && protocol != "rediss", kind != "" && kind != "cluster" && kind != "sentinel":
		return errors.New("unknown protocol")
	case (path != "") != (kind == "sentinel"), kind == "" && len(t.addresses) > 1, strings.ContainsAny(rest, "@?#"):
		return errors.New("must have one address, or those of a cluster, or those of Sentinels and a name, and nothing else")
	}
	for _, a := range t.addresses {
		if host, port, err := net.SplitHostPort(a); err != nil || host == "" || port == "" {
			return errors.New("a host without port, or a port without host")
		}
	}
	return nil
}
