package netns

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"shaperd.dev/shaperd/test/lab"
)

var figures = flag.Bool("figures", false, "take longer, at higher loads")

func TestMain(m *testing.M) {
	if os.Getenv(stallEnv) != "" {
		if err := watchStalls(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	flag.Parse()
	// Tests that measure how precisely something is limited run alone. After them come those that wait for events most of
	// the time, each in namespaces of its own.
	flag.Set("test.parallel", "4")
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
	return lab.Sweep()
}
