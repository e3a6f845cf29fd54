package conn

import (
	"io"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// TestStats_ShortConnections ends many short connections: TCP is asked about some of them.
func TestStats_ShortConnections(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	const connections = 300
	began := time.Now()
	for range connections {
		c := dial(t, r.addr())
		c.Write([]byte("hello"))
		io.ReadFull(c, make([]byte, 5))
		c.Close()
	}
	r.settle()
	most := 2 + uint64(time.Since(began).Seconds()*100)
	if n, _ := count(&r.downstreamState().RTT); n == 0 || n > min(most, connections) {
		t.Errorf("TCP was asked %d times, want 1 to %d", n, most)
	}
}
