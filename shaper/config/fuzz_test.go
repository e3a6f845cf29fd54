package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// FuzzUnits checks that the format of an accepted value parses to the same value.
func FuzzUnits(f *testing.F) {
	for _, s := range []string{
		"10Mbit/s", "1.5MB/s", "5MiB/s", "10mbps", "10M", "64KiB", "0B", "2000pps", "5/min", "2/h", "200ms", "1h30m", "-1", "1Tibit", "0.000008Mbit/s", "8 kbit", "50 /s", "200 ms", "50 %", "192.0.2.1", "::ffff:10.0.0.1", "8000-8010", "AS64500", "redis+sentinel://a:26379,[fd00::1]:1/m", "unix:///run/redis.sock",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if rate, err := ParseRate(s); err == nil {
			for _, formatted := range []string{FormatRate(rate), FormatRateBytes(rate)} {
				if again, err := ParseRate(formatted); again != rate {
					t.Errorf("rate %q is %d, formatted %s, read as %d, %v", s, rate, formatted, again, err)
				}
			}
		}
		if size, err := ParseSize(s); err == nil {
			if again, err := ParseSize(FormatSize(size)); again != size || err != nil {
				t.Errorf("size %q is %d, formatted %s, read as %d, %v", s, size, FormatSize(size), again, err)
			}
		}
		if n, err := ParseFrequency(s); err == nil {
			if again, err := ParseFrequency(FormatFrequency(n)); again != n {
				t.Errorf("frequency %q is %v, formatted %s, read as %v, %v", s, n, FormatFrequency(n), again, err)
			}
		}
		if d, err := ParseDuration(s); err == nil {
			if again, err := ParseDuration(FormatDuration(d)); again != d || err != nil || d < 0 {
				t.Errorf("time %q is %d, formatted %s, read as %d, %v", s, d, FormatDuration(d), again, err)
			}
		}
		if store, err := parseStore(s); err == nil {
			if again, err := parseStore(store); again != store || err != nil {
				t.Errorf("store %q is %q, read as %q, %v", s, store, again, err)
			}
		}
		parseAddress(s)
		parseInterface(s)
		var limit shaper.Limit
		for i := range limitKeys {
			if k := &limitKeys[i]; k.typ.parse != nil {
				if value, err := k.typ.parse(k.name, s, k.field.get(&limit)); err == nil {
					k.field.set(&limit, value)
					k.textOf(&limit)
				}
			}
		}
		if n, err := parsePercent(s); err == nil && (n < 1 || n > 100) {
			t.Errorf("%q is read as %d %%", s, n)
		}
		parseDownstream(s)
		if p, err := parsePrefix(s); err == nil {
			if again, err := parsePrefix(p.String()); again != p {
				t.Errorf("prefix %q is %v, read as %v, %v", s, p, again, err)
			}
		}
		if p, err := parsePorts(s); err == nil {
			if again, err := parsePorts(p.String()); again != p {
				t.Errorf("ports %q are %v, read as %v, %v", s, p, again, err)
			}
		}
		if n, err := parseASN(s); err == nil && n == 0 {
			t.Errorf("%q is read as AS 0", s)
		}
		checkEndpoint(s, "127.0.0.1:9464")
	})
}

// FuzzTOML checks that any bytes either load, compile and have a canonical form, or
// yield mistakes at valid positions, and that the scanner finds everything that the
// decoder does.
func FuzzTOML(f *testing.F) {
	for _, pattern := range []string{"testdata/bad/*.toml", "../../configs/*.toml"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			f.Fatal(err)
		}
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				f.Fatal(err)
			}
			if len(text) < 1<<12 {
				f.Add(string(text))
			}
		}
	}
	f.Fuzz(func(t *testing.T, text string) {
		hang := time.AfterFunc(10*time.Second, func() { panic(fmt.Sprintf("hangs on %q", text)) })
		defer hang.Stop()
		file0 := newFile("f.toml", 0, text)
		c, err := load([]*file{file0})
		if err == nil {
			compile(t, c)
			if err := c.WriteText(io.Discard); err != nil {
				t.Error(err)
			}
			if changes := Diff(c, c); len(changes) > 0 {
				t.Errorf("differs from itself: %+v", changes)
			}
			if _, err := json.Marshal(c.Canonical()); err != nil {
				t.Error(err)
			}
		} else {
			var mistakes Errors
			if !errors.As(err, &mistakes) {
				t.Fatalf("error is %v, want Errors", err)
			}
			checkPlaces(t, text, mistakes)
		}
		var values map[string]any
		if root, refused := scan(file0); refused == nil && decode(file0.text, &values) == nil {
			if err := sameShape(root, values); err != nil {
				t.Error(err)
			}
		}
	})
}
