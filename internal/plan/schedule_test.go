package plan

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestLoad_Schedules loads configurations that are invalid only while a schedule holds, whatever the time is.
func TestLoad_Schedules(t *testing.T) {
	folder := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(folder, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	values := write("values.csv", "source,rate\n198.51.100.0/24,8kbit/s\n")
	const attach = "[[attach]]\nname = \"up\"\ninterface = \"lo\"\nmode = \"shape\"\n"
	const listen = "[[listen]]\nname = \"db\"\naddress = [\"tcp://127.0.0.1:5432\"]\ndownstream = [\"127.0.0.1:9\"]\n"
	for _, tt := range []struct{ text, want string }{
		{
			attach + "[[limit]]\nname = \"l\"\nrate = \"10Mbit/s\"\nmatch.attach = [\"up\"]\n[[override]]\nlimit = \"l\"\nwhen = \"22:00-06:00 UTC\"\nrate = \"10Gbit/s\"\n",
			`more than the 75000 that attachment "up"`,
		},
		{
			listen + "[[limit]]\nname = \"l\"\nkey = [\"source\"]\nrate = \"100MB/s\"\nvalues = \"values.csv\"\n[[override]]\nlimit = \"l\"\nwhen = \"22:00-06:00 UTC\"\nburst = \"4GB\"\n",
			`values.csv:2:1: limit "l": burst`,
		},
	} {
		_, err := Load(write("shaperd.toml", tt.text))
		if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), `(while "22:00-06:00 UTC" holds)`) {
			t.Errorf("%v, want %s\n%s", err, tt.want, tt.text)
		}
	}

	// Nor may a file with values become one.
	write("values.csv", "source,rate\n198.51.100.0/24,80Mbit/s\n")
	p, err := Load(filepath.Join(folder, "shaperd.toml"))
	if err != nil {
		t.Fatal(err)
	}
	write("values.csv", "source,rate\n198.51.100.0/24,8kbit/s\n")
	if _, err := p.Reread(values); err == nil || !strings.Contains(err.Error(), "holds") {
		t.Errorf("reread: %v", err)
	}
}
