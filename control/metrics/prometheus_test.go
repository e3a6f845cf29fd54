package metrics_test

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/control/internal/fakes"
	"shaperd.dev/shaperd/control/metrics"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/quota"
)

// The files for Prometheus and Grafana.
const (
	alertsFile     = "../../configs/alerts.yml"
	alertTestsFile = "../../configs/alerts_test.yml"
	weekTestFile   = "../../configs/alerts_week_test.yml"
	dashboardFile  = "../../configs/grafana-dashboard.json"
	prometheusFile = "../../configs/prometheus.yml"
	podsFile       = "../../configs/kubernetes/prometheus-pods.yml"
)

// scraped returns the metrics of a daemon with all of them.
func scraped(t *testing.T) string {
	t.Helper()
	s := fakes.Shaper(t, 2)
	limits := []shaper.Limit{{Name: "aa", Rate: 8e6, MaxConnections: 7}, {Name: "an", NewConnections: shaper.Frequency{N: 5, Per: time.Minute}, Shared: true}, {Name: "as", NewConnections: shaper.Frequency{N: 5, Per: time.Minute}, Algorithm: shaper.SlidingLog}, {Name: "ak", Key: shaper.KeyPort, Rate: 8e6}, {Name: "aq", Key: shaper.KeyPort, Quota: quota.Quota{Amount: 1000, Period: quota.Period{Calendar: quota.Day}}}, {Name: "ab", Rate: 8e6, Observe: true}, {Name: "at", Rate: 8e6, Match: shaper.Match{Attach: []string{"uplink"}}}}
	limits = append(limits, shaper.Limit{
		Name: "ap", Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64, MaxConnections: 7,
		Penalty: &shaper.Penalty{After: shaper.Frequency{N: 100, Per: time.Minute}, Block: time.Minute, Factor: 2, Most: time.Hour},
	})
	p, err := s.Compile(limits, []shaper.Listener{{Name: "l", Addresses: []shaper.Address{{Protocol: shaper.TCP}}}}, []shaper.Attachment{{Name: "uplink"}}, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	s.Swap(p, leaky.Second)
	p.State(0).Adaptive.Store(&shaper.AdaptiveStatus{Limit: 5})
	p.State(0).Shed.Store(&shaper.ShedStatus{Signals: []shaper.ShedSignal{{Name: "cpu"}, {Name: "pressure", Err: "not there"}}})
	c := newCollector(t, s)
	c.Reloads.Record(time.Millisecond)
	c.Reloads.Record(time.Millisecond, "no")
	w := httptest.NewRecorder()
	metrics.Handler(c).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	return w.Body.String()
}

// withPods returns a copy of podsFile whose pods are addresses: the promtool of Debian knows of no
// Kubernetes.
func withPods(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(podsFile)
	if err != nil {
		t.Fatal(err)
	}
	before, after, ok := strings.Cut(string(text), "kubernetes_sd_configs:\n      - role: pod\n")
	if !ok {
		t.Fatalf("%s looks for no pods", podsFile)
	}
	file := filepath.Join(t.TempDir(), "prometheus.yml")
	if err := os.WriteFile(file, []byte(before+"static_configs:\n      - targets: [\"127.0.0.1:9464\"]\n"+after), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

// promtool runs promtool, which scripts/install-deps installs.
func promtool(t *testing.T, stdin string, args ...string) {
	t.Helper()
	cmd := exec.Command("promtool", args...)
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func readText(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestPromtool(t *testing.T) {
	promtool(t, scraped(t), "check", "metrics")
	promtool(t, "", "check", "rules", alertsFile)
	promtool(t, "", "test", "rules", alertTestsFile, weekTestFile)
	promtool(t, "", "check", "config", prometheusFile)
	promtool(t, "", "check", "config", withPods(t))
}

// exported is a metric, with the values of its labels.
type exported struct {
	histogram bool
	labels    map[string][]string
}

var (
	typeLine   = regexp.MustCompile(`(?m)^# TYPE (\S+) (\S+)$`)
	seriesLine = regexp.MustCompile(`(?m)^(\w+)(?:\{(.*)\})? \S+$`)
	labelPair  = regexp.MustCompile(`(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"`)
	selector   = regexp.MustCompile(`\b(shaperd_[a-z0-9_]+)(?:\{([^}]*)\})?`)
	part       = regexp.MustCompile(`_(bucket|sum|count)$`)
)

// parse parses the text of a scrape.
func parse(text string) map[string]exported {
	all := map[string]exported{}
	for _, m := range typeLine.FindAllStringSubmatch(text, -1) {
		all[m[1]] = exported{m[2] == "histogram", map[string][]string{}}
	}
	for _, m := range seriesLine.FindAllStringSubmatch(text, -1) {
		of, ok := all[m[1]]
		if !ok {
			of = all[part.ReplaceAllString(m[1], "")]
		}
		for _, l := range labelPair.FindAllStringSubmatch(m[2], -1) {
			of.labels[l[1]] = append(of.labels[l[1]], l[3])
		}
	}
	return all
}

// Dashboard and alerts use only existing metrics, labels, and values of labels that are closed
// enums.
func TestDashboardAndAlerts_UseExportedMetrics(t *testing.T) {
	all := parse(scraped(t))
	enums := []string{"verdict", "reason", "state", "result", "mode"}
	for _, file := range []string{alertsFile, alertTestsFile, dashboardFile} {
		text := strings.ReplaceAll(readText(t, file), `\"`, `"`)
		used := selector.FindAllStringSubmatch(text, -1)
		if len(used) < 10 {
			t.Errorf("%s: only %d metrics", file, len(used))
		}
		for _, m := range used {
			name := m[1]
			metric, is := all[name]
			if !is {
				base := part.ReplaceAllString(name, "")
				metric, is = all[base]
				is = is && metric.histogram && base != name
			}
			if !is {
				t.Errorf("%s: unknown metric %s", file, name)
				continue
			}
			for _, l := range labelPair.FindAllStringSubmatch(m[2], -1) {
				label, values := l[1], strings.Split(l[3], "|")
				if label == "job" || label == "instance" { // Prometheus adds them
					continue
				}
				if len(metric.labels[label]) == 0 {
					t.Errorf("%s: %s has no label %q", file, name, label)
				}
				for _, v := range values {
					if slices.Contains(enums, label) && !slices.Contains(metric.labels[label], v) {
						t.Errorf("%s: %s has no %s=%q", file, name, label, v)
					}
				}
			}
		}
	}
}

// Each alert has a severity and a description, and is tested both quiet and firing.
func TestAlerts(t *testing.T) {
	tests := readText(t, alertTestsFile) + readText(t, weekTestFile)
	alerts := strings.Split(readText(t, alertsFile), "- alert: ")[1:]
	for _, alert := range alerts {
		name, _, _ := strings.Cut(alert, "\n")
		for _, want := range []string{"\n        for: ", "\n          severity: ", "\n          summary: ", "\n          description: "} {
			if !strings.Contains(alert, want) {
				t.Errorf("%s has no %s", name, strings.TrimSpace(want))
			}
		}
		quiet := fmt.Sprintf("alertname: %s\n        exp_alerts: []\n", name)
		fires := fmt.Sprintf("alertname: %s\n        exp_alerts:\n", name)
		if !strings.Contains(tests, quiet) || !strings.Contains(tests, fires) {
			t.Errorf("%s is not tested both quiet and firing", name)
		}
	}
	if len(alerts) < 15 {
		t.Errorf("only %d alerts", len(alerts))
	}
}

// dashboard is the part of a Grafana dashboard that is checked.
type dashboard struct {
	UID, Title    string
	SchemaVersion int
	Templating    struct {
		List []struct {
			Name, Type string
			Query      json.RawMessage
		}
	}
	Panels []struct {
		ID                       int
		Type, Title, Description string
		Repeat                   string
		GridPos                  struct{ H, W, X, Y int }
		Datasource               struct{ Type, UID string }
		Targets                  []struct{ RefID, Expr string }
	}
}

func TestDashboard(t *testing.T) {
	decoder := json.NewDecoder(strings.NewReader(readText(t, dashboardFile)))
	var d dashboard
	if err := decoder.Decode(&d); err != nil {
		t.Fatal(err)
	}
	const ofGrafana10 = 36 // and later
	if d.UID == "" || d.Title == "" || d.SchemaVersion < ofGrafana10 {
		t.Errorf("uid %q, title %q, schemaVersion %d", d.UID, d.Title, d.SchemaVersion)
	}
	variables := map[string]string{}
	for _, v := range d.Templating.List {
		variables[v.Name] = v.Type
	}
	for name, kind := range map[string]string{"DS_PROMETHEUS": "datasource", "job": "query", "instance": "query", "limit": "query"} {
		if variables[name] != kind {
			t.Errorf("variable %s is a %q, want %q", name, variables[name], kind)
		}
	}
	var rules strings.Builder
	rules.WriteString("groups:\n- name: dashboard\n  rules:\n")
	instead := strings.NewReplacer("$__rate_interval", "5m", "$__range", "1h", "$job", "j", "$instance", "i", "$limit", "l")
	ids, cells, rows := map[int]bool{}, map[[2]int]string{}, 0
	for _, p := range d.Panels {
		if ids[p.ID] || p.ID == 0 {
			t.Errorf("%q: duplicate or missing ID %d", p.Title, p.ID)
		}
		ids[p.ID] = true
		g := p.GridPos
		if g.W < 1 || g.H < 1 || g.X < 0 || g.X+g.W > 24 {
			t.Errorf("%q: invalid position %+v", p.Title, g)
		}
		for x := g.X; x < g.X+g.W; x++ {
			for y := g.Y; y < g.Y+g.H; y++ {
				if other, taken := cells[[2]int{x, y}]; taken {
					t.Fatalf("%q lies over %q", p.Title, other)
				}
				cells[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			rows++
			if (p.Repeat == "limit") != strings.Contains(p.Title, "$limit") {
				t.Errorf("row %q is repeated by %q", p.Title, p.Repeat)
			}
			continue
		}
		if p.Title == "" || p.Description == "" || p.Datasource.UID != "${DS_PROMETHEUS}" || len(p.Targets) == 0 {
			t.Errorf("panel %q: it lacks a title, a description, the data source or queries", p.Title)
		}
		for _, q := range p.Targets {
			expr, err := json.Marshal(instead.Replace(q.Expr))
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&rules, "  - record: panel:%d:%s\n    expr: %s\n", p.ID, q.RefID, strings.NewReplacer(`\u003e`, ">", `\u003c`, "<", `\u0026`, "&").Replace(string(expr)))
		}
	}
	if rows != 8 {
		t.Errorf("%d rows", rows)
	}
	// promtool checks the syntax of each query.
	file := filepath.Join(t.TempDir(), "panels.yml")
	if err := os.WriteFile(file, []byte(rules.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	promtool(t, "", "check", "rules", file)
}
