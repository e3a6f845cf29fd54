package bpf

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// pins is a bpf file system that the tests mount.
const pins = "/sys/fs/bpf"

// TestMain runs the tests in new namespaces: interfaces and mounts disappear with them,
// even after a crash.
func TestMain(m *testing.M) {
	flag.Parse()
	const inside = "SHAPERD_TEST_INSIDE"
	if os.Getenv(inside) == "" {
		cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
		cmd.Env = append(os.Environ(), inside+"=1")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
		err := cmd.Run()
		var exit *exec.ExitError
		switch {
		case errors.As(err, &exit):
			os.Exit(exit.ExitCode())
		case err != nil:
			fmt.Fprintln(os.Stderr, "the tests need root:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	err := errors.Join(
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount("bpf", pins, "bpf", 0, ""),
	)
	if err != nil {
		fmt.Fprintln(os.Stderr, "mount:", err)
		os.Exit(1)
	}
	if flag.Lookup("test.bench").Value.String() == "" {
		connectionEntries = 1 << 15
	}
	runtime.LockOSThread() // tests change namespaces and capabilities of threads, but not of this one, which /proc/self shows
	os.Exit(m.Run())
}
