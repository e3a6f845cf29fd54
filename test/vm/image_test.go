package vm

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
)

// top is the top of the repository.
const top = "../.."

//go:embed init.sh
var firstProcess []byte

// tools are the host's programs that a guest has.
var tools = []string{"busybox", "ip", "iperf3", "nft", "tc"}

// A suite is the tests of one package that run inside the guests.
type suite struct {
	pkg  string   // a directory, relative to the top of the repository
	run  string   // the names of its tests, as in -test.run; all when empty
	args []string // more flags
}

// name is what the suite is called in the guest, and in the names of tests.
func (s suite) name() string { return path.Base(s.pkg) }

// build compiles the suites' tests into dir. Static binaries run in a guest, that
// has none of Go and few libraries.
func build(ctx context.Context, dir string, suites []suite) error {
	args := []string{"test", "-c", "-tags", "vmguest", "-trimpath", "-ldflags", "-s -w", "-o", dir + "/"}
	for _, s := range suites {
		args = append(args, "./"+s.pkg)
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = top
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("compile the guest's tests: %w\n%s", err, out)
	}
	return nil
}

// makeImage returns what a guest boots from: its first process, tools, the daemon, the
// modules of the kernel at dir, and the suites, whose tests are compiled in binaries.
// Each suite gets flags behind its own.
func makeImage(dir, binaries string, suites []suite, flags ...string) ([]byte, error) {
	var a archive
	a.add("/init", 0o755, firstProcess)
	a.symlink("/bin/sh", "busybox")
	for _, name := range tools {
		if err := a.addTool(name); err != nil {
			return nil, fmt.Errorf("%w: \"make deps\" installs what is missing", err)
		}
	}
	if err := a.copy("/bin/shaperd", daemonPath()); err != nil {
		return nil, fmt.Errorf("%w: \"make build\" builds it", err)
	}
	if err := a.addModules(filepath.Join(dir, "modules")); err != nil {
		return nil, err
	}
	var order []string
	for _, s := range suites {
		if err := a.addSuite(s, binaries, flags); err != nil {
			return nil, err
		}
		order = append(order, s.name())
	}
	a.add("/suites/order", 0o644, lines(order))
	return a.end(), nil
}

// daemonPath returns the path of the daemon under test.
func daemonPath() string {
	return cmp.Or(os.Getenv("SHAPERD_BIN"), filepath.Join(top, "bin/shaperd"))
}

func (a *archive) addModules(dir string) error {
	files, err := loadOrder(dir, modules)
	if err != nil {
		return err
	}
	var order []string
	for _, file := range files {
		to := path.Join("/modules", path.Base(file))
		if err := a.copy(to, filepath.Join(dir, file)); err != nil {
			return err
		}
		order = append(order, to)
	}
	a.add("/modules/order", 0o644, lines(order))
	return nil
}

// addSuite puts a test binary where it finds its package's testdata.
func (a *archive) addSuite(s suite, binaries string, flags []string) error {
	at := path.Join("/suites", s.name())
	if err := a.copy(at+"/test", filepath.Join(binaries, s.name()+".test")); err != nil {
		return err
	}
	args := append([]string{"-test.v=test2json", "-test.run=" + s.run}, s.args...)
	a.add(at+"/args", 0o644, lines(append(args, flags...)))

	from := filepath.Join(top, s.pkg)
	err := filepath.WalkDir(filepath.Join(from, "testdata"), func(file string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		rel, err := filepath.Rel(from, file)
		if err != nil {
			return err
		}
		return a.copy(path.Join(at, filepath.ToSlash(rel)), file)
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// addTool copies a program and the libraries it loads, which stay where they were.
func (a *archive) addTool(name string) error {
	file, err := exec.LookPath(name)
	if err != nil {
		return err
	}
	if err := a.copy(path.Join("/bin", name), file); err != nil {
		return err
	}
	libraries, err := librariesOf(file)
	if err != nil {
		return err
	}
	for _, library := range libraries {
		if a.has[library] {
			continue
		}
		if err := a.copy(library, library); err != nil {
			return err
		}
	}
	return nil
}

// librariesOf asks the loader of programs, as only it knows where it looks.
func librariesOf(file string) ([]string, error) {
	cmd := exec.Command("ldd", file)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	out, err := cmd.CombinedOutput()
	if strings.Contains(string(out), "not a dynamic executable") {
		return nil, nil
	}
	if err != nil || strings.Contains(string(out), "not found") {
		return nil, fmt.Errorf("ldd %s: %v: %s", file, err, out)
	}
	var list []string
	for _, field := range strings.Fields(string(out)) {
		if strings.HasPrefix(field, "/") {
			list = append(list, field)
		}
	}
	return list, nil
}

func (a *archive) copy(to, from string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	a.add(to, 0o755, data)
	return nil
}

func lines(list []string) []byte { return []byte(strings.Join(list, "\n") + "\n") }
