// Owner: Plane.mu.

package bpf

import (
	"bufio"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// cgroupID identifies a control group for as long as the host runs: one that is created again has another.
type cgroupID uint64

// followCgroups looks up the control groups of a policy, and enters those into the programs' map that are new or were created
// again. The error names those that do not exist: no packet matches them. Others are removed by their next use.
func (k *kernel) followCgroups(n numbers) error {
	if len(n.cgroups) == 0 {
		return nil
	}
	root, err := cgroupRoot()
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range slices.Sorted(maps.Keys(n.cgroups)) {
		errs = append(errs, k.followCgroup(n.cgroups[path], filepath.Join(root, path)))
	}
	return errors.Join(errs...)
}

func (k *kernel) followCgroup(number uint32, path string) error {
	dir, err := os.Open(path)
	if err == nil {
		defer dir.Close()
		var st unix.Stat_t
		if err = unix.Fstat(int(dir.Fd()), &st); err == nil {
			id := cgroupID(st.Ino)
			if k.cgroups[number] == id {
				return nil
			}
			if err = k.kernelMaps.Cgroups.Put(number, uint32(dir.Fd())); err == nil {
				k.cgroups[number] = id
				return nil
			}
		}
	}
	delete(k.cgroups, number)
	if gone := k.kernelMaps.Cgroups.Delete(number); gone != nil && !errors.Is(gone, ebpf.ErrKeyNotExist) {
		err = errors.Join(err, gone)
	}
	return fmt.Errorf("no packet matches control group: %w", err)
}

// cgroupRoot returns where the hierarchy of control groups, version 2, is mounted.
func cgroupRoot() (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	defer f.Close()
	for in := bufio.NewScanner(f); in.Scan(); {
		mount, kind, _ := strings.Cut(in.Text(), " - ")
		if fields := strings.Fields(mount); len(fields) > 4 && fields[3] == "/" && strings.HasPrefix(kind, "cgroup2 ") {
			return fields[4], nil
		}
	}
	return "", errors.New("no packet matches a control group: no hierarchy of version 2 is mounted")
}
