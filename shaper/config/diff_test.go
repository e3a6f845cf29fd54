package config

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestDiff(t *testing.T) {
	parse := func(rate, more string) *Config {
		t.Helper()
		c, err := load([]*file{newFile("f.toml", 0, fmt.Sprintf(`
[[listen]]
name = "db"
address = ["tcp://127.0.0.1:5432"]
downstream = ["127.0.0.1:9"]
[[limit]]
name = "l"
rate = %q
%s
[[override]]
limit = "l"
when = "22:00-06:00"
rate = "1MB/s"
[[override]]
limit = "l"
when = "22:00-06:00"
max_delay = "1s"
`, rate, more))})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	a, b := parse("2MB/s", "max_connections = 5"), parse("16Mbit/s", "[[limit]]\nname = \"m\"\nblock = true\nmatch.port = [\"5432\"]")
	if d := Diff(a, a); len(d) > 0 {
		t.Errorf("differs from itself: %+v", d)
	}
	want := []Change{
		{Table: "limit l", Keys: []KeyChange{{"max_connections", "5", ""}, {"queue_timeout", "2s", ""}, {"max_queue", "1000", ""}, {"refuse_with", "reset", ""}}},
		{Table: "limit m", Added: true, Keys: []KeyChange{{"observe", "", "false"}, {"match port", "", "5432"}, {"block", "", "all that is matched"}, {"refuse_with", "", "reset"}}},
	}
	if d := cmp.Diff(want, Diff(a, b)); d != "" {
		t.Error(d)
	}
	if d := Diff(b, a); len(d) != 2 || d[0].Keys[0] != (KeyChange{"max_connections", "", "5"}) || d[1].Table != "limit m" || !d[1].Removed {
		t.Errorf("%+v", d)
	}
}
