//go:build vmguest

package installed

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	unitFile = "/usr/lib/systemd/system/shaperd.service"
	override = "/etc/systemd/system/shaperd.service"
	examples = "/usr/share/doc/shaperd/examples/"
)

// TestPermissions removes permissions that the daemon needs from the unit or a drop-in, and checks the error. A system call
// that is not allowed kills the process, so that none is tolerated.
func TestPermissions(t *testing.T) {
	install(t, "new.deb")
	serve(t)
	write(t, override+".d/strict.conf", "[Service]\nSystemCallErrorNumber=\nRestart=no\n")
	t.Run("life", testStrictLife)
	t.Run("packet plane", testPacketPlanePermissions)
	// The "check" of the unit may ask for more than the daemon needs, and be refused.
	write(t, override+".d/strict.conf", "[Service]\nRestart=no\n")
	t.Run("without drop-ins", testWithoutDropIns)
}

// testStrictLife uses everything that the drop-ins allow.
func testStrictLife(t *testing.T) {
	configure(t, transparentConfig)
	installDropIn(t, "packet-plane.conf")
	installDropIn(t, "network-admin.conf")
	run(t, "systemctl", "start", "shaperd")
	traffic(t)
	flood(t)
	run(t, "systemctl", "reload", "shaperd")
	traffic(t)
	run(t, "shaperd", "status")
	run(t, "systemctl", "stop", "shaperd")
	expect(t, "Result", "success")
	run(t, "shaperd", "rules", "--remove")
	removeDropIns(t)
}

func testPacketPlanePermissions(t *testing.T) {
	lacks := func(what string) string {
		return "the packet plane lacks " + what + ": run shaperd as root, or copy " + examples + "packet-plane.conf"
	}
	const killed = "status=31/SYS"
	for _, tt := range []struct {
		name     string
		dropIn   bool
		old, new string // what to replace in the unit and the drop-in
		want     string // in the journal
	}{
		{"system call", false, "@setuid", "@setuid epoll_pwait2", killed},
		{"address family", false, "AF_INET AF_INET6 AF_NETLINK ", "", "address family not supported"},
		{"CAP_BPF", true, "=CAP_BPF", "=", lacks("CAP_BPF")},
		{"CAP_NET_ADMIN", true, "CAP_NET_ADMIN ", "", lacks("CAP_NET_ADMIN")},
		{"CAP_PERFMON", true, " CAP_PERFMON", "", lacks("CAP_PERFMON")},
		{"bpf", true, "SystemCallFilter=bpf\n", "", killed},
		{"access to pins", true, "ExecStartPre=+/bin/chmod", "#", "permission denied: the packet plane lacks the system call bpf, or"},
		{"pins", true, "ExecStartPre=+/usr/bin/install", "#", "read-only file system: the packet plane lacks the system call bpf, or"},
		{"write access to pins", true, "ReadWritePaths=", "#", "read-only file system: the packet plane lacks the system call bpf, or"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			configure(t, attachedConfig)
			run(t, "shaperd", "detach")
			run(t, "rm", "-rf", "/sys/fs/bpf/shaperd")
			run(t, "chmod", "0700", "/sys/fs/bpf")
			found := replace(t, unitFile, override, tt.old, tt.new)
			if tt.dropIn {
				found = replace(t, examples+"packet-plane.conf", override+".d/packet-plane.conf", tt.old, tt.new) || found
			}
			if !found {
				t.Fatalf("the files do not have %q", tt.old)
			}
			expectFailure(t, tt.want)
			removeDropIns(t)
		})
	}
}

func testWithoutDropIns(t *testing.T) {
	transparent := strings.Replace(proxyConfig, `name       = "web"`, "name = \"web\"\ntransparent = true", 1)
	const reject = "\n[[limit]]\nname = \"flows\"\nmatch = { protocol = \"udp\" }\nmax_connections = 100\nrefuse_with = \"reject\"\n"
	for _, tt := range []struct{ name, config, want, dropIn string }{
		{"attachment", attachedConfig, "the packet plane lacks CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON", "packet-plane.conf"},
		{"transparent listener", transparent + "\n[transparent]\nrules = \"manual\"\n", `listener "web": transparent needs CAP_NET_RAW or CAP_NET_ADMIN`, "network-admin.conf"},
		{"rules", transparent, `[transparent] rules = "install": nftables needs CAP_NET_ADMIN`, "network-admin.conf"},
		{"reject", proxyConfig + reject, `refuse_with = "reject" needs CAP_NET_RAW`, "network-admin.conf"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			configure(t, tt.config)
			expectFailure(t, tt.want, "run shaperd as root, or copy "+examples+tt.dropIn)
		})
	}
}

// replace copies a file with a text replaced, and reports whether it has the text.
func replace(t *testing.T, from, to, old, with string) bool {
	t.Helper()
	text, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	write(t, to, strings.ReplaceAll(string(text), old, with))
	return strings.Contains(string(text), old)
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func removeDropIns(t *testing.T) {
	t.Helper()
	run(t, "rm", "-f", override, override+".d/packet-plane.conf", override+".d/network-admin.conf")
}

// expectFailure starts the service, which must fail and say why.
func expectFailure(t *testing.T, want ...string) {
	t.Helper()
	run(t, "systemctl", "daemon-reload")
	if out := try("systemctl", "start", "shaperd"); !strings.Contains(out, "failed") {
		t.Errorf("the service started: %s", out)
		run(t, "systemctl", "stop", "shaperd")
	}
	run(t, "journalctl", "--sync")
	id := property(t, "InvocationID")
	log := run(t, "journalctl", "-o", "cat", "--no-pager", "_SYSTEMD_INVOCATION_ID="+id, "+", "INVOCATION_ID="+id)
	for _, text := range want {
		if !strings.Contains(log, text) {
			t.Errorf("no %q in the journal:\n%s", text, log)
		}
	}
}
