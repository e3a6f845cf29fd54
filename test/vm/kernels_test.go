package vm

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"
)

var (
	runFlag     = flag.String("vm.run", "", "run only the tests inside the guests that match `regexp`, as in -test.run")
	timeoutFlag = flag.Duration("vm.timeout", 8*time.Minute, "end a guest that runs for longer than `d`")
)

// suites are the packages whose tests run in a kernel. What hangs on the age of the kernel
// runs in the oldest one: the others have it in common with the host's.
func suites(kernel string) []suite {
	run := "TestParity|TestVerified|TestEscape|TestVM"
	if kernel == kernels[0] {
		run += "|TestPrivileges|TestReset"
	}
	return []suite{
		{pkg: "test/vm/guest"},
		{pkg: "bpf", run: run, args: []string{"-policies=4", "-packets=500", "-escape.time=4s"}},
		{pkg: "test/netns", run: "TestVM"},
	}
}

// kernels are those of fetch.sh.
var kernels = []string{"6.1", "6.12"}

// TestKernels boots the kernels at once: each takes one processor.
func TestKernels(t *testing.T) {
	binaries := t.TempDir()
	began := time.Now()
	if err := build(t.Context(), binaries, suites(kernels[0])); err != nil {
		t.Fatal(err)
	}
	t.Logf("compiled the tests in %.1f s", time.Since(began).Seconds())
	for _, kernel := range kernels {
		list := suites(kernel)
		if *runFlag != "" {
			for i := range list {
				list[i].run = *runFlag
			}
		}
		t.Run(kernel, func(t *testing.T) {
			t.Parallel()
			testKernel(t, kernel, binaries, list)
		})
	}
}

func testKernel(t *testing.T, kernel, binaries string, list []suite) {
	dir := filepath.Join(top, "build/vm", kernel)
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("%v: \"make vm-kernels\" fetches it", err)
	}
	began := time.Now()
	// A test that hangs ends before the guest does, and says where it was.
	image, err := makeImage(dir, binaries, list, "-test.shuffle=on", fmt.Sprint("-test.timeout=", *timeoutFlag*3/4))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := limited(t)
	defer cancel()
	output, console, cpu, err := boot(ctx, t.TempDir(), filepath.Join(dir, "vmlinuz"), image)
	took := time.Since(began)
	if err != nil {
		t.Error(err)
	}

	guest := read(output)
	if guest.release != "" {
		t.Logf("Linux %s: an image of %.1f MB, booted in %s s, all in %.1f s with %.1f s of a processor",
			guest.release, float64(len(image))/1e6, guest.uptime, took.Seconds(), cpu.Seconds())
	}
	ran := 0
	for _, s := range list {
		t.Run(s.name(), func(t *testing.T) {
			n := guest.suites[s.name()].replay(t)
			if n == 0 && *runFlag == "" {
				t.Error("no tests ran")
			}
			ran += n
		})
	}
	if ran == 0 {
		t.Error("no tests ran")
	}
	if t.Failed() {
		if _, since, ok := bytes.Cut(console, []byte("Run /init as init process")); ok {
			console = since
		}
		t.Logf("last lines of the console:\n%s", lastLines(console, 50))
	}
}

// limited is the context of a guest. It ends early enough for t to tell about it.
func limited(t *testing.T) (context.Context, context.CancelFunc) {
	limit := *timeoutFlag
	if end, ok := t.Deadline(); ok {
		limit = min(limit, time.Until(end)-10*time.Second)
	}
	return context.WithTimeoutCause(t.Context(), limit, fmt.Errorf("it had not ended after %v", limit.Round(time.Second)))
}
