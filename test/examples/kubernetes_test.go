// Package examples checks examples in configs with the programs, or the schemas, that they are for.
package examples

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/google/go-cmp/cmp"
	"github.com/oasdiff/yaml"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/test/lab"
)

// object is a part of a manifest.
type object = map[string]any

// schemas are the OpenAPI schemas of Kubernetes, which scripts/kubernetes-schema writes.
func schemas(t *testing.T) openapi3.Schemas {
	t.Helper()
	text, err := os.ReadFile("testdata/kubernetes.json")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := openapi3.NewLoader().LoadFromData(text)
	if err != nil {
		t.Fatal(err)
	}
	no := false
	for _, s := range doc.Components.Schemas {
		if len(s.Value.Properties) > 0 { // an API server takes no unknown key either
			s.Value.AdditionalProperties.Has = &no
		}
	}
	return doc.Components.Schemas
}

// validate checks an object of a manifest by the schema of its kind.
func validate(all openapi3.Schemas, o object) error {
	version, _ := o["apiVersion"].(string)
	if version == "v1" {
		version = "core/v1"
	}
	name := fmt.Sprintf("io.k8s.api.%s.%v", strings.ReplaceAll(version, "/", "."), o["kind"])
	schema := all[name]
	if schema == nil {
		return fmt.Errorf("there is no schema %s", name)
	}
	return schema.Value.VisitJSON(o, openapi3.MultiErrors())
}

