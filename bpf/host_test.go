package bpf

import (
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/leaky"
)

// TestTimeNamespace runs in time namespaces with CLOCK_MONOTONIC ahead of and behind the kernel's.
func TestTimeNamespace(t *testing.T) {
	const outside = "SHAPERD_TEST_TIME" // the clock outside the namespace, ns
	if text := os.Getenv(outside); text != "" {
		want, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		if ahead := time.Duration(int64(monotonic()/leaky.FromDuration(1)) - want); ahead < 0 || ahead > time.Minute {
			t.Errorf("monotonic is off by %v", ahead)
		}
		return
	}
	for _, offset := range []string{"100000", "-10"} { // s
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
			t.Fatal(err)
		}
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("unshare", "--time", "--monotonic="+offset, "--fork", self, "-test.run=^TestTimeNamespace$")
		cmd.Env = append(os.Environ(), outside+"="+strconv.FormatInt(now.Nano(), 10))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s s: %v\n%s", offset, err, out)
		}
	}
}

func TestParseTimeOffsets(t *testing.T) {
	for text, want := range map[string][2]int64{
		"": {}, "monotonic           0         0\nboottime            0         0\n": {},
		"monotonic       -1000         5\nboottime            7         0\n": {-1000e9 + 5, 7e9},
	} {
		if got := parseTimeOffsets(text); got["monotonic"] != want[0] || got["boottime"] != want[1] {
			t.Errorf("%q: %v, want %d", text, got, want)
		}
	}
}

func TestExplainAlignment(t *testing.T) {
	odd := errors.New("program shaperd_tc: load program: invalid argument")
	if err := explainAlignment(odd); err.Error() != odd.Error() {
		t.Error(err)
	}
	misaligned := errors.New("program shaperd_tc: load program: permission denied: misaligned packet access off 2+0+0+0 size 8")
	if err := explainAlignment(misaligned); !errors.Is(err, misaligned) || !strings.Contains(err.Error(), "unaligned access") {
		t.Error(err)
	}
	if err := explainAlignment(nil); err != nil {
		t.Error(err)
	}
}

func TestExplainOldKernel(t *testing.T) {
	odd := errors.New("program shaperd_tc: load program: invalid argument")
	for release, old := range map[string]bool{"5.15.0-generic": true, "6.0.19": true, "6.1.0-56-cloud-amd64": false, "7.0.1": false} {
		err := explainOldRelease(release, odd)
		if said := strings.Contains(err.Error(), "needs Linux 6.1 or later, and this is "+release); said != old || !errors.Is(err, odd) {
			t.Errorf("%s: %v", release, err)
		}
	}
	if err := explainOldRelease("5.15.0", nil); err != nil {
		t.Error(err)
	}
}
