package cli

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestSources changes the files of a group and with values under a running daemon: they take effect without a reload, and one with a
// mistake leaves what was read before.
func TestSources(t *testing.T) {
	t.Parallel()
	listen := testutil.FreeAddr(t, "tcp")
	config := writeConfig(t, "", `
[daemon]
metrics = ""
dashboard = ""
pin_path = "/nowhere/pins"
[[listen]]
name = "db"
address = ["tcp://`+listen+`"]
downstream = ["`+testutil.ServeTCP(t, testutil.Echo)+`"]
[[group]]
name = "monitoring"
source = ["127.0.0.9"]
file = "monitoring.txt"
[[group]]
name = "gold"
source = ["127.0.1.0/24"]
[[limit]]
name = "per-source"
key = ["source"]
max_connections = 1
queue_timeout = "0s"
except.group = "monitoring"
for.gold = { max_connections = 3 }
values = "customers.csv"
`)
	folder := filepath.Dir(config)
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("monitoring.txt", "127.0.0.10\n")
	if _, out, err := command(t, "check", config); err == nil || !strings.Contains(out, `:24:1: values: open `+folder+`/customers.csv: no such file`) {
		t.Errorf("%v\n%s", err, out)
	}
	write("customers.csv", "source,max_connections\n127.0.0.2,2\n127.0.1.7,4\n127.0.0.3,\n")
	state := filepath.Join(folder, "state")
	d := startControlled(t, config, "--state", state)

	// open returns how many connections of a source there can be at once, up to 8.
	open := func(source string) (n int) {
		t.Helper()
		var all []net.Conn
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}
		for range 8 {
			c, err := dialer.DialContext(context.Background(), "tcp", listen)
			if err != nil {
				break
			}
			all = append(all, c)
			_ = c.SetDeadline(time.Now().Add(5 * time.Second))
			if ping(c) != nil {
				break
			}
			n++
		}
		for _, c := range all {
			c.Close()
		}
		testutil.WaitFor(t, "the connections to end", func() bool {
			out, err := d.verb("connections")
			return err == nil && !strings.Contains(out, source+":")
		})
		return n
	}
	expect := func(want map[string]int) {
		t.Helper()
		for source, n := range want {
			if got := open(source); got != n {
				t.Errorf("%s has %d connections at once, want %d", source, got, n)
			}
		}
	}
	expect(map[string]int{"127.0.0.1": 1, "127.0.0.2": 2, "127.0.0.3": 1, "127.0.0.9": 8, "127.0.0.10": 8, "127.0.1.1": 3, "127.0.1.7": 4})
	d.must("explain --source 127.0.0.9 --to tcp/"+port(listen), `Excepted from limit "per-source".`, "No limit matches")
	d.must("explain --source 127.0.1.7 --to tcp/"+port(listen), "4 connections, wait 0s (of this source)")
	d.must("explain --source 127.0.0.1 --to tcp/"+port(listen), "1 connections, wait 0s ")
	d.must("limits per-source", "1 connections, wait 0s, other values for gold, other values for 3 prefixes; one bucket per source")
	if out, _, err := command(t, "explain", "--config", config, "--source", "127.0.0.2", "--to", "tcp/"+port(listen)); err != nil || !strings.Contains(out, "2 connections, wait 0s (of this source)") {
		t.Errorf("%v\n%s", err, out)
	}

	begin := time.Now()
	write("monitoring.txt", "# nobody\n127.0.0.2\n")
	d.waitLog("sources read again")
	if took := time.Since(begin); took > 15*time.Second {
		t.Errorf("a change took effect after %v", took)
	}
	expect(map[string]int{"127.0.0.2": 8, "127.0.0.10": 1})
	write("customers.csv", "source,max_connections\n127.0.0.1,5\n127.0.0.2/33,2\n")
	d.waitLog("customers.csv:3:1")
	d.must("status", "OLD SOURCES are in use, because a file has an error: "+folder+"/customers.csv:3:1: ")
	expect(map[string]int{"127.0.0.1": 1, "127.0.1.7": 4})
	write("customers.csv", "source,max_connections\n127.0.0.1,5\n")
	testutil.WaitFor(t, "the mistake to be gone", func() bool {
		out, err := d.verb("status")
		return err == nil && !strings.Contains(out, "OLD SOURCES")
	})
	expect(map[string]int{"127.0.0.1": 5, "127.0.1.7": 3})
	d.must("set limit per-source max_connections=2")
	expect(map[string]int{"127.0.0.1": 5, "127.0.0.3": 2})

	// An operator decides before the file, and for a longer prefix before a shorter one.
	d.must("set limit per-source max_connections=6 --source 127.0.0.1 --for 1h", "set  max_connections=6 for 127.0.0.1/32, until ")
	d.must("set limit per-source max_connections=3 --source 127.0.0.0/24")
	expect(map[string]int{"127.0.0.1": 6, "127.0.0.3": 3})
	d.must("status", "max_connections=6 for 127.0.0.1/32")
	for line, want := range map[string]string{
		"set limit per-source queue_timeout=1s --source 127.0.0.1":    "queue_timeout is the same for all sources; keys of one are rate,",
		"set limit per-source rate=1MB/s --source 127.0.0.1":          "rate: has no effect without rate in the limit",
		"set limit per-source max_connections=x --source 127.0.0.1":   "must be an integer",
		"set limit per-source max_connections=1 --source 127.0.0.1/8": "has host bits set",
		"unset limit per-source --source 127.0.0.7":                   `no key is overridden in limit "per-source", source 127.0.0.7/32`,
	} {
		if out, err := d.verb(strings.Fields(line)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s\n%s", line, err, want, out)
		}
	}
	d.must("unset limit per-source --source 127.0.0.1 max_connections")
	expect(map[string]int{"127.0.0.1": 5, "127.0.0.3": 3})
	d.stop()
	d.done <- <-d.done
	d = startControlled(t, config, "--state", state)
	expect(map[string]int{"127.0.0.3": 3})
	d.must("unset limit per-source --source 127.0.0.0/24")
	expect(map[string]int{"127.0.0.3": 2})
}

