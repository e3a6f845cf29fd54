package docs

import (
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// allowed has the packages of this module that each one may import, apart from its tests. A plane
// does not import the other one, and nothing below internal imports control.
var allowed = map[string][]string{
	"internal/testutil":      nil,
	"leaky":                  nil,
	"leaky/pacer":            {"leaky"},
	"shaper/asn":             {"shaper/segments"},
	"shaper/topk":            {"leaky"},
	"shaper/quota":           nil,
	"shaper":                 {"leaky", "shaper/asn", "shaper/quota", "shaper/segments", "shaper/topk"},
	"shaper/segments":        nil,
	"shaper/config":          {"leaky", "shaper", "shaper/asn", "shaper/quota"},
	"cluster":                nil,
	"cluster/internal/world": {"cluster"},
	"cluster/member":         {"cluster", "leaky", "shaper"},
	"cluster/peer":           {"cluster", "internal/safefile"},
	"cluster/redis":          {"cluster", "internal/safefile"},
	"conn":                   {"conn/adaptive", "conn/internal/fairq", "conn/internal/sock", "conn/penalty", "leaky", "leaky/pacer", "shaper", "shaper/quota", "shaper/topk"},
	"conn/adaptive":          {"leaky"},
	"conn/internal/fairq":    {"leaky"},
	"conn/penalty":           {"conn/internal/fairq", "shaper"},
	"conn/internal/sock":     nil,
	"conn/tproxy":            {"shaper"},
	"bpf":                    {"bpf/internal/attach", "leaky", "leaky/pacer", "shaper", "shaper/segments", "shaper/topk"},
	"bpf/internal/attach":    {"shaper"},
	"api":                    nil,
	"control":                {"api", "control/metrics", "control/monitor", "control/web", "leaky", "leaky/pacer", "shaper", "shaper/topk"},
	"control/internal/fakes": {"api", "control/metrics", "leaky", "leaky/pacer", "shaper", "shaper/quota"},
	"control/metrics":        {"api", "control/monitor", "leaky", "leaky/pacer", "shaper"},
	"control/web":            nil,
	"control/monitor":        {"api", "leaky", "shaper"},
	"internal/logging":       nil,
	"internal/term":          {"shaper/config"},
	"internal/safefile":      nil,
	"internal/quotafile":     {"internal/safefile", "shaper/quota"},
	"internal/explain":       {"api", "shaper", "shaper/config"},
	"internal/sharing":       {"api", "cluster", "cluster/member", "cluster/peer", "cluster/redis", "conn/adaptive", "shaper/config"},
	"internal/convert":       {"shaper/config"},
	"internal/plan":          {"bpf", "conn/tproxy", "control", "shaper", "shaper/asn", "shaper/config"},
	"internal/shedding":      {"shaper"},
	"internal/doctor":        {"api", "bpf", "cluster", "cluster/redis", "conn", "internal/plan", "internal/sharing", "shaper", "shaper/config"},
	"internal/daemon":        {"api", "bpf", "cluster", "cluster/member", "cluster/peer", "conn", "conn/adaptive", "conn/tproxy", "control", "control/metrics", "control/monitor", "internal/explain", "internal/logging", "internal/plan", "internal/quotafile", "internal/safefile", "internal/sharing", "internal/shedding", "leaky", "leaky/pacer", "shaper", "shaper/config", "shaper/quota"},
	"internal/cli":           {"api", "bpf", "conn/tproxy", "control", "internal/convert", "internal/daemon", "internal/doctor", "internal/explain", "internal/plan", "internal/safefile", "internal/term", "shaper", "shaper/config"},
	"cmd/shaperd":            {"internal/cli"},
	"packaging/oci":          nil,
	"systemd":                nil,
	"test/bench":             {"shaper/config", "test/lab", "test/lab/plot"},
	"test/demo":              {"test/lab", "test/lab/plot"},
	"test/demo/adapt":        {"api", "test/lab"},
	"test/demo/cold":         {"test/lab"},
	"test/demo/pool":         {"test/lab"},
	"test/demo/cluster":      {"test/lab", "test/lab/plot"},
	"test/demo/restart":      {"test/lab"},
	"test/demo/perhit":       nil,
	"test/docs":              nil,
	"test/examples":          nil,
	"test/from":              nil,
	"test/lab":               {"internal/testutil"},
	"test/lab/plot":          nil,
	"test/netns":             nil,
	"test/page":              nil,
	"test/roots":             nil,
	"test/vm":                nil,
	"test/vm/guest":          nil,
	"test/vm/installed":      nil,
	"test/vm/portable":       nil,
	"test/bench/naive":       nil,
}

func TestImports(t *testing.T) {
	module := goList(t, "-m")[0] + "/"
	seen := map[string]bool{}
	for _, line := range goList(t, "-f", `{{.ImportPath}}{{range .Imports}} {{.}}{{end}}`, module+"...") {
		imports := strings.Fields(line)
		name := strings.TrimPrefix(imports[0], module)
		seen[name] = true
		may, known := allowed[name]
		if !known {
			t.Errorf("package %s is missing from the table of allowed imports", name)
		}
		for _, path := range imports[1:] {
			if path, ours := strings.CutPrefix(path, module); ours && !slices.Contains(may, path) {
				t.Errorf("%s must not import %s", name, path)
			}
		}
	}
	for name := range maps.Keys(allowed) {
		if !seen[name] {
			t.Errorf("there is no package %s", name)
		}
	}
}

// goList returns the lines that "go list" prints.
func goList(t *testing.T, args ...string) []string {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list"}, args...)...)
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}
