package cli

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

func TestManualPages(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	dir := t.TempDir()
	if _, _, err := command(t, "man", "--dir", dir); err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob(filepath.Join(dir, "*.8"))
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(pages)
	if out, err := exec.Command("mandoc", append([]string{"-T", "lint", "-W", "warning"}, pages...)...).CombinedOutput(); err != nil {
		t.Errorf("mandoc: %v\n%s", err, out)
	}
	texts := map[string]string{}
	for _, page := range pages {
		b, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		texts[filepath.Base(page)] = string(b)
	}
	var each func(*cobra.Command)
	each = func(cmd *cobra.Command) {
		page := texts[manName(cmd)+".8"]
		for _, want := range []string{".Dd November 14, 2023\n", ".Sh DESCRIPTION\n", ".Sh EXAMPLES\n"} {
			if !strings.Contains(page, want) {
				t.Errorf("the page of %q has no %q", cmd.CommandPath(), want)
			}
		}
		if cmd.Example == "" || cmd.Long == "" || strings.HasSuffix(cmd.Short, ".") {
			t.Errorf("%s: each verb has a long help and examples, and a short one without a full stop", cmd.CommandPath())
		}
		for _, sub := range cmd.Commands() {
			if !sub.Hidden && sub.Name() != "help" {
				each(sub)
			}
		}
	}
	each(rootCommand(env{flags: &rootFlags{}}))

	t.Setenv("SOURCE_DATE_EPOCH", "yesterday")
	if _, _, err := command(t, "man", "--dir", dir); exitCode(err) != exitUsage {
		t.Errorf("a wrong date: %v", err)
	}
	if _, _, err := command(t, "man"); exitCode(err) != exitUsage {
		t.Errorf("without a folder: %v", err)
	}
}
