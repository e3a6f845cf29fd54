package shaper

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// MaxCgroups is the maximum number of different control groups that the limits of a policy match.
const MaxCgroups = 16

// maxCgroupPath bounds the path of a control group, in bytes.
const maxCgroupPath = 1024

// ParseCgroup checks the path of a control group below the root of the hierarchy, version 2, as in /proc/PID/cgroup:
// "/system.slice/nginx.service". The root itself is "/".
func ParseCgroup(s string) (string, error) {
	if !validCgroup(s) {
		return "", fmt.Errorf("%q is not the path of a control group as in /proc/PID/cgroup, such as \"/system.slice/nginx.service\"", s)
	}
	return s, nil
}

func validCgroup(s string) bool {
	return strings.HasPrefix(s, "/") && path.Clean(s) == s && len(s) <= maxCgroupPath && !strings.ContainsRune(s, 0)
}

// inCgroup reports whether the processes of a control group are in group, or in one below it. None are in "".
func inCgroup(group, process string) bool {
	return process != "" && (group == "/" || group == process || strings.HasPrefix(process, group+"/"))
}

// Cgroups returns the control groups that the limits of p match, sorted.
func (p *Policy) Cgroups() []string { return cgroupsOf(p.limits) }

func cgroupsOf(limits []Limit) (all []string) {
	for i := range limits {
		all = append(all, limits[i].Match.Cgroup...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// CgroupSet returns the limits that match processes in any control group, and of them those that match group.
func (p *Policy) CgroupSet(group string) (all, matched Set) {
	for i := range p.withCgroup.All {
		if slices.Contains(p.limits[i].Match.Cgroup, group) {
			matched |= 1 << i
		}
	}
	return p.withCgroup, matched
}

// matchCgroup returns the limits of set that match the processes of a control group.
func (p *Policy) matchCgroup(set Set, process string) Set {
	for i := range (set & p.withCgroup).All {
		if !slices.ContainsFunc(p.limits[i].Match.Cgroup, func(group string) bool { return inCgroup(group, process) }) {
			set &^= 1 << i
		}
	}
	return set
}
