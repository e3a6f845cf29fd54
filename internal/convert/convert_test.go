package convert

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

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
				if mustLoad(t, r); r.TOML == "" {
					t.Fatalf("nothing was converted: %v", r.LeftOut)
				}
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

// mustLoad checks that a result loads, if there is any.
func mustLoad(t *testing.T, r Result) {
	t.Helper()
	if r.TOML == "" {
		return
	}
	files := new(config.Files)
	files.Add("converted", r.TOML)
	if _, err := files.Load(); err != nil {
		t.Fatalf("%v\n%s", err, r.TOML)
	}
}

// TestConvert_Errors has files that cannot be read.
func TestConvert_Errors(t *testing.T) {
	for _, tt := range []struct{ program, text, want string }{
		{"haproxy", "global\n  log \"x\n", "line 2: a quote is not closed"},
		{"haproxy", "global\n\n  log x\\", "line 3: a backslash at the end"},
		{"haproxy", "global\n.if defined(X)\n", "line 2: .if: which lines apply depends on the process that reads them"},
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

// TestConvert_LeftOut has parts that are left out, each with the reason.
func TestConvert_LeftOut(t *testing.T) {
	const server = "\n server s a:1\n"
	rule := func(s string) string { return "*filter\n:FORWARD ACCEPT\n" + s + "\nCOMMIT\n" }
	for _, tt := range []struct{ program, text, want string }{
		{"haproxy", "listen a\n bind :1 ssl crt /etc/x.pem" + server, "line 1: listen a: shaperd does not terminate TLS"},
		{"haproxy", "frontend a\n bind :1\n default_backend nowhere\n", `line 1: frontend a: its backend "nowhere" is not converted`},
		{"haproxy", "backend b\n mode http" + server + "frontend a\n bind :1\n default_backend b\n", "line 4: frontend a: its backend has mode http"},
		{"haproxy", "frontend a from x\n bind :1\n", `line 1: frontend a: there is no section "defaults x" before it`},
		{"haproxy", "listen a\n bind :1\n bind :2 accept-proxy" + server, "line 1: listen a: some of its binds accept the PROXY protocol, and others do not: make it two frontends"},
		{"haproxy", "listen a\n bind :1\n server s a:1 ssl\n", "line 1: listen a: shaperd does not open TLS connections"},
		{"haproxy", "listen a\n bind :1000-2000" + server, `line 1: listen a: ":1000-2000" is not an IP address with one port`},
		{
			"haproxy", "listen a\n bind :1\n server s a:1 maxconn 5\n stick-table type ip size 1k store conn_cur\n tcp-request connection track-sc0 src\n tcp-request connection reject if { sc0_conn_cur gt 5 }\n",
			"line 6: tcp-request connection reject if { sc0_conn_cur gt 5 }: HAProxy counts connections that wait for a server too; shaperd counts those in flight, of which there are at most 5. " +
				"Sources take turns, so those of one that waits with many delay no other",
		},
		{"haproxy", "listen a\n bind :1" + server + " tcp-request connection reject if { sc0_conn_cur gt 5 }\n", "line 4: tcp-request connection reject if { sc0_conn_cur gt 5 }: no earlier rule tracks src by this counter"},
		{
			"haproxy", "listen a\n bind :1" + server + " stick-table type ip size 1k store conn_cur\n tcp-request connection accept if { nbsrv gt 1 }\n tcp-request connection track-sc0 src\n",
			"line 6: tcp-request connection track-sc0 src: line 5 accepts connections before it, which shaperd would count",
		},
		{"haproxy", "listen a\n bind :1\n disabled" + server, "line 1: listen a: it is disabled"},
		{"haproxy", "defaults\n disabled\nbackend b" + server + "frontend a\n bind :1\n default_backend b\n", "line 5: frontend a: it is disabled"},
		{
			"iptables", rule("-A FORWARD -o eth0 -p udp -g own\n-A FORWARD -o eth0 -p udp -m hashlimit --hashlimit-above 1/sec --hashlimit-name x -j DROP"),
			"line 4: -A FORWARD -o eth0 -p udp -m hashlimit --hashlimit-above 1/sec --hashlimit-name x -j DROP: line 3, -j own, may keep packets from it, which shaperd would count",
		},
		{"nginx", "stream { server { listen 1 ssl; proxy_pass a:1; } }", "line 1: server: shaperd does not terminate TLS"},
		{
			"iptables", rule("-A FORWARD -o eth1 -p tcp -m hashlimit --hashlimit-above 1/sec --hashlimit-name x -m conntrack --ctstate ESTABLISHED -j DROP"),
			"line 3: -A FORWARD -o eth1 -p tcp -m hashlimit --hashlimit-above 1/sec --hashlimit-name x -m conntrack --ctstate ESTABLISHED -j DROP: it matches established connections alone",
		},
		{
			"iptables", rule("-A FORWARD -o eth0 -p udp -m hashlimit --hashlimit-above 1/sec --hashlimit-name x -j DROP\n-A FORWARD -o eth1 -p udp -m hashlimit --hashlimit-above 1/sec --hashlimit-name x -j DROP"),
			`line 4: -A FORWARD -o eth1 -p udp -m hashlimit --hashlimit-above 1/sec --hashlimit-name x -j DROP: the rules of lines [3 4] count in one table, "x"`,
		},
		{
			"iptables", rule("-A FORWARD -o eth0 -p udp -j own\n-A FORWARD -o eth0 -p udp -m hashlimit --hashlimit-above 1/sec --hashlimit-name x -j DROP"),
			"line 4: -A FORWARD -o eth0 -p udp -m hashlimit --hashlimit-above 1/sec --hashlimit-name x -j DROP: line 3, -j own, may keep packets from it, which shaperd would count",
		},
		{
			"iptables", rule("-A FORWARD -o eth* -p tcp -m hashlimit --hashlimit-above 1/sec --hashlimit-name x -j DROP"),
			"line 3: -A FORWARD -o eth* -p tcp -m hashlimit --hashlimit-above 1/sec --hashlimit-name x -j DROP: not the name of an interface",
		},
	} {
		r, err := converters[tt.program]("x", tt.text)
		if err != nil {
			t.Errorf("%q: %v", tt.text, err)
			continue
		}
		mustLoad(t, r)
		found := false
		for _, o := range r.LeftOut {
			found = found || o.String() == tt.want
		}
		if !found {
			t.Errorf("%q: left out: %v\nwant: %s", tt.text, r.LeftOut, tt.want)
		}
	}
}

// TestConvert_Large converts files with thousands of sections, whose names are equal. The time must not grow with the square of
// their number: then four times as many take 16 times as long.
func TestConvert_Large(t *testing.T) {
	for program, form := range map[string]struct{ head, section, tail string }{
		"haproxy": {"defaults\n mode tcp\n", "listen a\n bind 127.0.%d.%d:80\n server s 10.0.0.1:1 maxconn 5\n", ""},
		"nginx":   {"stream {\n", "server { listen 127.0.%d.%d:80; proxy_pass 10.0.0.1:1; }\n", "}\n"},
	} {
		t.Run(program, func(t *testing.T) {
			convert := func(sections int) time.Duration {
				var text strings.Builder
				text.WriteString(form.head)
				for i := range sections {
					fmt.Fprintf(&text, form.section, i>>8, i&255)
				}
				text.WriteString(form.tail)
				began := time.Now()
				r, err := converters[program]("x", text.String())
				took := time.Since(began)
				if err != nil {
					t.Fatal(err)
				}
				if n := strings.Count(r.TOML, "[[listen]]"); n != 1024 {
					t.Errorf("%d listeners", n)
				}
				if last := r.LeftOut[len(r.LeftOut)-1]; last.Why != "shaperd does not support that many" {
					t.Errorf("left out: %v", last)
				}
				return took
			}
			var few, many time.Duration
			for range 4 { // a stall of the machine may add to one of them
				few, many = convert(3500), convert(14000)
				if many < 8*few {
					return
				}
			}
			t.Errorf("3500 sections took %v, and 14000 %v", few, many)
		})
	}
}

// TestConvert_Messages has so many rules that the list of them in the message of each would be 300 MB.
func TestConvert_Messages(t *testing.T) {
	text := "*filter\n" + strings.Repeat("-A FORWARD -p udp -m hashlimit --hashlimit-above 1/sec --hashlimit-name x -j DROP\n", 10000) + "COMMIT\n"
	r, err := iptablesEth9("x", text)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.LeftOut) != 10000 {
		t.Errorf("%d rules are left out", len(r.LeftOut))
	}
	for _, o := range r.LeftOut {
		if len(o.Why) > 200 {
			t.Fatal(o)
		}
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
