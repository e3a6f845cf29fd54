package conn

import (
	"testing"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// A reload that comes after the end fails, and neither waits for loops that have ended nor starts new ones.
func TestApply_AfterClose(t *testing.T) {
	r := newLoopsRig(t, 3, shaper.TCP, "127.0.0.1:9")
	r.apply([]string{"a"})
	all := []shaper.Listener{r.listener("a"), r.listener("b"), r.listener("c")}
	policy, err := r.shaper.CompileRules(shaper.Rules{Listeners: all})
	if err != nil {
		t.Fatal(err)
	}
	r.proxy.Close()
	applied := make(chan error, 1)
	go func() { applied <- r.proxy.Apply(t.Context(), all, policy, nil) }()
	select {
	case err := <-applied:
		if err == nil {
			t.Error("a proxy that is closed has applied a policy")
		}
	case <-time.After(testTimeout):
		t.Error("a reload after the end goes on for ever")
	}
}
