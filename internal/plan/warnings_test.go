package plan

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Quotas by source are told where forged datagrams can take their keys.
func TestWarnings_ForgeableQuotas(t *testing.T) {
	path := filepath.Join(t.TempDir(), "shaperd.toml")
	for _, tt := range []struct {
		address, limit string
		warns          bool
	}{
		{"tcp://127.0.0.1:53", `key = ["source"]`, false},
		{"udp://127.0.0.1:53", `key = ["source"]`, true},
		{"udp://127.0.0.1:53", `key = []`, false},
		{`tcp://127.0.0.1:53", "udp://127.0.0.1:53`, "key = [\"source\"]\nmatch.protocol = \"tcp\"", false},
	} {
		text := fmt.Sprintf("[[listen]]\nname = \"dns\"\naddress = [\"%s\"]\ndownstream = [\"127.0.0.1:9\"]\n[[limit]]\nname = \"day\"\nquota = \"1GB/day\"\n%s\n", tt.address, tt.limit)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		p, err := Load(path)
		if err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		if warns := strings.Contains(strings.Join(p.Warnings(), "\n"), "forged sources of UDP can take"); warns != tt.warns {
			t.Errorf("warns: %v\n%s", warns, text)
		}
	}
}
