package plan

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/maxmind/mmdbwriter"
	"github.com/maxmind/mmdbwriter/mmdbtype"
)

// A country that no address is in is told: a limit that blocks it blocks nothing.
func TestWarnings_EmptyCountries(t *testing.T) {
	dir := t.TempDir()
	tree, err := mmdbwriter.New(mmdbwriter.Options{DatabaseType: "Example-Country", IncludeReservedNetworks: true})
	if err != nil {
		t.Fatal(err)
	}
	_, network, _ := net.ParseCIDR("192.0.2.0/24")
	if err := tree.Insert(network, mmdbtype.Map{"country_code": mmdbtype.String("GB")}); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(dir, "country.mmdb"))
	if err == nil {
		_, err = tree.WriteTo(f)
	}
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	path := filepath.Join(dir, "shaperd.toml")
	text := `
asn.files = "country.mmdb"
[[listen]]
name = "web"
address = "tcp://127.0.0.1:80"
downstream = "127.0.0.1:9"
[[limit]]
name = "abroad"
match.country = ["GB", "UK", "unknown"]
block = true
`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if all := strings.Join(p.Warnings(), "\n"); !strings.Contains(all, "no address in UK") || strings.Contains(all, "no address in GB") || strings.Contains(all, "no address in unknown") {
		t.Errorf("warnings: %s", all)
	}
}

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
