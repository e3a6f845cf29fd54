package vm

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseTranscript(t *testing.T) {
	tests := []struct {
		name, output string
		want         transcript
	}{
		{"nothing", "", transcript{suites: map[string]record{}}},
		{
			"whole", "\x01booted 6.1.0 2.50\n\x01begin a\none\n\x01end 0\n\x01begin b\ntwo, no newline\x01end 1\n\x01off\n",
			transcript{release: "6.1.0", uptime: "2.50", suites: map[string]record{
				"a": {[]byte("one\n"), "0"},
				"b": {[]byte("two, no newline"), "1"},
			}},
		},
		{
			"cut short", "\x01booted 6.1.0 2.50\n\x01begin a\none\n",
			transcript{release: "6.1.0", uptime: "2.50", suites: map[string]record{"a": {output: []byte("one\n")}}},
		},
		{
			"a test writes the mark", "\x01begin a\none\n\x01\x01other thing\n\x01end 0\n",
			transcript{suites: map[string]record{"a": {[]byte("one\n\x01\x01other thing\n"), "0"}}},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, parseTranscript([]byte(test.output)), cmp.AllowUnexported(transcript{}, record{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestOutcomes(t *testing.T) {
	const frame = "\x16"
	all, err := outcomes([]byte("-test.shuffle 1\n" +
		frame + "=== RUN   TestA\n" +
		frame + "=== RUN   TestA/b/c\n" +
		"    a_test.go:1: inner\n" +
		frame + "=== RUN   TestA/b/c/d\n" +
		frame + "=== NAME  TestA\n" +
		"    a_test.go:2: outer\nno newline" +
		frame + "--- FAIL: TestA (0.50s)\n" +
		frame + "    --- FAIL: TestA/b/c (0.20s)\n" +
		frame + "        --- FAIL: TestA/b/c/d (0.10s)\n" +
		frame + "=== RUN   TestB\n" +
		frame + "--- SKIP: TestB (0.00s)\n" +
		frame + "=== RUN   TestC\n" +
		frame + "--- PASS: TestC (0.00s)\n" +
		frame + "=== RUN   TestD\n" +
		"panic: over\n"))
	if err != nil {
		t.Fatal(err)
	}
	type view struct {
		Name, Output, Fault string
		Seconds             float64
		Tests               []view
	}
	var toView func(o *outcome) view
	toView = func(o *outcome) view {
		v := view{Name: o.name, Output: o.output.String(), Fault: o.failure(), Seconds: o.seconds}
		for _, test := range o.tests {
			v.Tests = append(v.Tests, toView(test))
		}
		return v
	}
	const failed = "failed in the guest"
	want := []view{
		{
			Name: "TestA", Output: "    a_test.go:2: outer\nno newline", Fault: failed, Seconds: 0.5,
			Tests: []view{{
				Name: "b/c", Output: "    a_test.go:1: inner\n", Fault: failed, Seconds: 0.2,
				Tests: []view{{Name: "d", Fault: failed, Seconds: 0.1}},
			}},
		},
		{Name: "TestB", Fault: "skipped, although a guest has everything that tests need"},
		{Name: "TestC"},
		{Name: "TestD", Output: "panic: over\n", Fault: "did not end"},
	}
	got := toView(all)
	if diff := cmp.Diff(want, got.Tests); diff != "" {
		t.Error(diff)
	}
	if got.Output != "-test.shuffle 1\n" {
		t.Errorf("the suite wrote %q", got.Output)
	}
}

func TestLoadOrder(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"modules.builtin": "kernel/net/sched/sch_fq_codel.ko\n",
		"modules.dep":     "kernel/a/top-most.ko: kernel/b/mid.ko kernel/c/low.ko\nkernel/b/mid.ko: kernel/c/low.ko\nkernel/c/low.ko:\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := loadOrder(dir, []string{"top_most", "sch_fq_codel", "low"})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"kernel/c/low.ko", "kernel/b/mid.ko", "kernel/a/top-most.ko"}, got); diff != "" {
		t.Error(diff)
	}
	if _, err := loadOrder(dir, []string{"sch_none"}); err == nil || !strings.HasSuffix(err.Error(), "has no module sch_none") {
		t.Errorf("error %v", err)
	}
}

// TestArchive unpacks an archive with busybox.
func TestArchive(t *testing.T) {
	var a archive
	a.add("/one/two/three", 0o755, []byte("3\n"))
	a.add("/one/four", 0o644, nil)
	a.symlink("/five", "one/four")
	cmd := exec.Command("busybox", "cpio", "-i")
	cmd.Dir = t.TempDir()
	cmd.Stdin = bytes.NewReader(a.end())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("unpack: %v\n%s", err, out)
	}
	got := make(map[string]string)
	for _, name := range []string{"one", "one/two", "one/two/three", "one/four", "five"} {
		info, err := os.Lstat(filepath.Join(cmd.Dir, name))
		if err != nil {
			t.Fatal(err)
		}
		got[name] = info.Mode().String()
	}
	if diff := cmp.Diff(map[string]string{
		"one": "drwxr-xr-x", "one/two": "drwxr-xr-x", "one/two/three": "-rwxr-xr-x", "one/four": "-rw-r--r--", "five": "Lrwxrwxrwx",
	}, got); diff != "" {
		t.Error(diff)
	}
	if data, err := os.ReadFile(filepath.Join(cmd.Dir, "one/two/three")); string(data) != "3\n" {
		t.Errorf("the file contains %q, %v", data, err)
	}
	if target, err := os.Readlink(filepath.Join(cmd.Dir, "five")); target != "one/four" {
		t.Errorf("the link points to %q, %v", target, err)
	}
}

func TestLastLines(t *testing.T) {
	for text, want := range map[string]string{
		"":                  "",
		"one":               "one",
		"one\r\ntwo\r\n":    "one\ntwo",
		"one\ntwo\nthree\n": "two\nthree",
	} {
		if got := string(lastLines([]byte(text), 2)); got != want {
			t.Errorf("the last 2 lines of %q are %q", text, got)
		}
	}
}
