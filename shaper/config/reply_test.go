package config

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"shaperd.dev/shaperd/shaper"
)

// Names of replies, and texts, are taken as they are by limits and by breakers.
func TestReply(t *testing.T) {
	for _, reply := range append(shaper.ReplyNames(), "{retry_after} s, {reason}", "busy\n", "Busy", "try later") {
		t.Run(reply, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "shaperd.toml")
			text := fmt.Sprintf("[[listen]]\nname = \"db\"\naddress = \"tcp://127.0.0.1:5432\"\ndownstream = \"10.0.0.5\"\nbreaker = { reply = %q }\n"+
				"[[limit]]\nname = \"few\"\nmax_connections = 5\nrefuse_with = \"reply\"\nreply = %[1]q\n", reply)
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			c, err := Load(path)
			if err != nil {
				t.Fatal(err)
			}
			if got := c.Listen[0].Breaker.Reply; got != reply {
				t.Errorf("the breaker's is %q", got)
			}
			if got := c.Limits[0].Reply; got != reply {
				t.Errorf("the limit's is %q", got)
			}
		})
	}
}
