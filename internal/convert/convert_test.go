package convert

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/shaper/config"
)

var update = flag.Bool("update", false, "write the files of expected configurations")

// iptablesEth9 converts rules, those without an interface for eth9.
func iptablesEth9(file, text string) (Result, error) { return Iptables(file, text, "eth9") }

var converters = map[string]func(file, text string) (Result, error){"haproxy": HAProxy, "nginx": Nginx, "iptables": iptablesEth9}

// TestConvert compares with files that were read before they were committed.
func TestConvert(t *testing.T) {
	for program, convert := range converters {
		files, err := filepath.Glob(filepath.Join("testdata", program, "*"))
		if err != nil {
			t.Fatal(err)
		}
		tested := 0
		for _, file := range files {
			if filepath.Ext(file) == ".toml" {
				continue
			}
			tested++
			t.Run(file, func(t *testing.T) {
				text, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				r, err := convert(filepath.Base(file), string(text))
				if err != nil {
					t.Fatal(err)
				}
				mustLoad(t, r)
				golden := strings.TrimSuffix(file, filepath.Ext(file)) + ".toml"
				if *update {
					if err := os.WriteFile(golden, []byte(r.TOML), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				want, err := os.ReadFile(golden)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(string(want), r.TOML); diff != "" {
					t.Errorf("differs from %s (-want +got):\n%s", golden, diff)
				}
			})
		}
		if tested == 0 {
			t.Errorf("no files of %s", program)
		}
	}
}

// mustLoad checks that a result loads, and that what it counts is in it.
func mustLoad(t *testing.T, r Result) {
	t.Helper()
	if r.TOML == "" {
		if r.Listens+r.Attaches+r.Limits > 0 {
			t.Errorf("nothing was converted, and it counts %d listeners, %d attachments and %d limits", r.Listens, r.Attaches, r.Limits)
		}
		return
	}
	files := new(config.Files)
	files.Add("converted", r.TOML)
	c, err := files.Load()
	if err != nil {
		t.Fatalf("%v\n%s", err, r.TOML)
	}
	if len(c.Listen) != r.Listens || len(c.Attach) != r.Attaches || len(c.Limits) != r.Limits {
		t.Errorf("%d listeners, %d attachments and %d limits were loaded of %d, %d and %d", len(c.Listen), len(c.Attach), len(c.Limits), r.Listens, r.Attaches, r.Limits)
	}
}

// TestConvert_Errors has files that cannot be read.
func TestConvert_Errors(t *testing.T) {
	for _, tt := range []struct{ program, text, want string }{
		{"haproxy", "global\n  log \"x\n", "line 2: a quote is not closed"},
		{"haproxy", "global\n\n  log x\\", "line 3: a backslash at the end"},
		{"nginx", "stream {\n", "line 2: a block is not closed"},
		{"nginx", "stream {\n}\n}\n", "line 3: unexpected '}'"},
		{"nginx", "a;\n;", "line 2: unexpected ';'"},
		{"nginx", "a\nb", `line 2: directive "a" is not ended by ;`},
		{"nginx", "a 'b\n\n;", "line 1: a quote is not closed"},
		{"nginx", strings.Repeat("a {", 30), "line 1: too many blocks in each other"},
		{"iptables", "Chain INPUT (policy ACCEPT)", "line 1: not the output of iptables-save: there is no table, such as *filter, before it"},
		{"iptables", "*filter\n-P INPUT DROP", "line 2: not a rule as iptables-save prints it, -A CHAIN ..."},
		{"iptables", "*filter\n-A INPUT -m comment --comment \"x", "line 2: a quote is not closed"},
	} {
		_, err := converters[tt.program]("x", tt.text)
		var syntax *SyntaxError
		if !errors.As(err, &syntax) || err.Error() != tt.want {
			t.Errorf("%s %q: %v, want %s", tt.program, tt.text, err, tt.want)
		}
	}
}

// TestConvert_Nothing has files of which nothing has a counterpart.
func TestConvert_Nothing(t *testing.T) {
	for program, text := range map[string]string{
		"haproxy":  "frontend f\n mode http\n bind :80\n",
		"nginx":    "http { server { listen 80; } }",
		"iptables": "*filter\n:INPUT ACCEPT\n-A INPUT -m hashlimit --hashlimit-above 1/sec --hashlimit-name x -j LOG\nCOMMIT\n",
	} {
		r, err := converters[program]("x", text)
		if err != nil || r.TOML != "" || len(r.LeftOut) != 1 {
			t.Errorf("%s: %v, %q, %v", program, err, r.TOML, r.LeftOut)
		}
	}
}

// TestConvert_Refused has values that shaperd refuses: the rest is converted.
func TestConvert_Refused(t *testing.T) {
	for _, tt := range []struct{ name, program, text, kept, why string }{
		{"timeout", "nginx", "stream { server { listen 80; proxy_pass a:80;\nproxy_timeout 400d; } }", `"tcp://0.0.0.0:80"`, "line 2: proxy_timeout 400d: shaperd does not support it: tcp_idle_timeout"},
		{"own port", "nginx", "stream { server { listen 80; proxy_pass a:80; }\nserver { listen 127.0.0.1:9464; proxy_pass a:80; limit_conn z 1; } limit_conn_zone $remote_addr zone=z; }", `"tcp://0.0.0.0:80"`, "has the port of"},
		{"same port", "haproxy", "listen a\n bind :80\n server s a:80\nlisten b\n bind :80\n server s a:81\n", `"a"`, "overlaps"},
		{"port 0", "haproxy", "listen a\n bind :80\n server s a:80\nlisten b\n bind :0\n server s a:81\n", `"a"`, "port"},
		{"port of iptables", "iptables", "*filter\n-A FORWARD -o a -p tcp --dport 1 -m hashlimit --hashlimit-above 1/sec --hashlimit-name x -j DROP\n" +
			"-A FORWARD -o a -p tcp --dport http -m hashlimit --hashlimit-above 1/sec --hashlimit-name y -j DROP\n", `"x"`, "does not support it"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := converters[tt.program]("x", tt.text)
			if err != nil {
				t.Fatal(err)
			}
			mustLoad(t, r)
			found := false
			for _, o := range r.LeftOut {
				found = found || strings.Contains(o.String(), tt.why)
			}
			if !found || !strings.Contains(r.TOML, tt.kept) {
				t.Errorf("%v\n%s", r.LeftOut, r.TOML)
			}
		})
	}
}

// fuzz checks that a converter does not panic, and that what it prints loads and names lines that exist.
func fuzz(f *testing.F, program, suffix string) {
	files, err := filepath.Glob(filepath.Join("testdata", program, "*"+suffix))
	if err != nil || len(files) == 0 {
		f.Fatal("no files", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text))
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, err := converters[program]("x", text)
		if err != nil {
			return
		}
		mustLoad(t, r)
		lines := strings.Count(text, "\n") + 1
		for _, o := range r.LeftOut {
			if o.Line < 1 || o.Line > lines || o.Text == "" || o.Why == "" {
				t.Errorf("%v: the text has %d lines", o, lines)
			}
		}
	})
}

func FuzzHAProxy(f *testing.F)  { fuzz(f, "haproxy", ".cfg") }
func FuzzNginx(f *testing.F)    { fuzz(f, "nginx", ".conf") }
func FuzzIptables(f *testing.F) { fuzz(f, "iptables", ".rules") }
