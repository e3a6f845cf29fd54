package roots

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

const build = "../../build"

// TestRoots runs a script for each kind of package.
func TestRoots(t *testing.T) {
	for _, tt := range []struct{ script, root, packages string }{
		{"rpm.sh", "rpm", "shaperd-?.0.0-1.x86_64.rpm"},
		{"alpine.sh", "alpine", "shaperd_?.0.0-r1_x86_64.apk"},
		{"openwrt.sh", "alpine", "shaperd_?.0.0-1_*.ipk"},
	} {
		t.Run(tt.script, func(t *testing.T) {
			t.Parallel()
			root := filepath.Join(t.TempDir(), "root")
			copyFiles(t, root, filepath.Join(build, "roots", tt.root))
			packages, err := filepath.Glob(filepath.Join(build, "test-packages", tt.packages))
			if err != nil {
				t.Fatal(err)
			}
			if len(packages) < 2 {
				t.Fatal(`there are no packages: "make test-packages" builds them`)
			}
			test := filepath.Join(root, "test")
			if err := os.Mkdir(test, 0o755); err != nil {
				t.Fatal(err)
			}
			files, err := filepath.Glob("testdata/*")
			if err != nil {
				t.Fatal(err)
			}
			copyFiles(t, test, append(files, packages...)...)
			out, err := run(t.Context(), root, "/test/"+tt.script)
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

func copyFiles(t *testing.T, to string, from ...string) {
	t.Helper()
	args := append([]string{"-a", "--reflink=auto"}, append(from, to)...)
	if out, err := exec.Command("cp", args...).CombinedOutput(); err != nil {
		t.Fatalf("%v: \"make test-packages\" makes the roots\n%s", err, out)
	}
}

// enter makes a root a mount, which rpm expects of "/", and runs a script in it.
const enter = `mount --bind "$1" "$1" && mount -t proc proc "$1/proc" && exec chroot "$1" /bin/sh -eux "$2"`

// run runs a script in a root, with namespaces of its own: its processes end with it.
func run(ctx context.Context, root, script string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child",
		"sh", "-c", enter, "sh", root, script)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"}
	cmd.WaitDelay = 10 * time.Second
	return cmd.CombinedOutput()
}
