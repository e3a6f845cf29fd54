package main

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"
)

// serveCounts answers INCRBY and EXPIRE as Redis does, with one sum for all keys, and closes a
// connection after the given number of questions.
func serveCounts(t *testing.T, questions int) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		sum := 0
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			in := bufio.NewReader(c)
			for range questions {
				var words []string
				for range 7 + 7 { // lines of both commands
					line, err := in.ReadString('\n')
					if err != nil {
						break
					}
					words = append(words, strings.TrimSpace(line))
				}
				if len(words) < 14 || words[2] != "INCRBY" || words[9] != "EXPIRE" || words[4] != words[11] {
					break
				}
				var n int
				fmt.Sscan(words[6], &n)
				sum += n
				fmt.Fprintf(c, ":%d\r\n:1\r\n", sum)
			}
			c.Close()
		}
	}()
	return l.Addr().String()
}

func TestAdmit(t *testing.T) {
	p := proxy{store: serveCounts(t, 4), limit: 100}
	c := counter{store: p.store, timeout: 20 * time.Second}
	defer c.close()
	// The fifth question meets a closed connection: it passes. The next ones ask again.
	for i, want := range []bool{true, true, false, false, true, false} {
		if got := p.admit(&c, 50); got != want {
			t.Errorf("chunk %d: %v, want %v", i+1, got, want)
		}
	}
}

// TestAdmit_StoreAway has a store that refuses connections and one that never answers.
func TestAdmit_StoreAway(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	silent := l.Addr().String()
	for _, state := range []string{"silent", "closed"} {
		p := proxy{limit: 1}
		c := counter{store: silent, timeout: timeout}
		if !p.admit(&c, 50) {
			t.Errorf("%s: the chunk did not pass", state)
		}
		c.close()
		l.Close()
	}
}
