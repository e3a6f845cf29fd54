package from

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/test/lab"
)

// "shaperd convert" makes of their configuration in a page what is ours there.
func TestConvert_Pages(t *testing.T) {
	for _, tt := range []struct {
		program, page string
		leftOut       []string // parts of lines
	}{
		{"haproxy", "haproxy.md", nil},
		{"nginx", "nginx.md", nil},
		{"iptables", "hashlimit.md", []string{"--hashlimit-htable-size 256", "--hashlimit-htable-max 300"}},
	} {
		t.Run(tt.program, func(t *testing.T) {
			p := readPage(t, tt.page)
			theirs := filepath.Join(t.TempDir(), "theirs")
			must(t, os.WriteFile(theirs, []byte(p.theirs), 0o600))
			toml, said := shaperd(t, "convert", tt.program, theirs)
			for _, part := range tt.leftOut {
				said = replaceOnce(t, said, ": "+part+": ", ": ")
			}
			if n := strings.Count(said, "\n"); n != len(tt.leftOut) {
				t.Errorf("%d lines were left out, want %d:\n%s", n, len(tt.leftOut), said)
			}
			if diff := cmp.Diff(checked(t, p.ours), checked(t, toml)); diff != "" {
				t.Errorf("the page and what is converted differ (-page +converted):\n%s\n%s", diff, toml)
			}
		})
	}
}

// The files that internal/convert is tested with are accepted by the programs that they are for.
func TestConvert_Samples(t *testing.T) {
	peers, err := filepath.Abs("../../build/peers")
	must(t, err)
	s := newSite(t)
	for pattern, command := range map[string][]string{
		"haproxy/*.cfg":    append(lab.HAProxy(peers), "-c", "-f"),
		"nginx/*.conf":     {"/usr/sbin/nginx", "-t", "-c"},
		"iptables/*.rules": {"iptables-restore", "--test"},
	} {
		files, err := filepath.Glob(filepath.Join("../../internal/convert/testdata", pattern))
		must(t, err)
		if len(files) == 0 {
			t.Errorf("there is no %s", pattern)
		}
		for _, file := range files {
			file, err = filepath.Abs(file)
			must(t, err)
			if err := s.Middle.Run(command[0], append(command[1:], file)...); err != nil {
				t.Errorf("%s: %v", file, err)
			}
		}
	}
}

// checked returns a configuration as "shaperd check" understands it.
func checked(t *testing.T, config string) any {
	t.Helper()
	path := filepath.Join(t.TempDir(), "shaperd.toml")
	must(t, os.WriteFile(path, []byte(config), 0o600))
	out, _ := shaperd(t, "check", "--json", path)
	var all []struct{ Config any }
	must(t, json.Unmarshal([]byte(out), &all))
	return all[0].Config
}

// shaperd runs a verb, and returns its outputs.
func shaperd(t *testing.T, args ...string) (stdout, stderr string) {
	t.Helper()
	binary, err := lab.Binary()
	must(t, err)
	var out, errOut bytes.Buffer
	cmd := exec.Command(binary, args...)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		t.Fatalf("shaperd %v: %v: %s", args, err, errOut.String())
	}
	return out.String(), errOut.String()
}
