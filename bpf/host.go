package bpf

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/leaky"
)

// monotonic returns the programs' time, which ignores time namespaces.
func monotonic() leaky.Time {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // cannot fail
	return leaky.Time(ts.Nano()-timeOffsets()["monotonic"]) * leaky.Nanosecond
}

// boottime returns the current time of CLOCK_BOOTTIME, as the programs read it: see share.h.
func boottime() leaky.Time {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) // cannot fail
	return leaky.Time(ts.Nano()-timeOffsets()["boottime"]) * leaky.Nanosecond
}

// timeOffsets are the offsets of clocks in the time namespace of this process, in ns
// (time_namespaces(7)).
var timeOffsets = sync.OnceValue(func() map[string]int64 {
	text, err := os.ReadFile("/proc/self/timens_offsets")
	if err != nil {
		return nil // a kernel without time namespaces
	}
	return parseTimeOffsets(string(text))
})

func parseTimeOffsets(text string) map[string]int64 {
	offsets := map[string]int64{}
	for line := range strings.Lines(text) {
		var clock string
		var seconds, nanos int64
		if n, _ := fmt.Sscan(line, &clock, &seconds, &nanos); n == 3 {
			offsets[clock] = seconds*1e9 + nanos
		}
	}
	return offsets
}

// kernelRelease is the release of the running kernel.
var kernelRelease = sync.OnceValue(func() string {
	var u unix.Utsname
	_ = unix.Uname(&u) // cannot fail
	return unix.ByteSliceToString(u.Release[:])
})

// kernelBefore reports whether the kernel is older than a version.
func kernelBefore(major, minor int) bool { return versionBefore(kernelRelease(), major, minor) }

func versionBefore(release string, major, minor int) bool {
	var is, isMinor int
	_, _ = fmt.Sscanf(release, "%d.%d", &is, &isMinor)
	return is < major || is == major && isMinor < minor
}

// explainAlignment adds to an error of the verifier that the processor is the reason: kernels for some, such as
// riscv64, let no program read a word across its natural alignment.
func explainAlignment(err error) error {
	if err == nil || !strings.Contains(err.Error(), "misaligned packet access") {
		return err
	}
	return fmt.Errorf("the packet plane needs a kernel with efficient unaligned access, and this one, for %s, has none: use a [[listen]] instead (%w)", runtime.GOARCH, err)
}

// explainOldKernel adds to an error that the kernel is too old for the programs, if it is.
func explainOldKernel(err error) error { return explainOldRelease(kernelRelease(), err) }

func explainOldRelease(release string, err error) error {
	if err == nil || !versionBefore(release, 6, 1) {
		return err
	}
	return fmt.Errorf("the packet plane needs Linux 6.1 or later, and this is %s: boot a newer kernel, or use a [[listen]] instead (%w)", release, err)
}
