package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/test/lab"
)

// TestRun_Reproducible writes an image twice, from copies of the programs.
func TestRun_Reproducible(t *testing.T) {
	var images [2][]byte
	for i := range images {
		dir := t.TempDir()
		program, out := filepath.Join(dir, "program"), filepath.Join(dir, "image")
		if err := os.WriteFile(program, bytes.Repeat([]byte("program "), 1000), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := run(out, "1.2.3", "1700000000", []string{"amd64=" + program, "armv7=" + program}); err != nil {
			t.Fatal(err)
		}
		var err error
		if images[i], err = os.ReadFile(out); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(images[0], images[1]) {
		t.Error("the images differ")
	}
}

func TestRun_Errors(t *testing.T) {
	for want, args := range map[string][2]string{
		"must be seconds since 1970": {"", "amd64=main.go"},
		"must be processor=file":     {"1", "main.go"},
		"no such file":               {"1", "amd64=absent"},
	} {
		if err := run(filepath.Join(t.TempDir(), "image"), "1", args[0], []string{args[1]}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", args, err, want)
		}
	}
}

// TestImage has another program unpack the image of the daemon, and runs it as a container engine does: in the
// layer as the root directory, as the user of the image, with its commands. Needs root.
func TestImage(t *testing.T) {
	program, err := lab.Binary()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	image := filepath.Join(dir, "image.tar")
	if err := run(image, "1.2.3", "1700000000", []string{"amd64=" + program, "arm64=" + program, "armv7=" + program}); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("skopeo", "inspect", "--raw", "oci-archive:"+image).CombinedOutput()
	if err != nil || strings.Count(string(out), `"architecture"`) != 3 || !strings.Contains(string(out), `"variant":"v7"`) {
		t.Fatalf("skopeo: %v\n%s", err, out)
	}
	// It verifies all digests.
	copied := filepath.Join(dir, "copied")
	if out, err := exec.Command("skopeo", "--override-arch=amd64", "copy", "oci-archive:"+image, "dir:"+copied).CombinedOutput(); err != nil {
		t.Fatalf("skopeo: %v\n%s", err, out)
	}
	var m manifest
	readJSON(t, filepath.Join(copied, "manifest.json"), &m)
	var config imageConfig
	readJSON(t, blobFile(copied, m.Config), &config)
	root := unpack(t, blobFile(copied, m.Layers[0]))
	if config.Config.User != "65532:65532" {
		t.Errorf("the user is %s", config.Config.User)
	}

	write(t, filepath.Join(root, "etc/shaperd/shaperd.toml"), "[[listen]]\nname = \"db\"\naddress = \"tcp://0.0.0.0:5432\"\ndownstream = \"127.0.0.1:5433\"\n")
	container := func(args []string, isolation uintptr) *exec.Cmd {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir, cmd.Env = "/", []string{}
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Chroot: root, Credential: &syscall.Credential{Uid: user, Gid: user}, Cloneflags: isolation, Pdeathsig: syscall.SIGKILL,
		}
		return cmd
	}
	var log testutil.Buffer
	daemon := container(append(config.Config.Entrypoint, config.Config.Cmd...), syscall.CLONE_NEWNET)
	daemon.Stdout, daemon.Stderr = &log, &log
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	log.WaitFor(t, "msg=ready")
	if test := config.Config.Healthcheck.Test; len(test) < 2 || test[0] != "CMD" {
		t.Errorf("the health check is %q", test)
	} else if out, err := container(test[1:], 0).CombinedOutput(); err != nil {
		t.Errorf("the health check: %v\n%s", err, out)
	}
	if err := daemon.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(30*time.Second, func() { _ = daemon.Process.Kill() })
	defer late.Stop()
	if err := daemon.Wait(); err != nil {
		t.Errorf("the daemon: %v\n%s", err, log.String())
	}
	if _, err := os.Stat(filepath.Join(root, "var/lib/shaperd/state")); err != nil {
		t.Errorf("the daemon saved no state: %v", err)
	}
}

func readJSON(t *testing.T, file string, to any) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, to); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

func blobFile(dir string, d descriptor) string {
	return filepath.Join(dir, strings.TrimPrefix(d.Digest, "sha256:"))
}

// unpack unpacks a layer into a directory that all users can enter.
func unpack(t *testing.T, layer string) string {
	t.Helper()
	root, err := os.MkdirTemp("", "shaperd-image")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	f, err := os.Open(layer)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	zip, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(root, h.Name)
		if h.Typeflag == tar.TypeDir {
			err = os.Mkdir(file, h.FileInfo().Mode().Perm())
		} else {
			var data []byte
			if data, err = io.ReadAll(r); err == nil {
				err = os.WriteFile(file, data, h.FileInfo().Mode().Perm())
			}
		}
		if err == nil {
			err = os.Chown(file, h.Uid, h.Gid)
		}
		if err != nil {
			t.Fatal(fmt.Errorf("unpack %s: %w", h.Name, err))
		}
	}
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	return root
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
