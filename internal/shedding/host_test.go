package shedding

import (
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// files writes files below a new root, or removes those without text.
func files(t *testing.T, root string, texts map[string]string) {
	t.Helper()
	for name, text := range texts {
		path := filepath.Join(root, name)
		if text == "" {
			os.Remove(path)
			continue
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func want(t *testing.T, what string, got float64, err error, want float64) {
	t.Helper()
	if err != nil || math.Abs(got-want) > 1e-9 {
		t.Errorf("%s is %v, %v, want %v", what, got, err, want)
	}
}

func TestHost(t *testing.T) {
	const group = "sys/fs/cgroup/system.slice/x.service/"
	root := t.TempDir()
	h := host{root: root}
	files(t, root, map[string]string{
		"proc/stat":            "cpu  100 0 100 700 100 0 0 0 50 0\ncpu0 1 2 3\n",
		"proc/meminfo":         "MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable:    600 kB\n",
		"proc/self/cgroup":     "0::/system.slice/x.service\n",
		"proc/pressure/cpu":    "some avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
		"proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=5\n",
		group + "cpu.max":      "max 100000\n",
		group + "memory.max":   "max\n",
	})
	at := time.Unix(1000, 0)
	got, err := h.cpu(at)
	want(t, "cpu, at first", got, err, 0)
	got, err = h.memory()
	want(t, "memory of the host", got, err, 0.4)
	got, err = h.pressure(at)
	want(t, "pressure, at first", got, err, 0)

	files(t, root, map[string]string{
		"proc/stat":                                 "cpu  130 0 130 730 110 0 0 0 90 0\n",
		"proc/pressure/cpu":                         "some avg10=0.00 avg60=0.00 avg300=0.00 total=1400000\n",
		group + "cpu.max":                           "50000 100000\n",
		group + "cpu.stat":                          "usage_usec 1000000\nuser_usec 1\n",
		"sys/fs/cgroup/system.slice/memory.max":     "1000\n",
		"sys/fs/cgroup/system.slice/memory.current": "950\n",
		"sys/fs/cgroup/system.slice/memory.stat":    "anon 1\ninactive_file 50\n",
	})
	at = at.Add(2 * time.Second)
	got, err = h.cpu(at)
	want(t, "cpu of the host", got, err, 0.6)
	got, err = h.memory()
	want(t, "memory of the slice", got, err, 0.9)
	got, err = h.pressure(at)
	want(t, "pressure of the host", got, err, 0.2)

	files(t, root, map[string]string{
		group + "cpu.stat":        "usage_usec 1900000\n",
		group + "cpu.pressure":    "some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\n",
		group + "memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=1000005\n",
	})
	at = at.Add(2 * time.Second)
	got, err = h.cpu(at)
	want(t, "cpu of the quota", got, err, 0.9)
	got, err = h.pressure(at)
	want(t, "pressure of the group, at first", got, err, 0)

	at = at.Add(2 * time.Second)
	files(t, root, map[string]string{group + "cpu.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\n"})
	got, err = h.pressure(at)
	want(t, "pressure of the group", got, err, 0.5)

	at = at.Add(time.Hour) // in which nobody has looked
	files(t, root, map[string]string{
		group + "cpu.stat":     "usage_usec 182000000\n",
		group + "cpu.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=362500000\n",
	})
	got, err = h.cpu(at)
	want(t, "cpu of the quota, over an hour", got, err, 0.1)
	got, err = h.pressure(at)
	want(t, "pressure over an hour", got, err, 0.1)

	files(t, root, map[string]string{"sys/fs/cgroup/system.slice/memory.current": "", group + "cpu.stat": "nonsense\n"})
	if _, err := h.memory(); err == nil {
		t.Error("memory without memory.current")
	}
	if _, err := h.cpu(at); err == nil {
		t.Error("cpu of a quota without cpu.stat")
	}
	for _, text := range []string{"\n", "cpu garbage\n", "cpu 1 2 x 4 5\n", "intr 1 2 3 4 5\n"} {
		files(t, root, map[string]string{"proc/stat": text})
		if v, err := h.cpu(at); err == nil {
			t.Errorf("cpu is %v with %q", v, text)
		}
	}
	files(t, root, map[string]string{"proc/stat": "", "proc/meminfo": "MemTotal: 5 kB\n", group + "cpu.pressure": "nonsense\n"})
	if _, err := h.cpu(at); err == nil {
		t.Error("cpu without /proc/stat")
	}
	if _, err := h.memory(); err == nil {
		t.Error("memory without MemAvailable")
	}
	if _, err := h.pressure(at); err == nil {
		t.Error("pressure of nonsense")
	}
}

// The real files of this host can be read.
func TestHost_Real(t *testing.T) {
	h := host{root: "/"}
	first := time.Now()
	h.cpu(first)
	h.pressure(first)
	time.Sleep(200 * time.Millisecond)
	now := time.Now()
	for name, read := range map[string]func() (float64, error){
		"cpu": func() (float64, error) { return h.cpu(now) }, "memory": h.memory,
	} {
		v, err := read()
		most := 1.5 * time.Since(first).Seconds() / now.Sub(first).Seconds() // a stall after now adds to what was used until now
		if err != nil || v < 0 || v > most || name == "memory" && v == 0 {
			t.Errorf("%s is %v, %v", name, v, err)
		}
	}
	if v, err := h.pressure(now); err == nil && (v < 0 || v > 1) {
		t.Errorf("pressure is %v", v)
	}
}
