package redis

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

// fake is a server that says what the test wants, and records what it is asked.
type fake struct {
	address string
	closed  chan int // a connection, when the client has closed it

	conns atomic.Int32

	mu    sync.Mutex
	asked []string // "connection: command"
}

// startFake starts a fake, whose answers are those of answer: raw bytes, or "close". The first connection is 1.
func startFake(t testing.TB, answer func(conn int, command []string) string) *fake {
	t.Helper()
	l, err := net.Listen("tcp", testutil.FreeAddr(t, "tcp"))
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{address: l.Addr().String(), closed: make(chan int, 100)}
	testutil.Serve(t, l.(*net.TCPListener), func(c *net.TCPConn) {
		n := int(f.conns.Add(1))
		f.serve(n, c, answer)
		f.closed <- n
	})
	return f
}

func (f *fake) serve(n int, c net.Conn, answer func(int, []string) string) {
	r := bufio.NewReader(c)
	for {
		command, err := readCommand(r)
		if err != nil {
			return
		}
		f.mu.Lock()
		f.asked = append(f.asked, fmt.Sprintf("%d: %s", n, strings.Join(command, " ")))
		f.mu.Unlock()
		text := answer(n, command)
		if text == "close" {
			return
		}
		if _, err := io.WriteString(c, text); err != nil {
			return
		}
	}
}

// readCommand reads a command in the protocol RESP 2.
func readCommand(r *bufio.Reader) (command []string, err error) {
	n, err := readCount(r, '*')
	for range n {
		size, err := readCount(r, '$')
		if err != nil {
			return nil, err
		}
		text := make([]byte, size+2)
		if _, err := io.ReadFull(r, text); err != nil {
			return nil, err
		}
		command = append(command, string(text[:size]))
	}
	return command, err
}

func readCount(r *bufio.Reader, kind byte) (int, error) {
	line, err := r.ReadString('\n')
	if err != nil || line[0] != kind {
		return 0, fmt.Errorf("%q: %w", line, err)
	}
	return strconv.Atoi(strings.TrimSpace(line[1:]))
}

// countAsked returns how often the client has sent a command that contains a word.
func (f *fake) countAsked(word string) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.asked {
		if strings.Contains(a, word) {
			n++
		}
	}
	return n
}

func (f *fake) all() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return strings.Join(f.asked, "\n")
}

// text is a reply that is a text.
func text(s string) string { return fmt.Sprintf("$%d\r\n%s\r\n", len(s), s) }

// likeRedis answers as Redis does. The run_id is "run" and the number of the connection.
func likeRedis(conn int, command []string) string {
	switch strings.ToUpper(strings.Join(command[:min(2, len(command))], " ")) {
	case "INFO SERVER":
		return text(fmt.Sprintf("# Server\r\nrun_id:run%d\r\n", conn))
	case "INFO REPLICATION":
		return text("# Replication\r\nrole:master\r\n")
	case "INFO CLUSTER":
		return text("# Cluster\r\ncluster_enabled:1\r\n")
	}
	if command[0] == "EVALSHA" {
		return ":1\r\n"
	}
	return "+OK\r\n"
}

// evaluates answers as Redis does, and to the script with an answer of the test.
func evaluates(answer func(conn int) string) func(int, []string) string {
	return func(conn int, command []string) string {
		if command[0] == "EVALSHA" {
			return answer(conn)
		}
		return likeRedis(conn, command)
	}
}
