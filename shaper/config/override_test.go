package config

import (
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestLoad_Overrides(t *testing.T) {
	folder := write(t,
		"shaperd.toml", listenDB+"[[limit]]\nname = \"web\"\nrate = \"1MB/s\"\nburst = \"1MB\"\nmax_delay = \"1s\"\n",
		"conf.d/10-override.toml", "[[override]]\nlimit = \"web\"\nburst = \"0B\"\nrate = \"2MB/s\"\n[[override]]\nlimit = \"db\"\nobserve = true\n",
		"conf.d/20-override.toml", "[[override]]\nlimit = \"web\"\nmax_connections = 5\n",
		"conf.d/30-limit.toml", "[[limit]]\nname = \"db\"\nrate = \"1MB/s\"\n",
	)
	path := filepath.Join(folder, "shaperd.toml")
	c, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	compile(t, c)
	web, db := c.Limits[0], c.Limits[1]
	if web.Rate != 16e6 || web.Burst != 0 || web.MaxDelay != time.Second || web.MaxConnections != 5 || web.Observe {
		t.Errorf("limit web is %+v", web)
	}
	if db.Rate != 8e6 || !db.Observe {
		t.Errorf("limit db is %+v", db)
	}
	for key, want := range map[string]string{"rate": "conf.d/10-override.toml:4:1", "max_connections": "conf.d/20-override.toml:3:1", "max_delay": "shaperd.toml:10:1"} {
		if got := strings.TrimPrefix(c.Error(0, key, "is bad").Error(), folder+"/"); got != want+": is bad" {
			t.Errorf("error at %s is %s, want it at %s", key, got, want)
		}
	}
}

// TestConfig_With replaces values of files by overrides, which leave the configuration before
// them unchanged.
func TestConfig_With(t *testing.T) {
	folder := write(t,
		"shaperd.toml", strings.ReplaceAll(listenDB, "[::]", "0.0.0.0")+"[[limit]]\nname = \"web\"\nrate = \"1MB/s\"\n[[attach]]\nname = \"up\"\ninterface = \"eth0\"\n",
		"conf.d/saved.toml", "[[override]]\nlimit = \"web\"\nrate = \"2MB/s\"\nburst = \"1MB\"\n",
	)
	files, err := Load(filepath.Join(folder, "shaperd.toml"))
	if err != nil {
		t.Fatal(err)
	}
	was := files.Limits[0]
	with := func(limit string, set map[string]string) (*Config, error) {
		o := Override{Source: "set by root", Limit: limit, Values: map[string]Value{}}
		for key, text := range set {
			o.Values[key] = ParseValue(key, text)
		}
		return files.With(0, o)
	}
	c, err := with("web", map[string]string{"rate": "3MB/s", "max_connections": "7", "max_delay": "0s"})
	if err != nil {
		t.Fatal(err)
	}
	compile(t, c)
	if l := c.Limits[0]; l.Rate != 24e6 || l.Burst != 1e6 || l.MaxConnections != 7 || l.MaxDelay != 0 {
		t.Errorf("limit is %+v", l)
	}
	if got := c.Error(0, "rate", "is bad").Error(); got != "set by root:5:1: is bad" {
		t.Errorf("error is %s", got)
	}
	if got := strings.TrimPrefix(c.Error(0, "burst", "is bad").Error(), folder+"/"); got != "conf.d/saved.toml:4:1: is bad" {
		t.Errorf("error is %s", got)
	}
	if again, err := c.With(0); err != nil || !reflect.DeepEqual(again.Limits[0], was) || !reflect.DeepEqual(files.Limits[0], was) {
		t.Errorf("without overrides the limit is %+v (%v), was %+v", again, err, was)
	}

	for _, test := range []struct {
		limit string
		set   map[string]string
		want  string
	}{
		{"web", map[string]string{"rate": "3mbps"}, `set by root:3:1: rate: "3mbps" is in bytes to tc and in bits to most people: write "3Mbit/s" or "3MB/s"`},
		{"web", map[string]string{"rate": "3mbps", "overhead": "1", "max_delay": "1s"}, `set by root:4:1: overhead: "1" has no unit: write "1B" or "1KiB"` + "\n" + `set by root:5:1: rate: "3mbps" is in bytes to tc and in bits to most people: write "3Mbit/s" or "3MB/s"`},
		{"web", map[string]string{"queue_timeout": "1s"}, `set by root:3:1: queue_timeout: has no effect without max_connections or new_connections`},
		{"web", map[string]string{"max_connections": "0"}, `set by root:3:1: max_connections: must be from 1 to 1048576, not 0`},
		{"wep", map[string]string{"rate": "3MB/s"}, `set by root:2:1: limit: unknown limit "wep"; did you mean "web"?`},
		{"web", nil, `override limit "web": nothing to set; keys are ` + strings.Join(OverrideKeys(), ", ")},
		{"web", map[string]string{"raet": "1MB/s"}, `override limit "web": unknown key "raet"; did you mean "rate"?`},
		{"web", map[string]string{"connections": "5"}, `override limit "web": connections was renamed to max_connections`},
		{"web", map[string]string{"observe": "yes"}, `override limit "web": observe: must be true or false, not "yes"`},
		{"web", map[string]string{"max_connections": "many"}, `override limit "web": max_connections: must be an integer such as 100, not "many"`},
	} {
		if _, err := with(test.limit, test.set); fmt.Sprint(err) != test.want {
			t.Errorf("%s %v: error is %v, want %s", test.limit, test.set, err, test.want)
		}
	}
}

func TestFormatOverride(t *testing.T) {
	for _, test := range []struct {
		set        map[string]string
		want, fail string
	}{
		{set: map[string]string{"rate": "20Mbit/s", "burst_packets": "0", "observe": "true"}, want: "[[override]]\nlimit = \"l\"\nburst_packets = 0\nobserve = true\nrate = \"20Mbit/s\"\n"},
		{set: map[string]string{"rate": "\"\n[daemon]\\"}, want: "[[override]]\nlimit = \"l\"\nrate = \"\\\"\\n[daemon]\\\\\"\n"},
		{fail: `override limit "l": nothing to set; keys are ` + strings.Join(OverrideKeys(), ", ")},
		{set: map[string]string{"raet": "1MB/s"}, fail: `override limit "l": unknown key "raet"; did you mean "rate"?`},
		{set: map[string]string{"max_connections": "many"}, fail: `override limit "l": max_connections: must be an integer such as 100, not "many"`},
	} {
		got, err := FormatOverride("l", test.set)
		if got != test.want || test.fail != "" && fmt.Sprint(err) != test.fail || test.fail == "" && err != nil {
			t.Errorf("%v: %q and %v, want %q and %s", test.set, got, err, test.want, test.fail)
		}
	}
}
