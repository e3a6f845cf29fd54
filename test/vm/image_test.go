package vm

import (
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

	"shaperd.dev/shaperd/test/lab"
)

// repoRoot is the root of the repository.
const repoRoot = "../.."

//go:embed init.sh
var firstProcess []byte

// tools are the host's programs that are copied to the guest.
var tools = []string{"busybox", "ip", "iperf3", "nft", "tc"}

// A suite is the tests of one package that run inside the guests.
type suite struct {
	pkg   string   // a directory, relative to the root of the repository
	run   string   // pattern for -test.run; empty for all tests
	args  []string // additional flags
	files []string // relative to the root of the repository, where the tests expect it: two directories up
}

// name returns the suite's name in the guest and in test names.
func (s suite) name() string { return path.Base(s.pkg) }

// build compiles the suites' tests for a processor into dir, as static binaries: the guest has no Go and few
// libraries.
func build(ctx context.Context, arch, dir string, suites []suite) error {
	args := []string{"test", "-c", "-tags", "vmguest", "-trimpath", "-ldflags", "-s -w", "-o", dir + "/"}
	for _, s := range suites {
		args = append(args, "./"+s.pkg)
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = repoRoot
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH="+strings.TrimSuffix(arch, "v7"), "GOARM=7")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("compile the guest's tests: %w\n%s", err, out)
	}
	return nil
}

// makeImage returns the image that a guest boots from: its first process, tools, the
// daemon, the modules of the kernel in dir, and the suites, whose test binaries are in
// the directory binaries. flags are appended to those of each suite.
func makeImage(dir, binaries string, suites []suite, flags ...string) ([]byte, error) {
	var a archive
	a.add("/init", 0o755, firstProcess)
	a.symlink("/bin/sh", "busybox")
	for _, name := range tools {
		if err := a.addTool(name); err != nil {
			return nil, fmt.Errorf("%w: run \"make deps\" to install it", err)
		}
	}
	daemon, err := lab.Binary()
	if err != nil {
		return nil, err
	}
	if err := a.copy("/bin/shaperd", daemon); err != nil {
		return nil, err
	}
	if err := a.addModules(filepath.Join(dir, "modules"), modules); err != nil {
		return nil, err
	}
	if err := a.addSuites(binaries, suites, flags); err != nil {
		return nil, err
	}
	return a.end(), nil
}

// addSuites adds suites, in the order in which they run.
func (a *archive) addSuites(binaries string, suites []suite, flags []string) error {
	var order []string
	for _, s := range suites {
		if err := a.addSuite(s, binaries, flags); err != nil {
			return err
		}
		order = append(order, s.name())
	}
	a.add("/suites/order", 0o644, lines(order))
	return nil
}

func (a *archive) addModules(dir string, names []string) error {
	files, err := loadOrder(dir, names)
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

// addSuite adds a test binary next to its package's testdata.
func (a *archive) addSuite(s suite, binaries string, flags []string) error {
	at := path.Join("/suites", s.name())
	if err := a.copy(at+"/test", filepath.Join(binaries, s.name()+".test")); err != nil {
		return err
	}
	args := append([]string{"-test.v=test2json", "-test.run=" + s.run}, s.args...)
	a.add(at+"/args", 0o644, lines(append(args, flags...)))

	for _, file := range s.files {
		if err := a.copy(path.Join("/", file), filepath.Join(repoRoot, file)); err != nil {
			return err
		}
	}
	from := filepath.Join(repoRoot, s.pkg)
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

// addTool copies a program, and the libraries it loads at their original paths.
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
		if a.names[library] {
			continue
		}
		if err := a.copy(library, library); err != nil {
			return err
		}
	}
	return nil
}

// librariesOf returns the libraries that a program loads, according to the dynamic loader.
func librariesOf(file string) ([]string, error) {
	cmd := exec.Command("ldd", file)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	out, err := cmd.CombinedOutput()
	if strings.Contains(string(out), "not a dynamic executable") {
		return nil, nil
	}
	if err != nil || strings.Contains(string(out), "not found") {
		return nil, errors.Join(fmt.Errorf("ldd %s: %s", file, out), err)
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
