package netns

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netns"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

var figures = flag.Bool("figures", false, "run the long measurements and print their figures")

// prefix begins the name of every namespace, followed by the process that made it.
const prefix = "shaperd-"

// home is the namespace that the test was started in.
var home netns.NsHandle

func TestMain(m *testing.M) {
	if os.Getenv(stallEnv) != "" {
		if err := watchStalls(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	flag.Parse()
	if err := prepare(); err != nil {
		fmt.Fprintf(os.Stderr, "test/netns: %v\n", err)
		os.Exit(1)
	}
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func prepare() error {
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root: run these tests as root")
	}
	var err error
	if home, err = netns.Get(); err != nil {
		return fmt.Errorf("open own namespace: %w", err)
	}
	return errors.Join(sweep("/run/netns"), sweepPins())
}

// sweep removes the namespaces that crashed runs left behind. Their daemons are
// gone already: they die with the process that started them.
func sweep(dir string) error {
	names, err := filepath.Glob(filepath.Join(dir, prefix+"*"))
	if err != nil {
		return err
	}
	for _, path := range names {
		pid, ok := owner(filepath.Base(path))
		if !ok || unix.Kill(pid, 0) != unix.ESRCH {
			continue
		}
		if err := netns.DeleteNamed(filepath.Base(path)); err != nil {
			return fmt.Errorf("remove leftover namespace %s: %w", path, err)
		}
	}
	return nil
}

// owner returns the process that made the namespace called name.
func owner(name string) (pid int, ok bool) {
	rest, ok := strings.CutPrefix(name, prefix)
	if !ok {
		return 0, false
	}
	digits, _, ok := strings.Cut(rest, "-")
	if !ok {
		return 0, false
	}
	pid, err := strconv.Atoi(digits)
	return pid, err == nil && pid > 0
}
