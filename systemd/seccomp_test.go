package systemd

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

var auditArch = map[string]uint32{
	"amd64": unix.AUDIT_ARCH_X86_64,
	"arm64": unix.AUDIT_ARCH_AARCH64,
}

var families = map[string]uint32{
	"AF_INET":    unix.AF_INET,
	"AF_INET6":   unix.AF_INET6,
	"AF_NETLINK": unix.AF_NETLINK,
	"AF_UNIX":    unix.AF_UNIX,
}

// syscallGroups returns the groups of system calls that a unit may name.
func syscallGroups(t testing.TB) map[string][]string {
	t.Helper()
	stdout, _ := run(t, "systemd-analyze", "syscall-filter", "--no-pager")
	groups := map[string][]string{}
	group := ""
	for line := range strings.Lines(stdout) {
		name := strings.TrimSpace(line)
		switch {
		case name == "" || name[0] == '#':
		case line[0] == '@':
			group = name
		default:
			groups[group] = append(groups[group], name)
		}
	}
	return groups
}

// allowed returns the system calls that the unit allows: those of @default, as the lines of
// SystemCallFilter add to them and, with "~", remove from them, in order.
func (u unit) allowed(t testing.TB) []string {
	t.Helper()
	groups := syscallGroups(t)
	var expand func(name string) []string
	expand = func(name string) []string {
		if name[0] != '@' {
			return []string{name}
		}
		members, ok := groups[name]
		if !ok {
			t.Fatalf("%s: SystemCallFilter has %s, which is not a group", unitFile, name)
		}
		var all []string
		for _, m := range members {
			all = append(all, expand(m)...)
		}
		return all
	}
	set := map[string]bool{}
	for _, line := range slices.Insert(slices.Clone(u["Service"]["SystemCallFilter"]), 0, "@default") {
		names, remove := strings.CutPrefix(line, "~")
		for group := range strings.FieldsSeq(names) {
			for _, name := range expand(group) {
				set[name] = !remove
			}
		}
	}
	maps.DeleteFunc(set, func(_ string, in bool) bool { return !in })
	return slices.Sorted(maps.Keys(set))
}

// syscallNumbers reads the constants of golang.org/x/sys/unix.
func syscallNumbers(t testing.TB) map[string]uint32 {
	t.Helper()
	dir, _ := run(t, "go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys")
	path := filepath.Join(strings.TrimSpace(dir), "unix", "zsysnum_linux_"+runtime.GOARCH+".go")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	numbers := map[string]uint32{}
	for _, m := range regexp.MustCompile(`\bSYS_(\w+)\s*=\s*(\d+)`).FindAllStringSubmatch(string(text), -1) {
		n, err := strconv.ParseUint(m[2], 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		numbers[strings.ToLower(m[1])] = uint32(n)
	}
	return numbers
}

// Offsets in struct seccomp_data; for arguments, that of the low word on a little-endian
// machine.
const (
	offNumber = 0
	offArch   = 4
	offArg0   = 16
	offArg2   = 32
)

// The flags of clone that create a namespace.
const namespaces = unix.CLONE_NEWCGROUP | unix.CLONE_NEWIPC | unix.CLONE_NEWNET | unix.CLONE_NEWNS |
	unix.CLONE_NEWPID | unix.CLONE_NEWUSER | unix.CLONE_NEWUTS

// seccomp returns a filter equivalent to the SystemCallFilter, SystemCallArchitectures,
// RestrictAddressFamilies, MemoryDenyWriteExecute and RestrictNamespaces of the unit, with one
// difference: a call that is not allowed raises SIGSYS, which ends even a program that would
// tolerate an error, and makes a Go program print where it made the call.
func (u unit) seccomp(t testing.TB) []unix.SockFilter {
	t.Helper()
	arch, ok := auditArch[runtime.GOARCH]
	if !ok {
		t.Fatalf("unsupported architecture %s", runtime.GOARCH)
	}
	for _, want := range [][2]string{
		{"SystemCallArchitectures", "native"},
		{"MemoryDenyWriteExecute", "true"},
		{"RestrictNamespaces", "true"},
	} {
		if got := u.service(t, want[0]); got != want[1] {
			t.Fatalf("unsupported setting %s=%s", want[0], got)
		}
	}
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	equal := func(k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: yes, Jf: no, K: k}
	}
	and := func(k uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: k}
	}
	allow := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW}
	deny := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_TRAP}

	program := []unix.SockFilter{load(offArch), equal(arch, 1, 0), deny}
	// Rules that inspect an argument end in a verdict. "only" restricts them to one system
	// call.
	only := func(number uint32, rule ...unix.SockFilter) {
		program = append(program, load(offNumber), equal(number, 0, uint8(len(rule))))
		program = append(program, rule...)
	}
	rule := []unix.SockFilter{load(offArg0)}
	for name := range strings.FieldsSeq(u.service(t, "RestrictAddressFamilies")) {
		family, ok := families[name]
		if !ok {
			t.Fatalf("unsupported address family %s", name)
		}
		rule = append(rule, equal(family, 0, 1), allow)
	}
	only(unix.SYS_SOCKET, append(rule, deny)...)
	const writeExec = unix.PROT_WRITE | unix.PROT_EXEC
	only(unix.SYS_MMAP, load(offArg2), and(writeExec), equal(writeExec, 0, 1), deny, allow)
	only(unix.SYS_MPROTECT, load(offArg2), and(unix.PROT_EXEC), equal(0, 1, 0), deny, allow)

	// clone3 has its flags in memory, which a filter cannot read. C libraries fall back to
	// clone when the kernel lacks clone3.
	absent := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)}
	only(unix.SYS_CLONE3, absent)
	only(unix.SYS_CLONE, load(offArg0), and(namespaces), equal(0, 1, 0), deny, allow)

	numbers := syscallNumbers(t)
	program = append(program, load(offNumber))
	for _, name := range u.allowed(t) {
		if n, ok := numbers[name]; ok { // others belong to other architectures
			program = append(program, equal(n, 0, 1), allow)
		}
	}
	return append(program, deny)
}

// TestUnit_SystemCallFilter checks that no line of SystemCallFilter undoes another.
func TestUnit_SystemCallFilter(t *testing.T) {
	needed := []string{"epoll_pwait2", "recvmmsg", "sendmsg", "clock_nanosleep", "prctl", "execve", "prlimit64", "pipe2", "splice", "accept4"}
	never := []string{"setuid", "ptrace", "mount", "setrlimit", "io_uring_setup", "process_vm_writev", "chown", "perf_event_open"}
	for _, tt := range []struct {
		name       string
		files      []string
		yes, never []string
	}{
		{"alone", []string{unitFile}, needed, append(never, "bpf")},
		{"with the drop-in", []string{unitFile, dropIn}, append(needed, "bpf"), never},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := readUnit(t, tt.files...).allowed(t)
			for _, name := range tt.yes {
				if !slices.Contains(got, name) {
					t.Errorf("%s is not allowed", name)
				}
			}
			for _, name := range tt.never {
				if slices.Contains(got, name) {
					t.Errorf("%s is allowed", name)
				}
			}
			t.Logf("%d system calls are allowed", len(got))
		})
	}
}