// readManifest returns the objects of a manifest by their kind.
func readManifest(t *testing.T, text string) map[string]object {
	t.Helper()
	all := map[string]object{}
	for _, part := range strings.Split(text, "\n---\n") {
		var o object
		if _, err := yaml.Unmarshal([]byte(part), &o, yaml.DecodeOpts{}); err != nil {
			t.Fatal(err)
		}
		all[fmt.Sprint(o["kind"])] = o
	}
	return all
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// at returns the part of o at a path of keys, and of indices into lists.
func at(t *testing.T, o any, path ...any) any {
	t.Helper()
	for _, key := range path {
		switch k := key.(type) {
		case string:
			o = o.(object)[k]
		case int:
			o = o.([]any)[k]
		}
		if o == nil {
			t.Fatalf("nothing at %v", path)
		}
	}
	return o
}

func TestKubernetes(t *testing.T) {
	all := schemas(t)
	for _, tt := range []struct {
		file, kind string
		container  []any // path
		noDaemon   bool  // it needs interfaces and privileges that this host lacks
	}{
		{"sidecar.yaml", "Deployment", []any{"initContainers", 0}, false},
		{"daemonset.yaml", "DaemonSet", []any{"containers", 0}, true},
	} {
		t.Run(tt.file, func(t *testing.T) {
			manifest := readManifest(t, readFile(t, "../../configs/kubernetes/"+tt.file))
			for kind, o := range manifest {
				if err := validate(all, o); err != nil {
					t.Errorf("%s: %v", kind, err)
				}
			}
			template := at(t, manifest[tt.kind], "spec", "template")
			if d := cmp.Diff(at(t, manifest[tt.kind], "spec", "selector", "matchLabels"), at(t, template, "metadata", "labels")); d != "" {
				t.Errorf("the selector is not that of the pods: %s", d)
			}
			spec := at(t, template, "spec")
			container := at(t, spec, tt.container...).(object)
			checkVolumes(t, spec, container, manifest["ConfigMap"])
			config := mountConfig(t, manifest["ConfigMap"])
			checkPorts(t, container, readFile(t, config), manifest["Service"])
			args := containerArgs(t, container, config)
			if tt.noDaemon {
				checkCapabilities(t, container)
				// Warnings about the host of the test are not about the example.
				if out, err := exec.Command(binary(t), "check", config).CombinedOutput(); err != nil {
					t.Errorf("check: %v\n%s", err, out)
				}
				return
			}
			runPod(t, container, args)
		})
	}
}

// checkVolumes checks that mounts of a container have a volume, and that of the ConfigMap has its name.
func checkVolumes(t *testing.T, spec any, container, configMap object) {
	t.Helper()
	volumes := map[any]object{}
	for _, v := range at(t, spec, "volumes").([]any) {
		volumes[at(t, v, "name")] = v.(object)
	}
	for _, m := range at(t, container, "volumeMounts").([]any) {
		if volumes[at(t, m, "name")] == nil {
			t.Errorf("mount %v has no volume", m)
		}
	}
	if got, want := at(t, volumes["limits"], "configMap", "name"), at(t, configMap, "metadata", "name"); got != want {
		t.Errorf("the volume is of %v, want %v", got, want)
	}
}

// mountConfig writes a ConfigMap as the kubelet does, with symbolic links, and returns the path of the
// configuration.
func mountConfig(t *testing.T, configMap object) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "..2026"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range at(t, configMap, "data").(object) {
		if err := os.WriteFile(filepath.Join(dir, "..2026", name), []byte(text.(string)), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("..2026", filepath.Join(dir, "..data")); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "shaperd.toml")
}

// checkPorts checks that the ports of a container are those of its configuration, and that probes and
// the Service use them.
func checkPorts(t *testing.T, container object, config string, service object) {
	t.Helper()
	ports := map[any]any{}
	for _, p := range at(t, container, "ports").([]any) {
		ports[at(t, p, "name")] = at(t, p, "containerPort")
		if !strings.Contains(config, fmt.Sprintf(`0.0.0.0:%v"`, at(t, p, "containerPort"))) {
			t.Errorf("nothing listens at port %v", p)
		}
	}
	for probe, path := range map[string]string{"startupProbe": "/healthz", "readinessProbe": "/ready", "livenessProbe": "/healthz"} {
		get := at(t, container, probe, "httpGet")
		if at(t, get, "path") != path || at(t, get, "port") != "metrics" || ports["metrics"] != 9464. {
			t.Errorf("%s asks %v", probe, get)
		}
	}
	if service != nil {
		if target := at(t, service, "spec", "ports", 0, "targetPort"); ports[target] == nil {
			t.Errorf("the Service sends to port %v", target)
		}
	}
}

// containerArgs returns the arguments of a container, with the path of the configuration replaced.
func containerArgs(t *testing.T, container object, config string) (args []string) {
	t.Helper()
	for _, a := range at(t, container, "args").([]any) {
		args = append(args, a.(string))
	}
	i := slices.Index(args, "/etc/shaperd/shaperd.toml")
	if i < 0 {
		t.Fatalf("arguments %q", args)
	}
	args[i] = config
	return args
}

// checkCapabilities checks that a container has the capabilities that the drop-in of the unit has.
func checkCapabilities(t *testing.T, container object) {
	t.Helper()
	var want []string
	for line := range strings.Lines(readFile(t, "../../systemd/packet-plane.conf")) {
		if names, ok := strings.CutPrefix(line, "AmbientCapabilities="); ok {
			want = append(want, strings.Fields(names)...)
		}
	}
	var got []string
	for _, name := range at(t, container, "securityContext", "capabilities", "add").([]any) {
		got = append(got, "CAP_"+name.(string))
	}
	slices.Sort(want)
	slices.Sort(got)
	if d := cmp.Diff(want, got); d != "" || len(want) == 0 {
		t.Errorf("capabilities: %s", d)
	}
}

func binary(t *testing.T) string {
	t.Helper()
	path, err := lab.Binary()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// runPod runs shaperd with the arguments and the configuration of a container in a network namespace,
// and checks that its probes get what they want, until it is told to stop.
func runPod(t *testing.T, container object, args []string) {
	t.Helper()
	pod, err := lab.NewHost("pod")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pod.Remove)
	d, err := lab.StartProcess(pod.Start, exec.Command(binary(t), append(args, "--control", filepath.Join(t.TempDir(), "c"))...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Kill)
	probe := func(name string) (code int) {
		path := at(t, container, name, "httpGet", "path").(string)
		_ = pod.Do(func() (err error) {
			code, _, err = testutil.Get("127.0.0.1:9464", path)
			return err
		})
		return code
	}
	testutil.WaitFor(t, "the start-up probe", func() bool { return probe("startupProbe") == 200 })
	testutil.WaitFor(t, "the readiness probe", func() bool { return probe("readinessProbe") == 200 })
	if code := probe("livenessProbe"); code != 200 {
		t.Errorf("the liveness probe: %d", code)
	}
	if err := d.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := d.AwaitExit(30 * time.Second); err != nil {
		t.Errorf("%v\n%s", err, &d.Log)
	}
	if strings.Contains(d.Log.String(), "first_byte_timeout") {
		t.Errorf("warnings:\n%s", &d.Log)
	}
}

// TestKubernetes_Mistakes checks that the validation finds mistakes.
func TestKubernetes_Mistakes(t *testing.T) {
	all := schemas(t)
	text := readFile(t, "../../configs/kubernetes/sidecar.yaml")
	for was, tt := range map[string]struct{ is, want string }{
		"readinessProbe:":      {"readinesProbe:", "readinesProbe"},
		"replicas: 2":          {"replicas: two", "replicas"},
		"selector:\n    match": {"selectors:\n    match", "selector"},
		"apps/v1":              {"apps/v1beta1", "there is no schema"},
		"periodSeconds: 10":    {"periodSeconds: 10s", "periodSeconds"},
		"- name: limited":      {"- nam: limited", "nam"},
	} {
		if !bytes.Contains([]byte(text), []byte(was)) {
			t.Fatalf("the example has no %q", was)
		}
		err := validate(all, readManifest(t, strings.Replace(text, was, tt.is, 1))["Deployment"])
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", tt.is, err)
		}
	}
}
