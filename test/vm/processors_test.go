package vm

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// A processor is one that packages are built for, besides amd64.
type processor struct {
	name   string
	unpack string // the command that unpacks the program of a package
	qemu   []string
	port   string // the serial port of the machine
	suites []suite
}

// portable tests the daemon on any processor, and parity the programs of the packet plane.
var (
	portable = suite{pkg: "test/vm/portable"}
	parity   = suite{pkg: "bpf", run: "TestParity|TestVerifierBudget", args: []string{"-policies=2", "-packets=200"}}
)

var processors = []processor{
	{"arm64", "rpm2cpio $PACKAGES/shaperd-2.0.0-1.aarch64.rpm | cpio -id --no-absolute-filenames '*usr/bin/shaperd'", []string{"qemu-system-aarch64", "-machine", "virt", "-cpu", "max,pauth-impdef=on", "-smp", "2"}, "ttyAMA0", []suite{portable, parity}},
	// With two processors its kernel does not boot in one thread of the host.
	{"armv7", "tar -xzOf $PACKAGES/shaperd_2.0.0-1_armv7.ipk ./data.tar.gz | tar -xz ./usr/bin/shaperd", []string{"qemu-system-arm", "-machine", "virt,highmem=off", "-cpu", "cortex-a15", "-smp", "1"}, "ttyAMA0", []suite{portable}},
	{"riscv64", "tar -xz --warning=no-unknown-keyword -f $PACKAGES/shaperd_2.0.0-r1_riscv64.apk usr/bin/shaperd", []string{"qemu-system-riscv64", "-machine", "virt", "-smp", "2"}, "ttyS0", []suite{portable}},
}

// TestProcessors runs the program of a package for each processor in a guest that has one. Each package has
// another format.
func TestProcessors(t *testing.T) {
	packages, err := filepath.Abs(filepath.Join(repoRoot, "build/test-packages"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range processors {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			dir, temp := installed(t, p.name, "make vm-processors"), t.TempDir()
			if err := build(t.Context(), p.name, temp, p.suites); err != nil {
				t.Fatal(err)
			}
			unpack := exec.Command("sh", "-c", p.unpack)
			unpack.Dir, unpack.Env = temp, append(os.Environ(), "PACKAGES="+packages)
			if out, err := unpack.CombinedOutput(); err != nil {
				t.Fatalf("%s: %v: \"make test-packages\" builds the packages\n%s", p.unpack, err, out)
			}
			image, err := makeForeignImage(dir, filepath.Join(temp, "usr/bin/shaperd"), temp, p.suites)
			if err != nil {
				t.Fatal(err)
			}
			m := machine{
				qemu:   slices.Concat(p.qemu, []string{"-m", "1G"}),
				kernel: filepath.Join(dir, "vmlinuz"), initrd: filepath.Join(temp, "image"),
				// Messages of the kernel come from the same port as the output.
				options: []string{"console=" + p.port, "output=" + p.port, "panic=-1", "oops=panic", "quiet", "loglevel=1"},
			}
			if err := os.WriteFile(m.initrd, image, 0o600); err != nil {
				t.Fatal(err)
			}
			testProcessor(t, temp, m, p.suites)
		})
	}
}

func testProcessor(t *testing.T, dir string, m machine, list []suite) {
	began := time.Now()
	ctx, cancel := context.WithTimeoutCause(t.Context(), *timeoutFlag, fmt.Errorf("still running after %v", *timeoutFlag))
	defer cancel()
	output, console, cpu, err := boot(ctx, dir, m)
	if err != nil {
		t.Error(err)
	}
	guest := parseTranscript(output)
	t.Logf("Linux %s: booted in %s s, total %.1f s, CPU time %.1f s", guest.release, guest.uptime, time.Since(began).Seconds(), cpu.Seconds())
	for _, s := range list {
		t.Run(s.name(), func(t *testing.T) {
			if guest.suites[s.name()].replay(t) == 0 {
				t.Error("no tests ran")
			}
		})
	}
	if t.Failed() {
		t.Logf("last lines of the console:\n%s", lastLines(console, 50))
	}
}

// makeForeignImage returns the image of a guest with another processor than the host. Its only tools are those of
// busybox.
func makeForeignImage(dir, daemon, binaries string, suites []suite) ([]byte, error) {
	var a archive
	a.add("/init", 0o755, firstProcess)
	if err := a.copy("/bin/busybox", filepath.Join(dir, "busybox")); err != nil {
		return nil, err
	}
	a.symlink("/bin/sh", "busybox")
	if err := a.copy("/bin/shaperd", daemon); err != nil {
		return nil, err
	}
	if err := a.addModules(filepath.Join(dir, "modules"), []string{"sch_fq", "sch_ingress", "cls_bpf"}); err != nil {
		return nil, err
	}
	if err := a.addSuites(binaries, suites, nil); err != nil {
		return nil, err
	}
	return a.end(), nil
}
