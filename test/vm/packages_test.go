package vm

import (
	"archive/tar"
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

//go:embed debian.run
var debianRun []byte

var (
	// disks are copies of those that debian.sh makes, and their boots.
	disks = []struct {
		release, name string
		boots         []string
	}{
		{"debian-12", "life", []string{"First", "Second"}},
		{"debian-13", "life", []string{"First", "Second"}},
		{"debian-13", "permissions", []string{"Permissions"}},
		{"debian-13", "rpm", []string{"Rpm"}},
		{"debian-13", "instances", []string{"Instances"}},
	}
	debianOptions = []string{"console=ttyS0", "root=/dev/vda", "ro", "systemd.show_status=0", "random.trust_cpu=on", "net.ifnames=0"}
)

// TestPackages installs the Debian package in Debian releases that have booted with systemd, reboots, upgrades and
// removes it; and the rpm package in one of them. Each boot of a disk runs the test of package installed with its name.
func TestPackages(t *testing.T) {
	binaries := t.TempDir()
	if err := build(t.Context(), "amd64", binaries, []suite{{pkg: "test/vm/installed"}}); err != nil {
		t.Fatal(err)
	}
	for _, disk := range disks {
		t.Run(disk.release+"-"+disk.name, func(t *testing.T) {
			t.Parallel()
			dir := installed(t, disk.release, "make vm-debian")
			temp := t.TempDir()
			file := filepath.Join(temp, "disk")
			if out, err := exec.Command("cp", "--sparse=always", "--reflink=auto", filepath.Join(dir, "disk"), file).CombinedOutput(); err != nil {
				t.Fatalf("copy the disk: %v\n%s", err, out)
			}
			for _, name := range disk.boots {
				payload := filepath.Join(temp, name+".tar")
				if err := writePayload(payload, map[string]string{
					"old.deb": filepath.Join(repoRoot, "build/test-packages/shaperd_1.0.0-1_amd64.deb"),
					"new.deb": filepath.Join(repoRoot, "build/test-packages/shaperd_2.0.0-1_amd64.deb"),
					"old.rpm": filepath.Join(repoRoot, "build/test-packages/shaperd-1.0.0-1.x86_64.rpm"),
					"new.rpm": filepath.Join(repoRoot, "build/test-packages/shaperd-2.0.0-1.x86_64.rpm"),
					"test":    filepath.Join(binaries, "installed.test"),
				}, "^Test"+name); err != nil {
					t.Fatal(err)
				}
				m := machine{
					kernel: filepath.Join(dir, "vmlinuz"), initrd: filepath.Join(dir, "initrd"),
					options: slices.Concat(options, debianOptions), disks: []string{file, payload},
				}
				if !t.Run(name, func(t *testing.T) { testInstalled(t, m) }) {
					break
				}
			}
		})
	}
}

func testInstalled(t *testing.T, m machine) {
	began := time.Now()
	ctx, cancel := context.WithTimeoutCause(t.Context(), *timeoutFlag, fmt.Errorf("still running after %v", *timeoutFlag))
	defer cancel()
	output, console, cpu, err := boot(ctx, t.TempDir(), m)
	if err != nil {
		t.Error(err)
	}
	guest := parseTranscript(output)
	t.Logf("Linux %s: booted in %s s, total %.1f s, CPU time %.1f s", guest.release, guest.uptime, time.Since(began).Seconds(), cpu.Seconds())
	if guest.suites["installed"].replay(t) == 0 {
		t.Error("no tests ran")
	}
	if t.Failed() {
		t.Logf("last lines of the console:\n%s", lastLines(console, 50))
	}
}

// writePayload writes the archive that a guest unpacks from its second disk, with the files by name.
func writePayload(to string, files map[string]string, run string) error {
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	defer f.Close()
	w := tar.NewWriter(f)
	add := func(name string, data []byte) error {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(data))}); err != nil {
			return err
		}
		_, err := w.Write(data)
		return err
	}
	if err := add("run", []byte(strings.Replace(string(debianRun), "@TESTS@", run, 1))); err != nil {
		return err
	}
	for name, from := range files {
		data, err := os.ReadFile(from)
		if err != nil {
			return fmt.Errorf("%w: \"make test-packages\" builds the packages", err)
		}
		if err := add(name, data); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	return f.Close()
}
