package systemd

import (
	"net"
	"os/exec"
	"strings"
	"testing"
)

const networkAdmin = "network-admin.conf"

// TestDropIn_NetworkAdmin checks that the unit with its drop-in serves transparently, and installs and
// removes rules.
func TestDropIn_NetworkAdmin(t *testing.T) {
	transparent := strings.Replace(config, "address    = [\"tcp://0.0.0.0:80\", \"tcp://[::]:80\"]\ndownstream = [\"localhost:7000\"]",
		"address = [\"tcp://127.0.0.1:80\", \"tcp://[::1]:80\"]\ndownstream = [\"127.0.0.1:7000\", \"[::1]:7000\"]\ntransparent = true", 1) +
		"\n[[limit]]\nname = \"flows\"\nmatch = { protocol = \"udp\" }\nmax_connections = 100\nrefuse_with = \"reject\"\n"
	s := newTestHost(t, readUnit(t, unitFile, networkAdmin), transparent)
	d := s.start(t)
	rules := func() string {
		t.Helper()
		out, err := exec.Command("nft", "list", "ruleset").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if text := rules(); !strings.Contains(text, "socket transparent") {
		t.Errorf("the daemon has not installed its rules:\n%s", text)
	}
	for _, addr := range []string{"127.0.0.1", "::1"} {
		c := dial(t, "tcp", net.JoinHostPort(addr, "80"))
		exchange(t, c, []byte("hello"))
		c.Close()
	}
	s.configure(t, strings.Replace(transparent, "\ntransparent = true", "", 1))
	s.reload(t, d)
	if text := rules(); strings.Contains(text, "drop") {
		t.Errorf("no listener is transparent, but rules drop packets:\n%s", text)
	}
	s.terminate(t, d)
	s.end(t, d)
}

// TestUnit_WithoutNetworkAdmin checks the errors without the drop-in.
func TestUnit_WithoutNetworkAdmin(t *testing.T) {
	for what, text := range map[string]string{
		"listener \"web\": transparent needs CAP_NET_RAW or CAP_NET_ADMIN": strings.Replace(config, `name       = "web"`, "name = \"web\"\ntransparent = true", 1) + "\n[transparent]\nrules = \"manual\"\n",
		"[transparent] rules = \"install\": nftables needs CAP_NET_ADMIN":  strings.Replace(config, `name       = "web"`, "name = \"web\"\ntransparent = true", 1),
		"refuse_with = \"reject\" needs CAP_NET_RAW":                       config + "\n[[limit]]\nname = \"flows\"\nmatch = { protocol = \"udp\" }\nmax_connections = 100\nrefuse_with = \"reject\"\n",
	} {
		t.Run(what, func(t *testing.T) {
			s := newTestHost(t, readUnit(t, unitFile), text)
			out, err := s.command(s.unit.service(t, "ExecStart"), 0).CombinedOutput()
			want := "operation not permitted: run shaperd as root, or copy /usr/share/doc/shaperd/examples/network-admin.conf " +
				"to /etc/systemd/system/shaperd.service.d/ and run \"systemctl daemon-reload\"\n"
			if err == nil || !strings.Contains(string(out), "shaperd: "+what) || !strings.Contains(string(out), want) {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
