package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/bpf"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// fakeFiles is a fake file system, except below a real folder.
type fakeFiles struct {
	fstest.MapFS
	folder string
}

func (m fakeFiles) Open(name string) (fs.File, error) {
	if strings.HasPrefix("/"+name, m.folder) {
		return os.DirFS("/").Open(name)
	}
	return m.MapFS.Open(name)
}

func (m fakeFiles) Stat(name string) (fs.FileInfo, error) {
	if strings.HasPrefix("/"+name, m.folder) {
		return fs.Stat(os.DirFS("/"), name)
	}
	return m.MapFS.Stat(name)
}

func (m fakeFiles) Glob(pattern string) ([]string, error) {
	if strings.HasPrefix("/"+pattern, m.folder) {
		return fs.Glob(os.DirFS("/"), pattern)
	}
	return fs.Glob(m.MapFS, pattern)
}

const (
	tcpHeader = "sl local rem st tx rx tr when uid timeout inode\n"

	// All that the proxy needs, without systemd.
	proxyConfig = `
[[listen]]
name = "db"
address = ["tcp://127.0.0.1:432", "udp://127.0.0.1:5353"]
downstream = ["10.0.0.5:5432"]
tcp_idle_timeout = "1h"
max_flows = 1000
[[limit]]
name = "all"
rate = "10MB/s"
[[limit]]
name = "slots"
match = { protocol = "tcp" }
max_connections = 100
max_queue = 50
`
	packetConfig = `
[daemon]
metrics = ""
[[attach]]
name = "plant"
interface = "lo"
mode = "shape"
[[limit]]
name = "machines"
match = { attach = ["plant"] }
rate = "10MB/s"
`
	transparentConfig = `
[[listen]]
name = "plc"
address = ["tcp://10.0.7.20:502"]
downstream = ["10.0.7.20:502"]
transparent = true
[[limit]]
name = "all"
rate = "10MB/s"
`
	rejectConfig = proxyConfig + `
[[limit]]
name = "rejecting"
match = { protocol = "udp" }
packets = "10pps"
refuse_with = "reject"
`
	goodUnit = "LoadState=loaded\nUnitFileState=enabled\nActiveState=inactive\nNeedDaemonReload=no\nUser=shaperd\n" +
		"AmbientCapabilities=cap_net_bind_service\nCapabilityBoundingSet=cap_net_bind_service\nLimitNOFILE=524288\n"
)

// hostSpec describes a host by its differences from a healthy one.
type hostSpec struct {
	files       map[string]string // texts by path; "-" removes the file
	unit        string            // output of systemctl show
	noFQ        bool
	unreachable bool // names do not resolve, and downstreams refuse connections
	daemonRuns  bool // a daemon answers
	probe       bool
	fileMode    fs.FileMode // of the configuration, if not 0644
	asnAge      time.Duration
	socket      bool        // the control socket exists
	denied      bool        // this user may not connect to it
	noSocket    bool        // --control is empty
	folder      fs.FileMode // of conf.d, if there is one
	ownership   uint32

	foreign    []bpf.Foreign
	foreignErr error

	ledgers  map[string]ledgerAnswer // by the host in the URL; others do not answer
	problems []api.Problem           // of the daemon, about shared limits
}

