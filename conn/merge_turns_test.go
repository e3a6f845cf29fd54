package conn

import (
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// Those that wait at three loops, which become one by one reload, are served in the order in which they came.
func TestMerge_KeepsTurnsOfThree(t *testing.T) {
	served := make(chan string, 100)
	names := []string{"a", "b", "c"}
	r := newLoopsRig(t, 3, shaper.TCP, testutil.ServeTCP(t, func(c *net.TCPConn) {
		b := make([]byte, 2)
		if _, err := io.ReadFull(c, b); err != nil {
			return
		}
		served <- string(b)
		io.Copy(io.Discard, c)
	}))
	slots := func(name string, n int, listeners ...string) shaper.Limit {
		return shaper.Limit{Name: name, Match: at(listeners...), MaxConnections: n, QueueTimeout: time.Minute, MaxQueue: 100}
	}
	r.apply(names, slots("x", 1, "a"), slots("y", 1, "b"), slots("z", 1, "c"))
	r.wantGroups("[[a] [b] [c]]")
	clients := map[string]*net.TCPConn{}
	const n = 15
	for i := range n {
		name := fmt.Sprintf("%02d", i)
		c := dialFrom(t, fmt.Sprintf("127.0.0.%d", 10+i), r.addr(names[i%3]))
		fmt.Fprint(c, name)
		clients[name] = c
		testutil.WaitFor(t, "its place", func() bool {
			n := 0
			r.proxy.Connections(func(*shaper.ConnectionStatus) { n++ })
			return n == i+1
		})
	}
	order := []string{<-served, <-served, <-served}
	slices.Sort(order)
	r.apply(names, slots("all", 3, names...))
	r.wantGroups("[[a b c]]")
	for i := range n - 3 {
		clients[order[i]].Close()
		select {
		case who := <-served:
			order = append(order, who)
		case <-time.After(testTimeout):
			t.Fatalf("none was served after %v", order)
		}
	}
	if !slices.IsSorted(order) {
		t.Errorf("served %v", order)
	}
	for _, c := range clients {
		c.Close()
	}
	r.settle()
}