// TestSources_EachByItself changes one file all the time, and breaks another: a third takes effect nevertheless. What could not be applied
// because of an override is applied when that is gone.
func TestSources_EachByItself(t *testing.T) {
	t.Parallel()
	listen := testutil.FreeAddr(t, "tcp")
	config := writeConfig(t, "", `
[daemon]
metrics = ""
dashboard = ""
pin_path = "/nowhere/pins"
[[listen]]
name = "db"
address = ["tcp://`+listen+`"]
downstream = ["127.0.0.1:9"]
[[group]]
name = "feed"
file = "feed.txt"
[[group]]
name = "vip"
file = "vip.txt"
[[limit]]
name = "l"
key = ["source"]
new_connections = "10/s"
except.group = ["feed", "vip"]
values = "customers.csv"
`)
	folder := filepath.Dir(config)
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(folder, name+".new"), []byte(text), 0o644); err != nil {
			t.Error(err)
		}
		if err := os.Rename(filepath.Join(folder, name+".new"), filepath.Join(folder, name)); err != nil {
			t.Error(err)
		}
	}
	write("feed.txt", "192.0.2.1\n")
	write("vip.txt", "192.0.2.2\n")
	write("customers.csv", "source,new_connections\n198.51.100.1,20/s\n")
	d := startControlled(t, config)
	explains := func(source, want string) {
		t.Helper()
		end := time.Now().Add(30 * time.Second)
		for {
			out, err := d.verb("explain", "--source", source, "--to", "tcp/"+port(listen))
			if err == nil && strings.Contains(out, want) {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%s: no %q in %v\n%s", source, want, err, out)
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(200 * time.Millisecond):
				write("feed.txt", fmt.Sprintf("192.0.2.1\n203.0.113.%d\n", 1+i%200))
			}
		}
	}()
	d.must("set limit l burst_connections=1000")
	write("customers.csv", "source,new_connections\n198.51.100.1,1/1h\n") // a burst of 1000 would take too long
	d.waitLog("customers.csv:2:1")
	begin := time.Now()
	write("vip.txt", "192.0.2.3\n")
	explains("192.0.2.3", `Excepted from limit "l"`)
	if took := time.Since(begin); took > 4*time.Second {
		t.Errorf("a change took effect after %v, while another file changes", took)
	}
	begin = time.Now()
	d.must("unset limit l")
	explains("198.51.100.1", "1/h new connections")
	if took := time.Since(begin); took > 9*time.Second { // it would be read again after ten in any case
		t.Errorf("a file took effect %v after what kept it from that was gone", took)
	}
	close(stop)
	<-stopped
	write("feed.txt", "192.0.2.9\n")
	explains("192.0.2.9", `Excepted from limit "l"`)
}