func (p hostSpec) doctor(t *testing.T, text string) *doctor {
	folder := t.TempDir()
	if p.asnAge > 0 {
		text += "[asn]\nfiles = [\"asn.csv\"]\n"
		path := filepath.Join(folder, "asn.csv")
		writeFile(t, path, "10.0.0.0,10.0.0.255,64500\n")
		if err := os.Chtimes(path, time.Time{}, time.Now().Add(-p.asnAge)); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(folder, "shaperd.toml")
	writeFile(t, file, text)
	if p.fileMode != 0 {
		if err := os.Chmod(file, p.fileMode); err != nil {
			t.Fatal(err)
		}
	}
	if p.folder != 0 {
		if err := os.Mkdir(filepath.Join(folder, "conf.d"), p.folder); err != nil {
			t.Fatal(err)
		}
	}
	all := map[string]string{
		"proc/sys/kernel/osrelease":                                         "6.12.9-amd64\n",
		"proc/self/status":                                                  "Name:\tshaperd\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t0\nCapEff:\t000001ffffffffff\n",
		"proc/self/limits":                                                  "Limit  Soft Limit  Hard Limit  Units\nMax open files            524288               524288               files\n",
		"proc/self/mounts":                                                  "/dev/vda / ext4 rw 0 0\nsysfs /sys sysfs rw 0 0\nbpf /sys/fs/bpf bpf rw 0 0\n",
		"proc/sys/net/core/somaxconn":                                       "4096\n",
		"proc/sys/net/core/rmem_max":                                        "4194304\n",
		"proc/sys/net/ipv4/tcp_max_syn_backlog":                             "256\n",
		"proc/sys/net/ipv4/tcp_syncookies":                                  "1\n",
		"proc/sys/net/ipv4/ip_local_port_range":                             "32768\t60999\n",
		"proc/sys/net/ipv4/ip_forward":                                      "1\n",
		"proc/sys/net/ipv4/conf/all/src_valid_mark":                         "0\n",
		"proc/sys/net/ipv4/conf/eth0/src_valid_mark":                        "0\n",
		"proc/sys/net/netfilter/nf_conntrack_count":                         "10\n",
		"proc/sys/net/netfilter/nf_conntrack_max":                           "1000\n",
		"proc/self/net/tcp":                                                 tcpHeader,
		"sys/devices/system/clocksource/clocksource0/current_clocksource":   "tsc\n",
		"sys/devices/system/clocksource/clocksource0/available_clocksource": "tsc hpet acpi_pm\n",
		"lib/modules/6.12.9-amd64/modules.builtin":                          "kernel/net/sched/sch_fq.ko\n",
		"lib/modules/6.12.9-amd64/modules.dep":                              "kernel/net/netfilter/nf_tables.ko.xz:\nkernel/net/netfilter/nft_tproxy.ko.xz:\nkernel/net/netfilter/nft_socket.ko.xz:\n",
		"etc/passwd":                                                        "root:x:0:0::/root:/bin/sh\nshaperd:x:64999:64999::/:/usr/sbin/nologin\n",
		"etc/group":                                                         "shaperd:x:64999:\nasn:x:64998:other,shaperd\n",
	}
	if p.unit != "" {
		all["run/systemd/system/x"] = ""
	}
	for name, text := range p.files {
		all[name] = text
	}
	files := fstest.MapFS{}
	for name, text := range all {
		if to, is := strings.CutPrefix(text, "->"); is {
			files[name] = &fstest.MapFile{Data: []byte(to), Mode: fs.ModeSymlink | 0o777}
		} else if text != "-" {
			files[name] = &fstest.MapFile{Data: []byte(text), Mode: 0o644, Sys: &syscall.Stat_t{Uid: p.ownership}}
		}
	}
	if p.socket {
		files["run/control.sock"] = &fstest.MapFile{Mode: fs.ModeSocket | 0o600}
	}
	no := errors.New("no")
	socket := "/run/control.sock"
	if p.noSocket {
		socket = ""
	}
	return &doctor{file: file, socket: socket, probe: p.probe, host: host{
		files: fakeFiles{files, folder}, now: time.Now(),
		findForeign: func(string, []shaper.Attachment) ([]bpf.Foreign, error) { return p.foreign, p.foreignErr },
		probeShape: func() error {
			if p.noFQ {
				return errors.New("this kernel has no sch_fq")
			}
			return nil
		},
		systemctl: func(...string) (string, error) { return p.unit, nil },
		askLedger: func(s *config.Shared) (ledgerAnswer, error) {
			_, host, _ := strings.Cut(s.Store[0], "://")
			if a, is := p.ledgers[host]; is {
				return a, nil
			}
			return ledgerAnswer{}, errors.New("connection refused")
		},
		sharedOf: func(string) (api.Shared, error) { return api.Shared{Problems: p.problems}, nil },
		addresses: func() ([]net.Addr, error) {
			return []net.Addr{&net.IPNet{IP: net.IPv4(192, 0, 2, 7)}, &net.IPNet{IP: net.ParseIP("2001:db8::7")}}, nil
		},
		resolve: func(string) error {
			if p.unreachable {
				return no
			}
			return nil
		},
		dial: func(network, _ string) error {
			if network == "unix" && p.denied {
				return fs.ErrPermission
			}
			if network == "unix" && !p.daemonRuns || network == "tcp" && p.unreachable {
				return no
			}
			return nil
		},
	}}
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestDoctor(t *testing.T) {
	changed := func(from, to string) string { return strings.Replace(goodUnit, from, to, 1) }
	file := func(name, text string) hostSpec { return hostSpec{files: map[string]string{name: text}} }
	named := strings.Replace(proxyConfig, "10.0.0.5:5432", "db.internal:5432", 1)
	const clocks = "sys/devices/system/clocksource/clocksource0/"
	for _, tt := range []struct {
		name, config string
		host         hostSpec
		check        string
		state        State
		text, fix    string
	}{
		{"proxy", proxyConfig, hostSpec{}, "", "", "", ""},
		{"proxy with a unit", proxyConfig, hostSpec{unit: goodUnit}, "", "", "", ""},
		{"packets", packetConfig, hostSpec{}, "", "", "", ""},
		{"transparent", transparentConfig, hostSpec{}, "", "", "", ""},
		{"fresh ASN data", proxyConfig, hostSpec{asnAge: time.Hour}, "", "", "", ""},
		{"probed", proxyConfig, hostSpec{probe: true}, "", "", "", ""},

		{"invalid configuration", "x = 1", hostSpec{}, "configuration", Fail, "nothing to do", "shaperd check"},
		{"idle attachment", packetConfig + "[[attach]]\nname = \"idle\"\ninterface = \"lo\"\ndirection = \"ingress\"\nmode = \"police\"", hostSpec{}, "configuration", Warn, `attachment "idle"`, ""},
		{"writable", proxyConfig, hostSpec{fileMode: 0o666}, "files", Warn, "writable by every user", "chmod o-w"},
		{"not readable by the unit's user", proxyConfig, hostSpec{fileMode: 0o600, unit: goodUnit}, "files", Fail, "not readable by shaperd", "chmod o+"},
		{"folder not readable by the unit's user", proxyConfig, hostSpec{folder: 0o700, unit: goodUnit}, "files", Fail, "conf.d: not readable by shaperd", "chmod o+rX"},
		{"readable by a group of the unit", proxyConfig, hostSpec{fileMode: 0o640, unit: goodUnit + "SupplementaryGroups=root\n", files: map[string]string{"etc/group": fmt.Sprintf("root:x:%d:\n", os.Getgid())}}, "", "", "", ""},
		{"old ASN data", proxyConfig, hostSpec{asnAge: 100 * 24 * time.Hour}, "asn files", Warn, "100 days old", "reload shaperd"},

		{"no unit", proxyConfig, hostSpec{unit: "LoadState=not-found\n"}, "unit", Warn, "not-found", "make install"},
		{"disabled", proxyConfig, hostSpec{unit: changed("=enabled", "=disabled")}, "unit", Warn, "disabled", "systemctl enable"},
		{"failed", proxyConfig, hostSpec{unit: changed("=inactive", "=failed")}, "unit", Fail, "has failed", "journalctl -u shaperd"},
		{"not reloaded", proxyConfig, hostSpec{unit: changed("Reload=no", "Reload=yes")}, "unit", Warn, "has changed", "daemon-reload"},
		{"no user", proxyConfig, hostSpec{unit: changed("User=shaperd", "User=nobody2")}, "unit", Fail, "unknown user", "systemd-sysusers"},
		{"user by number", proxyConfig, hostSpec{unit: changed("User=shaperd", "User=64999")}, "", "", "", ""},
		{"masked", proxyConfig, hostSpec{unit: "LoadState=masked\n"}, "unit", Warn, "is masked", "systemctl unmask shaperd"},
		{"access denied", proxyConfig, hostSpec{socket: true, denied: true, files: map[string]string{
			"proc/self/net/tcp": tcpHeader + "0: 00000000:01B0 00000000:0000 0A 0:0 0:0 0 0 0 4711 1\n",
		}}, "daemon", Warn, "this user may not connect", "as root"},
		{"no control socket configured", proxyConfig, hostSpec{noSocket: true}, "", "", "", ""},
		{"stale socket", proxyConfig, hostSpec{socket: true}, "daemon", Warn, "no daemon answers", "rm /run/control.sock"},
		{"no socket", proxyConfig, file("run/control.sock", "x"), "daemon", Fail, "is not a socket", "rm "},

		{"old kernel", proxyConfig, file("proc/sys/kernel/osrelease", "5.4.0-generic"), "kernel", Fail, "shaperd needs Linux 5.11", "5.11"},
		{"old kernel for packets", packetConfig, hostSpec{files: map[string]string{
			"proc/sys/kernel/osrelease": "5.15.0", "sys/module/sch_fq/x": "", "sys/module/sch_ingress/x": "", "sys/module/cls_bpf/x": "",
		}}, "kernel", Fail, "attachments need Linux 6.1", "6.1"},
		{"no tcx", strings.Replace(packetConfig, `"shape"`, "\"police\"\nhook = \"tcx\"", 1), file("proc/sys/kernel/osrelease", "6.1.0"), "kernel", Fail, `"plant": hook = "tcx"`, `"auto"`},
		{"no module", strings.Replace(packetConfig, `"shape"`, "\"shape\"\ndirection = \"ingress\"", 1), hostSpec{}, "modules", Fail, "no act_mirred, cls_u32, ifb, sch_ingress", "linux-modules-extra-6.12.9-amd64"},
		{"no queue", packetConfig, hostSpec{noFQ: true}, "queue", Fail, "no sch_fq", "modprobe sch_fq"},
		{"no queue to load", packetConfig, hostSpec{noFQ: true, files: map[string]string{
			"lib/modules/6.12.9-amd64/modules.builtin": "-", "lib/modules/6.12.9-amd64/modules.dep": "-",
		}}, "queue", Fail, "no sch_fq", `mode = "police"`},
		{"pins elsewhere", strings.Replace(packetConfig, "[daemon]", "[daemon]\npin_path = \"/var/lib/pins\"", 1), hostSpec{}, "pins", Fail, "/var/lib/pins is not on a bpf", "below /sys/fs/bpf"},
		{"no bpf file system", packetConfig, file("proc/self/mounts", "/dev/vda / ext4 rw 0 0\nbpf /sys/fs/bpf2 bpf rw 0 0\n"), "pins", Fail, "not on a bpf file system", "mount -t bpf"},
		{"pins of another user", packetConfig, hostSpec{
			files: map[string]string{"sys/fs/bpf/shaperd": ""}, ownership: 7,
			unit: strings.ReplaceAll(goodUnit, "cap_net_bind_service", "cap_bpf cap_net_admin cap_perfmon"),
		}, "pins", Fail, "does not belong to shaperd", "shaperd detach"},

		{"low port", proxyConfig, file("proc/self/status", "Uid:\t0\t0\t0\t0\nCapEff:\t0000000000000000\n"), "capabilities", Fail, "lacks CAP_NET_BIND_SERVICE, for port 432", "as root"},
		{"low port of the dashboard", strings.Replace("[daemon]\ndashboard = \"127.0.0.1:80\"\n"+proxyConfig, ":432", ":5432", 1), file("proc/self/status", "Uid:\t0\t0\t0\t0\nCapEff:\t0000000000000000\n"), "capabilities", Fail, "for port 80", "as root"},
		{"unit without it", proxyConfig, hostSpec{unit: changed("AmbientCapabilities=cap_net_bind_service", "AmbientCapabilities=")}, "capabilities", Fail, "shaperd lacks CAP_NET_BIND_SERVICE", "systemctl edit shaperd"},
		{"bounding set without it", proxyConfig, hostSpec{unit: changed("BoundingSet=cap_net_bind_service", "BoundingSet=")}, "capabilities", Fail, "lacks CAP_NET_BIND_SERVICE", ""},
		{"unit without the drop-in", packetConfig, hostSpec{unit: goodUnit}, "capabilities", Fail, "lacks CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON, for [[attach]]", "examples/packet-plane.conf"},
		{"reject", rejectConfig, hostSpec{unit: goodUnit}, "capabilities", Fail, `CAP_NET_RAW, for refuse_with = "reject" of limit "rejecting"`, "examples/network-admin.conf"},
		{"transparent with a unit", strings.Replace(transparentConfig, ":502", ":5020", 2) + "[transparent]\nrules = \"manual\"", hostSpec{unit: goodUnit}, "capabilities", Fail, "CAP_NET_RAW, for transparent", "network-admin.conf"},
		{"few descriptors", proxyConfig, file("proc/self/limits", "Max open files  1024  1024  files"), "descriptors", Warn, "may need 1316", "ulimit -n 1386"},
		{"few for the unit", proxyConfig, hostSpec{unit: changed("=524288", "=1024")}, "descriptors", Warn, "may need 1316", "LimitNOFILE=1386"},
		{"more than the kernel gives", proxyConfig, hostSpec{files: map[string]string{
			"proc/self/limits": "Max open files  1024  1024  files", "proc/sys/fs/nr_open": "1200",
		}}, "descriptors", Warn, "may need 1316", "sysctl --system; then ulimit -n 1386"},
		{"few, connections not capped", strings.Replace(proxyConfig, `{ protocol = "tcp" }`, `{ source = ["10.0.0.0/8"], protocol = "tcp" }`, 1), file("proc/self/limits", "Max open files  2000  2000  files"), "descriptors", Warn, "room for 417 TCP", "ulimit"},

		{"somaxconn", proxyConfig, file("proc/sys/net/core/somaxconn", "128"), "buffers", Warn, "only 128 connections", "'net.core.somaxconn = 4096' >> /etc/sysctl.d"},
		{"no cookies", proxyConfig, file("proc/sys/net/ipv4/tcp_syncookies", "0"), "buffers", Warn, "half-open", "tcp_syncookies = 1"},
		{"rmem_max", proxyConfig, hostSpec{unit: goodUnit, files: map[string]string{"proc/sys/net/core/rmem_max": "212992"}}, "buffers", Warn, "can buffer 212992 bytes", "rmem_max = 4194304"},
		{"rmem_max as root", proxyConfig, file("proc/sys/net/core/rmem_max", "212992"), "", "", "", ""},
		{"local ports for flows", proxyConfig, file("proc/sys/net/ipv4/ip_local_port_range", "32768 33000"), "local ports", Warn, "up to 1000 UDP flows", "max_flows"},
		{"local ports for connections", strings.Replace(proxyConfig, "max_flows = 1000", "max_flows = 10", 1), file("proc/sys/net/ipv4/ip_local_port_range", "32768 32800"), "local ports", Warn, `"db": up to 100 connections`, "ip_local_port_range"},
		{"more flows than ports", strings.Replace(proxyConfig, "max_flows = 1000", "max_flows = 100000", 1), hostSpec{}, "local ports", Warn, "up to 100000 UDP flows", "lower max_flows"},
		{"src_valid_mark of a VLAN", transparentConfig, file("proc/sys/net/ipv4/conf/eth0.100/src_valid_mark", "1"), "routing", Fail, "net/ipv4/conf/eth0.100/src_valid_mark is 1", "'net/ipv4/conf/eth0.100/src_valid_mark = 0'"},
		{"src_valid_mark", transparentConfig, file("proc/sys/net/ipv4/conf/eth0/src_valid_mark", "1"), "routing", Fail, "net.ipv4.conf.eth0.src_valid_mark is 1", "src_valid_mark = 0"},
		{"no forwarding", transparentConfig, file("proc/sys/net/ipv4/ip_forward", "0"), "routing", Warn, `listener "plc"`, "ip_forward = 1"},
		{"conntrack nearly full", proxyConfig, file("proc/sys/net/netfilter/nf_conntrack_count", "900"), "conntrack", Warn, "900 of at most 1000 connections", "nf_conntrack_max = 2000"},
		{"conntrack full", proxyConfig, file("proc/sys/net/netfilter/nf_conntrack_count", "1000"), "conntrack", Fail, "drops packets", "nf_conntrack_max"},
		{"slow clock", proxyConfig, file(clocks+"current_clocksource", "hpet"), "clock", Warn, "hpet", "echo tsc > /sys/devices"},
		{"slow clock without alternative", proxyConfig, hostSpec{files: map[string]string{clocks + "current_clocksource": "acpi_pm", clocks + "available_clocksource": "acpi_pm"}}, "clock", Warn, "acpi_pm", "tsc=reliable"},

		{"no interface", strings.Replace(packetConfig, `"lo"`, `"nowhere0"`, 1), hostSpec{}, "interfaces", Warn, "interface nowhere0 does not exist", "ip link"},
		{"another program", packetConfig, hostSpec{foreign: []bpf.Foreign{{
			Attachment: "plant", Interface: "lo", What: "the tcx program cil_to_netdev (id 7)", Fix: "bpftool net show dev lo",
		}}}, "programs", Warn, `attachment "plant": at lo, egress, packets pass the tcx program cil_to_netdev (id 7) before the limits: the limits do not see packets that it drops`, "bpftool net show dev lo"},
		{"another program that refuses", packetConfig, hostSpec{foreign: []bpf.Foreign{{
			Attachment: "plant", Interface: "lo", Direction: shaper.Ingress, What: "the chain c of nf_tables", Fix: "nft list ruleset", Refuses: true,
		}}}, "programs", Fail, `at lo, ingress, there is the chain c of nf_tables: "run" does not attach next to it`, "nft list ruleset"},
		{"other programs, not permitted to list", packetConfig, hostSpec{foreignErr: fmt.Errorf("query: %w", fs.ErrPermission)}, "", "", "", ""},
		{"port taken", proxyConfig, hostSpec{files: map[string]string{
			"proc/self/net/tcp": tcpHeader + "0: 00000000:01B0 00000000:0000 0A 0:0 0:0 0 0 0 4711 1\n",
			"proc/812/fd/7":     "->socket:[4711]", "proc/812/comm": "nginx\n",
		}}, "ports", Fail, `"db", tcp://127.0.0.1:432: the port is in use by nginx (process 812)`, "ss -lntup"},
		{"port taken by an unknown program", proxyConfig, file("proc/self/net/udp", tcpHeader+"0: 0100007F:14E9 00000000:0000 07 0:0 0:0 0 0 0 4711 1\n"), "ports", Fail, "udp://127.0.0.1:5353: the port is in use by another program", ""},
		{"port perhaps taken", proxyConfig, file("proc/self/net/tcp6", tcpHeader+"0: "+strings.Repeat("0", 32)+":01B0 "+strings.Repeat("0", 32)+":0000 0A 0:0 0:0 0 0 0 4711 1\n"), "ports", Warn, "unless that is IPv6 only", ""},
		{"port taken by an IPv4-mapped socket", proxyConfig, file("proc/self/net/tcp6", tcpHeader+"0: 0000000000000000FFFF00000100007F:01B0 "+strings.Repeat("0", 32)+":0000 0A 0:0 0:0 0 0 0 4711 1\n"), "ports", Fail, "at 127.0.0.1:432", ""},
		{"metrics port taken", proxyConfig, file("proc/self/net/tcp", tcpHeader+"0: 0100007F:24F8 00000000:0000 0A 0:0 0:0 0 0 0 4711 1\n"), "ports", Fail, "[daemon] metrics", ""},
		{"port of the dashboard taken", "[daemon]\ndashboard = \"127.0.0.1:433\"\n" + proxyConfig, file("proc/self/net/tcp", tcpHeader+"0: 0100007F:01B1 00000000:0000 0A 0:0 0:0 0 0 0 4711 1\n"), "ports", Fail, "[daemon] dashboard", ""},
		{"port kept by systemd", proxyConfig, hostSpec{files: map[string]string{
			"proc/self/net/tcp": tcpHeader + "0: 00000000:01B0 00000000:0000 0A 0:0 0:0 0 0 0 4711 1\n",
			"proc/1/fd/7":       "->socket:[4711]", "proc/1/comm": "systemd\n",
		}}, "", "", "", ""},
		{"port of another instance", strings.NewReplacer("[[listen]]\n", "[[listen]]\ninstances = 2\n", "[[limit]]\n", "[[limit]]\nshared = true\n").Replace(proxyConfig) + "[shared]\nhosts = 2\n", hostSpec{files: map[string]string{
			"proc/self/net/tcp": tcpHeader + "0: 00000000:01B0 00000000:0000 0A 0:0 0:0 0 0 0 4711 1\n",
			"proc/812/fd/7":     "->socket:[4711]", "proc/812/comm": "shaperd\n",
		}}, "", "", "", ""},
		{"others' ports", proxyConfig, file("proc/self/net/tcp", tcpHeader+
			"0: 0200007F:01B0 00000000:0000 0A 0:0 0:0 0 0 0 1 1\n"+ // another address
			"1: 00000000:01B1 00000000:0000 0A 0:0 0:0 0 0 0 2 1\n"+ // another port
			"2: 0100007F:01B0 0100007F:1234 01 0:0 0:0 0 0 0 3 1\n"), "", "", "", ""}, // a connection
		{"the daemon's own ports", proxyConfig, hostSpec{daemonRuns: true, socket: true, files: map[string]string{
			"proc/self/net/tcp": tcpHeader + "0: 00000000:01B0 00000000:0000 0A 0:0 0:0 0 0 0 4711 1\n",
		}}, "", "", "", ""},
		{"no such name", named, hostSpec{unreachable: true}, "downstreams", Fail, "downstream db.internal: no", "getent"},
		{"downstream at an interface", strings.NewReplacer("127.0.0.1:432", "0.0.0.0:432", "10.0.0.5:5432", "192.0.2.7:432").Replace(proxyConfig), hostSpec{}, "downstreams", Warn, "192.0.2.7:432 is an address of this host", "another port"},
		{"downstream at an interface, at another port", strings.NewReplacer("127.0.0.1:432", "0.0.0.0:432", "10.0.0.5:5432", "192.0.2.7:433").Replace(proxyConfig), hostSpec{}, "downstreams", OK, "all 1 resolve", ""},
		{"no connection", proxyConfig, hostSpec{unreachable: true, probe: true}, "downstreams", Fail, "downstream 10.0.0.5: no", "ip route get 10.0.0.5"},
		{"not probed", proxyConfig, hostSpec{unreachable: true}, "", "", "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			found := tt.host.doctor(t, tt.config).run()
			matched := tt.check == ""
			for _, f := range found {
				switch {
				case f.Name == tt.check && f.State == tt.state && strings.Contains(f.Text, tt.text) && strings.Contains(f.Fix, tt.fix):
					matched = true
				case f.State == Warn || f.State == Fail:
					if f.Name != tt.check {
						t.Errorf("unexpected finding: %+v", f)
					}
				}
			}
			if !matched {
				t.Errorf("no %s of %q with %q and fix %q in %+v", tt.state, tt.check, tt.text, tt.fix, found)
			}
		})
	}
}
