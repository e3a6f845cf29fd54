package systemd

import (
	"maps"
	"slices"
	"strings"
	"testing"
)

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
