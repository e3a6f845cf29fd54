// Command perhit is a proxy that asks Redis before each chunk that it forwards: what several
// gateways that count hits in a store do. It counts as Envoy's ratelimit service does by default:
// INCRBY of a key per second, with an expiry; a hit is over the limit when the sum is; when there
// is no answer within 20 ms, the hit passes. The demonstration compares shaperd with it.
package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

func main() {
	fmt.Fprintln(os.Stderr, "perhit:", run(os.Args[1:]))
	os.Exit(1)
}

const (
	chunk   = 32 << 10
	window  = time.Second
	timeout = 20 * time.Millisecond // of a question to the store, as Envoy's
)

type proxy struct {
	downstream, store string
	limit             int64 // bytes in a window
}

// run serves until an error. Its arguments are address, downstream, store, and bytes a second.
func run(args []string) error {
	if len(args) != 4 {
		return errors.New("usage: perhit ADDRESS DOWNSTREAM REDIS RATE")
	}
	p := proxy{downstream: args[1], store: args[2]}
	var err error
	if p.limit, err = strconv.ParseInt(args[3], 10, 64); err != nil {
		return err
	}
	l, err := net.Listen("tcp4", args[0])
	if err != nil {
		return err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go p.serve(c)
	}
}

// serve forwards what a client sends. Nothing comes back in the demonstration.
func (p *proxy) serve(c net.Conn) {
	defer c.Close()
	d, err := net.Dial("tcp4", p.downstream)
	if err != nil {
		return
	}
	defer d.Close()
	counter := counter{store: p.store, timeout: timeout}
	defer counter.close()
	buf := make([]byte, chunk)
	for {
		n, err := c.Read(buf)
		if err != nil {
			return
		}
		for !p.admit(&counter, n) {
			now := time.Now()
			time.Sleep(now.Truncate(window).Add(window).Sub(now))
		}
		if _, err := d.Write(buf[:n]); err != nil {
			return
		}
	}
}

// admit counts n bytes, and reports whether they may pass in this window.
func (p *proxy) admit(c *counter, n int) bool {
	key := "downstream_" + strconv.FormatInt(time.Now().Truncate(window).Unix(), 10)
	sum, err := c.add(key, n)
	return err != nil || sum <= p.limit
}

// A counter is a connection to the store.
type counter struct {
	store   string
	timeout time.Duration
	conn    net.Conn
	in      *bufio.Reader
}

// add increases a key and returns its value.
func (c *counter) add(key string, n int) (int64, error) {
	sum, err := c.ask(key, strconv.Itoa(n))
	if err != nil {
		c.close()
	}
	return sum, err
}

func (c *counter) ask(key, n string) (int64, error) {
	deadline := time.Now().Add(c.timeout)
	if c.conn == nil {
		conn, err := net.DialTimeout("tcp4", c.store, c.timeout)
		if err != nil {
			return 0, err
		}
		c.conn, c.in = conn, bufio.NewReader(conn)
	}
	if err := c.conn.SetDeadline(deadline); err != nil {
		return 0, err
	}
	if _, err := io.WriteString(c.conn, command("INCRBY", key, n)+command("EXPIRE", key, "1")); err != nil {
		return 0, err
	}
	sum, err := c.integer()
	if err != nil {
		return 0, err
	}
	_, err = c.integer()
	return sum, err
}

// integer reads a reply.
func (c *counter) integer() (int64, error) {
	line, err := c.in.ReadString('\n')
	if err != nil {
		return 0, err
	}
	digits, ok := strings.CutPrefix(strings.TrimSpace(line), ":")
	if !ok {
		return 0, fmt.Errorf("the store answered %q", line)
	}
	return strconv.ParseInt(digits, 10, 64)
}

func (c *counter) close() {
	if c.conn != nil {
		c.conn.Close()
		c.conn = nil
	}
}

// command encodes a command for Redis.
func command(args ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "*%d\r\n", len(args))
	for _, a := range args {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(a), a)
	}
	return b.String()
}
