package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
)

// testCgroup makes a control group and returns its path. Where no hierarchy is mounted, as in a virtual machine, it mounts one.
func testCgroup(t *testing.T) string {
	t.Helper()
	root, err := cgroupRoot()
	if err != nil {
		root = t.TempDir()
		if err := unix.Mount("none", root, "cgroup2", 0, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(root, 0) })
	}
	path := fmt.Sprintf("/shaperd-test-%d", os.Getpid())
	makeCgroup(t, path)
	return path
}

func makeCgroup(t *testing.T, path string) {
	t.Helper()
	root, err := cgroupRoot()
	if err == nil {
		err = os.Mkdir(root+path, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { removeCgroup(t, path) })
}

func removeCgroup(t *testing.T, path string) {
	root, err := cgroupRoot()
	if err == nil {
		err = os.Remove(root + path)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// enter moves this process into a control group.
func enter(t *testing.T, path string) {
	t.Helper()
	root, err := cgroupRoot()
	if err == nil {
		err = os.WriteFile(filepath.Join(root, path, "cgroup.procs"), fmt.Append(nil, os.Getpid()), 0)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func currentCgroup(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	_, path, _ := strings.Cut(string(text), "0::")
	path, _, _ = strings.Cut(path, "\n")
	return path
}

// TestCgroup sends packets from sockets of this process, which moves between control groups.
func TestCgroup(t *testing.T) {
	group := testCgroup(t)
	inner, other := group+"/inner", group+"-other"
	makeCgroup(t, inner)
	home := currentCgroup(t)
	t.Cleanup(func() { enter(t, home) }) // before the groups are removed
	b := newBench(t, kernelConfig{AttachId: 3, Mode: programModes[shaper.AttachPolice], Ethernet: 1, Keep: 1, Egress: 1})
	limits := attachHere(
		shaper.Limit{Name: "block", Block: true, Match: shaper.Match{Cgroup: []string{group, "/shaperd-test-none"}}},
		shaper.Limit{Name: "other", Block: true, Match: shaper.Match{Cgroup: []string{other}}},
	)
	p, err := shaper.New(10).Compile(limits, nil, []shaper.Attachment{{Name: "here"}}, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	n := numbers{limits: map[string]uint32{"block": 1, "other": 2}, attachments: map[string]uint32{"here": 3}, cgroups: map[string]uint32{}}
	b.registry.assignCgroups(p, n)
	if len(n.cgroups) != 3 {
		t.Fatalf("numbers of control groups: %v", n.cgroups)
	}
	follow := func(missing ...string) {
		t.Helper()
		err := b.followCgroups(n)
		for _, path := range missing {
			if err == nil || !strings.Contains(err.Error(), path) {
				t.Errorf("%v: %s is not missing", err, path)
			}
		}
		if lines := strings.Count(fmt.Sprint(err), "no packet matches"); lines != len(missing) {
			t.Errorf("%v: want %d missing", err, len(missing))
		}
	}
	follow("/shaperd-test-none", other)
	if err := b.swap(newImage(p, n, b.kernel.Hashes, b.kernel.Buckets.MaxEntries()), nil, nil, nil); err != nil {
		t.Fatal(err)
	}
	sends := func(from string, want bool) {
		t.Helper()
		enter(t, from)
		action, err := b.ShaperdTc.Run(&ebpf.RunOptions{Data: datagram(1), DataOut: make([]byte, 512)})
		if err != nil {
			t.Fatal(err)
		}
		if passes := action != tcDrop; passes != want {
			t.Errorf("a packet from %s passes: %v", from, passes)
		}
		matched := p.Route(&shaper.Flow{Origin: p.AttachmentIndex("here"), Cgroup: from}).ToDownstream
		if passes := matched == 0; passes != want {
			t.Errorf("package shaper: a packet from %s passes: %v", from, passes)
		}
	}
	sends(home, true)
	sends(group, false)
	sends(inner, false)
	sends(home, true)

	makeCgroup(t, other)
	follow("/shaperd-test-none")
	sends(other, false)
	sends(home, true)
	// One that is created again is another one.
	removeCgroup(t, other)
	follow("/shaperd-test-none", other)
	makeCgroup(t, other)
	follow("/shaperd-test-none")
	sends(other, false)
	sends(home, true)
}

// TestAssignCgroups changes policies: no control group of the next one has the number of one of the current policy.
func TestAssignCgroups(t *testing.T) {
	r := &registry{Limits: map[string]*knownLimit{}, Attachments: map[string]uint32{}}
	for round := range 20 {
		var groups []string
		for i := range shaper.MaxCgroups {
			groups = append(groups, fmt.Sprintf("/g%d", round*shaper.MaxCgroups/3+i))
		}
		limit := attachHere(shaper.Limit{Name: "l", Rate: 8, Match: shaper.Match{Cgroup: groups}})
		p, err := shaper.New(10).Compile(limit, nil, []shaper.Attachment{{Name: "here"}}, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		n, err := r.assignNumbers(p, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		owners := map[uint32]string{}
		for path, number := range n.cgroups {
			if owners[number] != "" || number >= maxCgroups {
				t.Fatalf("%s and %s have the number %d", owners[number], path, number)
			}
			owners[number] = path
		}
		for path, number := range r.Cgroups {
			if owners[number] != "" && owners[number] != path {
				t.Fatalf("round %d: %s has the number of %s, which the current policy has", round, owners[number], path)
			}
			if kept, ok := n.cgroups[path]; ok && kept != number {
				t.Fatalf("round %d: %s changes its number", round, path)
			}
		}
		r.recordPolicy(n, p)
	}
}
