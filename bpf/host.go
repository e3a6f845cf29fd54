package bpf

import (
	"fmt"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"shaperd/leaky"
)

// monotonic returns the time as the programs have it, which know of no time namespace.
func monotonic() leaky.Time {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // cannot fail
	return leaky.Time(ts.Nano()-timeOffset()) * leaky.FromDuration(1)
}

// timeOffset is by how much CLOCK_MONOTONIC is ahead in the time namespace of this process,
// ns (time_namespaces(7)).
var timeOffset = sync.OnceValue(func() int64 {
	text, err := os.ReadFile("/proc/self/timens_offsets")
	if err != nil {
		return 0 // a kernel without them
	}
	return offsetOf(string(text))
})

func offsetOf(text string) int64 {
	for line := range strings.Lines(text) {
		var clock string
		var seconds, nanos int64
		if n, _ := fmt.Sscan(line, &clock, &seconds, &nanos); n == 3 && clock == "monotonic" {
			return seconds*1e9 + nanos
		}
	}
	return 0
}

// release is the version of the kernel, as it calls itself.
var release = sync.OnceValue(func() string {
	var u unix.Utsname
	_ = unix.Uname(&u) // cannot fail
	return unix.ByteSliceToString(u.Release[:])
})

// kernelBefore reports whether the kernel is older than a version.
func kernelBefore(major, minor int) bool { return before(release(), major, minor) }

func before(release string, major, minor int) bool {
	var is, isMinor int
	_, _ = fmt.Sscanf(release, "%d.%d", &is, &isMinor)
	return is < major || is == major && isMinor < minor
}

// tooOld says of an error that the kernel is older than the programs need, if it is.
func tooOld(err error) error { return tooOldFor(release(), err) }

func tooOldFor(release string, err error) error {
	if err == nil || !before(release, 6, 1) {
		return err
	}
	return fmt.Errorf("the packet plane needs Linux 6.1 or later, and this is %s: boot a newer kernel, or put a [[listen]] in the way instead (%w)", release, err)
}
