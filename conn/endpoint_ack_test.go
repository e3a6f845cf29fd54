package conn

import (
	"io"
	"net"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// A server that writes its answer in two pieces, without TCP_NODELAY, sends the second one when the first is acknowledged. That
// is at once, as without a proxy, and not only after the 40 ms of a delayed acknowledgement.
func TestAnswerInTwoPieces(t *testing.T) {
	const delayed = 40 * time.Millisecond
	to := testutil.ServeTCP(t, func(c *net.TCPConn) {
		c.SetNoDelay(false)
		if _, err := c.Read(make([]byte, 100)); err != nil {
			return
		}
		c.Write([]byte("head"))
		c.Write([]byte("body"))
		io.Copy(io.Discard, c)
	})
	for name, header := range map[string]shaper.ProxyVersion{"without a header": shaper.NoProxy, "with a header": 2} {
		t.Run(name, func(t *testing.T) {
			r := newLoopsRig(t, 1, shaper.TCP, to)
			ln := r.listener("a")
			ln.SendProxy = header
			policy, err := r.shaper.CompileRules(shaper.Rules{Listeners: []shaper.Listener{ln}})
			if err == nil {
				err = r.proxy.Apply(t.Context(), []shaper.Listener{ln}, policy, nil)
			}
			if err != nil {
				t.Fatal(err)
			}
			fastest := time.Hour
			for i := 0; i < 500 && (i < 5 || fastest > delayed/2); i++ { // a busy machine may delay some
				goOn := make(chan struct{})
				r.proxy.home.loop.post(func(leaky.Time) { <-goOn })
				c := dial(t, r.addr("a"))
				c.Write([]byte("question")) // before it is accepted
				begun := time.Now()
				close(goOn)
				if _, err := io.ReadFull(c, make([]byte, 8)); err != nil {
					t.Fatal(err)
				}
				fastest = min(fastest, time.Since(begun))
				c.Close()
			}
			if fastest > delayed/2 {
				t.Errorf("an answer takes %v at least", fastest)
			}
		})
	}
}
