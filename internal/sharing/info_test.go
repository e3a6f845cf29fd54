package sharing

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/shaper/config"
)

// load returns the configuration of one of three hosts, with limits.
func load(t *testing.T, limits string) *config.Config {
	t.Helper()
	path := filepath.Join(t.TempDir(), "shaperd.toml")
	text := "[[listen]]\nname = \"db\"\naddress = [\"tcp://127.0.0.1:5432\"]\ndownstream = [\"127.0.0.1:5433\"]\n[shared]\nhosts = 3\n" + limits
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	c, err := config.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestInfo(t *testing.T) {
	var text strings.Builder
	for i := range 40 {
		fmt.Fprintf(&text, "[[limit]]\nname = \"limit-%02d\"\nmatch = { source = [\"10.%d.0.0/16\"] }\nrate = \"8Mbit/s\"\nshared = true\n", i, i)
	}
	many := load(t, text.String())
	info := NewInfo("1.0", many).Text(nil)
	if len(info) > cluster.MaxInfo || len(ParseInfo(info).Hashes) != 41 || ParseInfo(info).Version != "1.0" {
		t.Errorf("%d bytes: %s", len(info), info)
	}
	here := map[string]string{"a": "rate 1; burst 2", "b": "rate 1", "c": "rate 1"}
	for _, test := range []struct{ there, want string }{
		{`{"version":"1","limits":{"a":"rate 3; burst 2","b":"rate 1","d":"rate 9"}}`, `[{h a rate 1 rate 3} {h c rate 1 } {h d  rate 9}]`},
		{fmt.Sprintf(`{"hashes":{"a":%q,"b":"0","d":"0"}}`, hashText(here["a"])), `[{h b  } {h c rate 1 } {h d  shared}]`},
		{`{"limits":{"a":"rate 1; burst 2; x y","b":"rate 1","c":"rate 1"}}`, `[{h a rate 1; burst 2 x y}]`},
		{"", "[{h   }]"},
		{"\x1b[31m{", "[{h   }]"},
		{`{"limits":7}`, "[{h   }]"},
		{`[]`, "[{h   }]"},
	} {
		if got := fmt.Sprint(Differences("h", here, ParseInfo(test.there))); got != test.want {
			t.Errorf("%s: %s, want %s", test.there, got, test.want)
		}
	}
}

func TestPlainName(t *testing.T) {
	for name, want := range map[string]string{
		"gw-1.example_net": "gw-1.example_net", "gürtel-größe": "g-rtel-gr--e", strings.Repeat("ü", 70): strings.Repeat("-", 64), "": "",
	} {
		if got := plainName(name); got != want {
			t.Errorf("%q becomes %q, want %q", name, got, want)
		}
	}
}

func TestParamsDifference(t *testing.T) {
	one := load(t, "store = \"redis://10.0.0.9:6379\"\n[[limit]]\nname = \"l\"\nrate = \"8Mbit/s\"\nshared = true\n").Shared
	for _, test := range []struct {
		change func(*config.Shared)
		want   string
	}{
		{func(s *config.Shared) { s.Lease *= 3 }, `the group has lease = "1s", and this host lease = "3s"`},
		{func(s *config.Shared) { s.Hosts = 4; s.Failover = config.FailoverStrict }, `the group has hosts = 3, failover = "fast", and this host hosts = 4, failover = "strict"`},
		{func(s *config.Shared) { s.Interval *= 3 }, `the group has an interval of up to 100ms, and this host interval = "300ms"`},
	} {
		other := one
		test.change(&other)
		if got := ParamsDifference(Params(&one), Params(&other)); got != test.want {
			t.Errorf("%s, want %s", got, test.want)
		}
	}
}

func TestStoreErrorText(t *testing.T) {
	for _, test := range []struct {
		err, store string
		answered   bool
		want       string
	}{
		{"10.0.0.9:6379: context deadline exceeded", "redis://10.0.0.9:6379", false, "10.0.0.9:6379: no answer in time (is it a Redis, and without TLS?)"},
		{"10.0.0.9:6379: context deadline exceeded", "redis://10.0.0.9:6379", true, "10.0.0.9:6379: no answer in time"},
		{"context deadline exceeded", "rediss://10.0.0.9:6379", false, "no answer in time"},
		{"context deadline exceeded", "shaperd://10.0.0.9:9466", false, "no answer in time"},
		{"connection refused", "redis://10.0.0.9:6379", false, "connection refused"},
		{"", "redis://10.0.0.9:6379", false, ""},
	} {
		if got := StoreErrorText(test.err, []string{test.store}, test.answered); got != test.want {
			t.Errorf("%q, want %q", got, test.want)
		}
	}
}
