package redis

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"shaperd.dev/shaperd/internal/safefile"
)

// conn is one connection to one server process.
type conn struct {
	nc      net.Conn
	r       *bufio.Reader
	out     []byte
	address string
	run     string // run_id of the process, which its connections do not outlive
	cluster bool   // the server is a node of a cluster
}

// connect connects to a server that takes writes.
func (t *target) connect(ctx context.Context, address string) (*conn, error) {
	c, err := t.dial(ctx, address)
	if err != nil {
		return nil, err
	}
	if err := t.introduce(ctx, c); err != nil {
		c.close()
		return nil, fmt.Errorf("connect to %s: %w", address, err)
	}
	return c, nil
}

// dial opens a connection on which nothing has been said yet.
func (t *target) dial(ctx context.Context, address string) (*conn, error) {
	network := "tcp"
	if strings.HasPrefix(address, "/") {
		network = "unix"
	}
	nc, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", address, inTime(err))
	}
	if t.tls && network == "tcp" {
		nc, err = t.handshake(ctx, nc, address)
		if err != nil {
			return nil, fmt.Errorf("connect to %s with TLS: %w", address, inTime(err))
		}
	}
	return &conn{nc: nc, r: bufio.NewReaderSize(nc, 2*maxLine), address: address}, nil
}

// handshake begins TLS, or closes nc.
func (t *target) handshake(ctx context.Context, nc net.Conn, address string) (net.Conn, error) {
	config, err := t.tlsConfig(address)
	if err == nil {
		tc := tls.Client(nc, config)
		if err = tc.HandshakeContext(ctx); err == nil {
			return tc, nil
		}
	}
	nc.Close()
	return nil, err
}

func (t *target) tlsConfig(address string) (*tls.Config, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{MinVersion: tls.VersionTLS13, ServerName: host}
	if t.CAFile != "" {
		text, err := safefile.ReadRegular(t.CAFile, maxFile)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("%s has no certificate", t.CAFile)
		}
	}
	if t.CertFile != "" {
		cert, err := safefile.ReadRegular(t.CertFile, maxFile)
		key, keyErr := safefile.ReadRegular(t.KeyFile, maxFile)
		if err = cmp.Or(err, keyErr); err != nil {
			return nil, fmt.Errorf("certificate of the client: %w", err)
		}
		pair, err := tls.X509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("certificate of the client: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// introduce authenticates and finds out which process answers. All is sent at once, so that a connection
// and a call take four round trips with TLS, which must fit into the time of a call.
func (t *target) introduce(ctx context.Context, c *conn) error {
	var commands [][]string
	auth, err := t.auth()
	if err != nil {
		return err
	}
	if auth != nil {
		commands = append(commands, auth)
	}
	commands = append(commands, []string{"INFO", "server"}, []string{"INFO", "replication"}, []string{"INFO", "cluster"})
	if t.ClientName != "" {
		commands = append(commands, []string{"CLIENT", "SETNAME", t.ClientName})
	}
	replies, err := c.do(ctx, commands...)
	if err != nil {
		return err
	}
	if auth != nil {
		if e, refused := replies[0].(serverError); refused {
			return fmt.Errorf("authenticate: %w", refusal(e))
		}
		replies = replies[1:]
	}
	return c.identify(replies[0], replies[1], replies[2])
}

// auth returns the command that authenticates, or nil.
func (t *target) auth() ([]string, error) {
	var password string
	switch {
	case t.Password != nil:
		var err error
		if password, err = t.Password(); err != nil {
			return nil, err
		}
	case t.Username == "":
		return nil, nil
	}
	if t.Username == "" {
		return []string{"AUTH", password}, nil
	}
	return []string{"AUTH", t.Username, password}, nil
}

// refusal is an error reply on a connection that sends the password. It does not contain the server's text, in which
// some servers repeat what they were sent.
func refusal(e serverError) error {
	switch e.code() {
	case "WRONGPASS":
		return errors.New("wrong user or password")
	case "NOAUTH":
		return errors.New("the server wants a password")
	case "NOPERM":
		return errors.New("the server does not permit it to this user")
	}
	return errors.New("the server refuses it")
}

// identify takes the replies to INFO.
func (c *conn) identify(server, replication, cluster any) error {
	for _, reply := range []any{server, replication, cluster} {
		if e, refused := reply.(serverError); refused {
			return fmt.Errorf("ask who answers: %w", refusal(e))
		}
	}
	c.run, c.cluster = infoField(server, "run_id"), infoField(cluster, "cluster_enabled") == "1"
	if c.run == "" {
		return fmt.Errorf("ask who answers: %w: INFO without run_id", errProtocol)
	}
	// A replica may have been configured to take writes. These would be lost.
	if infoField(replication, "role") != "master" {
		return errNotMaster
	}
	return nil
}

// errNotMaster is wrapped by errors about a server that must not be written to.
var errNotMaster = errors.New("the server is not a master")

// infoField returns a field of a reply to INFO, or "".
func infoField(reply any, name string) string {
	text, _ := reply.(string)
	for line := range strings.SplitSeq(text, "\n") {
		if value, is := strings.CutPrefix(line, name+":"); is {
			return strings.TrimSuffix(value, "\r")
		}
	}
	return ""
}

// do sends commands and returns their replies, of which some may be a serverError. After an error, the
// connection must be closed: a reply may still come.
func (c *conn) do(ctx context.Context, commands ...[]string) (replies []any, err error) {
	c.out = c.out[:0]
	for _, args := range commands {
		c.out = appendCommand(c.out, args...)
	}
	if err := c.nc.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.nc.SetDeadline(time.Unix(1, 0)) })
	defer func() {
		if !stop() {
			replies, err = nil, context.Cause(ctx)
		}
	}()
	if c.r.Buffered() > 0 {
		return nil, fmt.Errorf("%w: a reply to nothing", errProtocol)
	}
	if _, err := c.nc.Write(c.out); err != nil {
		return nil, err
	}
	for range commands {
		reply, err := readReply(c.r)
		if err != nil {
			return nil, err
		}
		replies = append(replies, reply)
	}
	return replies, nil
}

func (c *conn) close() { c.nc.Close() }

// inTime makes a timeout of the network one of a context.
func inTime(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return context.DeadlineExceeded
	}
	return err
}
