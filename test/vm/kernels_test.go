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
	"slices"
	"testing"
	"time"
)

var (
	runFlag     = flag.String("vm.run", "", "run only the tests inside the guests that match `regexp`, as in -test.run")
	allFlag     = flag.Bool("vm.all", false, "run all tests in each kernel")
	timeoutFlag = flag.Duration("vm.timeout", 12*time.Minute, "end a guest that runs for longer than `d`")
)

// suites returns the packages whose tests run in a kernel. Tests that depend on the age of
// the kernel run in the oldest one; the others behave like the host's.
func suites(kernel string) []suite {
	run := "TestParity|TestVerifierBudget|TestEscape|TestVM"
	if kernel == kernels[0] {
		run += "|TestCapabilities|TestRST"
	}
	return []suite{
		{pkg: "test/vm/guest"},
		{pkg: "bpf", run: run, args: []string{"-policies=4", "-packets=500", "-escape.time=2s"}},
		{pkg: "conn", run: "TestParking|TestVM"}, // epoll instances in others
		{pkg: "test/netns", run: "TestVM"},
		{pkg: "test/from", run: "TestFromTC", files: []string{"docs/from/tc.md"}}, // they have sch_fq
	}
}

// part returns what runs in a kernel without -vm.all: the tests of the packet plane that depend on the kernel in the oldest one, and the
// others in the newer ones, which verify its programs too. They take about as long.
func part(kernel string, all []suite) (list []suite) {
	for _, s := range all {
		oldest := kernel == kernels[0]
		switch {
		case s.pkg == "bpf" && oldest:
			s.run = "TestVM|TestVerifierBudget|TestCapabilities|TestRST"
		case s.pkg == "bpf":
			s.run = "TestParity|TestEscape|TestVerifierBudget"
		case oldest:
			continue
		}
		list = append(list, s)
	}
	return list
}

// kernels are the series that fetch.sh downloads, oldest first.
var kernels = []string{"6.1", "6.12"}

// TestKernels boots the kernels in parallel: each takes one processor.
func TestKernels(t *testing.T) {
	binaries := t.TempDir()
	began := time.Now()
	if err := build(t.Context(), "amd64", binaries, suites(kernels[0])); err != nil {
		t.Fatal(err)
	}
	t.Logf("compiled the tests in %.1f s", time.Since(began).Seconds())
	for _, kernel := range kernels {
		list := suites(kernel)
		if *runFlag == "" && !*allFlag {
			list = part(kernel, list)
		}
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
	dir := installed(t, kernel, "make vm-kernels")
	began := time.Now()
	// A hanging test times out before the guest does, and prints its stacks.
	image, err := makeImage(dir, binaries, list, "-test.shuffle=on", fmt.Sprint("-test.timeout=", *timeoutFlag*3/4))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := guestContext(t)
	defer cancel()
	temp := t.TempDir()
	m := machine{kernel: filepath.Join(dir, "vmlinuz"), initrd: filepath.Join(temp, "image"), options: slices.Concat(options, []string{"console=ttyS0"})}
	if err := os.WriteFile(m.initrd, image, 0o600); err != nil {
		t.Fatal(err)
	}
	output, console, cpu, err := boot(ctx, temp, m)
	took := time.Since(began)
	if err != nil {
		t.Error(err)
	}

	guest := parseTranscript(output)
	if guest.release != "" {
		t.Logf("Linux %s: image of %.1f MB, booted in %s s, total %.1f s, CPU time %.1f s",
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

// installed returns the directory of a kernel or a release, which the command makes.
func installed(t *testing.T, name, command string) string {
	t.Helper()
	dir, err := filepath.Abs(filepath.Join(repoRoot, "build/vm", name))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("%v: run %q to fetch it", err, command)
	}
	return dir
}

// guestContext returns the context of a guest. It expires early enough for t to report it.
func guestContext(t *testing.T) (context.Context, context.CancelFunc) {
	limit := *timeoutFlag
	if end, ok := t.Deadline(); ok {
		limit = min(limit, time.Until(end)-10*time.Second)
	}
	return context.WithTimeoutCause(t.Context(), limit, fmt.Errorf("still running after %v", limit.Round(time.Second)))
}
