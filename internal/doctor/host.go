package doctor

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/bpf"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// host is what doctor sees of a host. Tests replace it.
type host struct {
	files       fs.FS // rooted at /
	now         time.Time
	probeShape  func() error
	findForeign func(pins string, attachments []shaper.Attachment) ([]bpf.Foreign, error)
	systemctl   func(args ...string) (string, error)
	resolve     func(name string) error
	addresses   func() ([]net.Addr, error) // of the interfaces
	dial        func(network, address string) error
	askLedger   func(*config.Shared) (ledgerAnswer, error)
	sharedOf    func(socket string) (api.Shared, error) // of the daemon
}

// Timeouts of doctor.
const (
	dialTimeout    = time.Second
	resolveTimeout = 3 * time.Second
)

func thisHost(ctx context.Context) host {
	return host{
		files:       os.DirFS("/"),
		now:         time.Now(),
		probeShape:  bpf.ProbeShape,
		findForeign: bpf.FindForeign,
		systemctl: func(args ...string) (string, error) {
			out, err := exec.CommandContext(ctx, "systemctl", args...).Output()
			return string(out), err
		},
		addresses: net.InterfaceAddrs,
		resolve: func(name string) error {
			ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
			defer cancel()
			_, err := net.DefaultResolver.LookupNetIP(ctx, "ip", name)
			return err
		},
		dial: func(network, address string) error {
			d := net.Dialer{Timeout: dialTimeout}
			c, err := d.DialContext(ctx, network, address)
			if err != nil {
				return err
			}
			return c.Close()
		},
		askLedger: func(s *config.Shared) (ledgerAnswer, error) { return askLedger(ctx, s) },
		sharedOf:  func(socket string) (api.Shared, error) { return api.NewClient(socket).Shared(ctx) },
	}
}

// fsPath converts an absolute path to one of [fs.FS].
func fsPath(p string) string { return strings.TrimPrefix(path.Clean(p), "/") }

// readText returns the text of a file without surrounding white space, or "".
func (h host) readText(p string) string {
	text, _ := fs.ReadFile(h.files, fsPath(p))
	return strings.TrimSpace(string(text))
}

// readInt returns the number in a file, or false when there is none.
func (h host) readInt(p string) (int, bool) {
	n, err := strconv.Atoi(h.readText(p))
	return n, err == nil
}

// sysctlCommand returns a command that sets a sysctl now and at each boot.
func sysctlCommand(name string, value any) string {
	return fmt.Sprintf("echo '%s = %v' >> /etc/sysctl.d/60-shaperd.conf && sysctl --system", name, value)
}

// runner is the user that runs the daemon: that of the unit, or, without a unit, that of this
// process.
type runner struct {
	unit         bool
	name         string
	uid          int
	gids         []int
	capabilities []string // of those in capabilityNumbers
	descriptors  int
}

var capabilityNumbers = map[string]int{
	"CAP_NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE,
	"CAP_NET_ADMIN":        unix.CAP_NET_ADMIN,
	"CAP_NET_RAW":          unix.CAP_NET_RAW,
	"CAP_PERFMON":          unix.CAP_PERFMON,
	"CAP_BPF":              unix.CAP_BPF,
}

func (r runner) has(capability string) bool { return slices.Contains(r.capabilities, capability) }

func (d *doctor) findRunner() runner {
	if d.unit.loaded() {
		return d.unitRunner()
	}
	r := runner{name: "this process"}
	for line := range strings.Lines(d.readText("/proc/self/status")) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		switch fields[0] {
		case "Uid:":
			r.uid, _ = strconv.Atoi(fields[2]) // the effective one
		case "Gid:", "Groups:":
			for _, f := range fields[1:] {
				gid, _ := strconv.Atoi(f)
				r.gids = append(r.gids, gid)
			}
		case "CapEff:":
			mask, _ := strconv.ParseUint(fields[1], 16, 64)
			for name, n := range capabilityNumbers {
				if mask&(1<<n) != 0 {
					r.capabilities = append(r.capabilities, name)
				}
			}
		}
	}
	for line := range strings.Lines(d.readText("/proc/self/limits")) {
		if rest, is := strings.CutPrefix(line, "Max open files"); is {
			r.descriptors = parseLimit(strings.Fields(rest)[0])
		}
	}
	return r
}

// parseLimit parses a limit of descriptors.
func parseLimit(s string) int {
	if n, err := strconv.Atoi(s); err == nil {
		return n
	}
	return 1 << 30 // "unlimited", "infinity"
}

func (d *doctor) unitRunner() runner {
	u := d.unit
	r := runner{unit: true, name: u["User"], descriptors: parseLimit(u["LimitNOFILE"])}
	bounds := strings.Fields(strings.ToUpper(u["CapabilityBoundingSet"]))
	ambient := strings.Fields(strings.ToUpper(u["AmbientCapabilities"]))
	if r.name == "" {
		r.name = "root"
	}
	groups := append(strings.Fields(u["SupplementaryGroups"]), u["Group"])
	for name := range maps.Keys(capabilityNumbers) {
		if slices.Contains(bounds, name) && (r.name == "root" || slices.Contains(ambient, name)) {
			r.capabilities = append(r.capabilities, name)
		}
	}
	uid, err := strconv.Atoi(r.name)
	if err != nil {
		uid = -1
	}
	r.uid = uid
	for line := range strings.Lines(d.readText("/etc/passwd")) {
		if f := strings.Split(strings.TrimSpace(line), ":"); len(f) > 3 && f[0] == r.name {
			r.uid, _ = strconv.Atoi(f[2])
			gid, _ := strconv.Atoi(f[3])
			r.gids = append(r.gids, gid)
		}
	}
	for line := range strings.Lines(d.readText("/etc/group")) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) > 3 && (slices.Contains(strings.Split(f[3], ","), r.name) || slices.Contains(groups, f[0])) {
			gid, _ := strconv.Atoi(f[2])
			r.gids = append(r.gids, gid)
		}
	}
	return r
}

// readObstacle returns the file or folder whose mode keeps the runner from reading p, or "".
func (d *doctor) readObstacle(p string) (obstacle string) {
	if d.runner.uid == 0 {
		return ""
	}
	const read, pass = 4, 1
	for dir := path.Dir(p); dir != "/"; dir = path.Dir(dir) {
		if !d.hasMode(dir, pass) {
			obstacle = dir // the outermost one is found last
		}
	}
	bits := fs.FileMode(read)
	if info, err := fs.Stat(d.files, fsPath(p)); err == nil && info.IsDir() {
		bits |= pass
	}
	if obstacle == "" && !d.hasMode(p, bits) {
		return p
	}
	return obstacle
}

// hasMode reports whether the mode of p grants the runner the permission bits. It returns true
// when the mode cannot be read.
func (d *doctor) hasMode(p string, bits fs.FileMode) bool {
	info, err := fs.Stat(d.files, fsPath(p))
	if err != nil {
		return true
	}
	mode := info.Mode().Perm()
	if owner, is := info.Sys().(*syscall.Stat_t); is {
		switch {
		case int(owner.Uid) == d.runner.uid:
			mode >>= 6
		case slices.Contains(d.runner.gids, int(owner.Gid)):
			mode >>= 3
		}
	}
	return mode&bits == bits
}
