package shedding

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// host reads how much of a host and of the control group of this process is in use. Each value is since the last call,
// except that of the memory.
type host struct {
	root     string // "/", but for tests
	counters map[string]counter
}

// counter is the last value of a counter.
type counter struct {
	n  uint64
	at time.Time
}

// cpu returns which part of the time of the processors was in use, or of the quota of the control group if that is more.
func (h *host) cpu(now time.Time) (float64, error) {
	text, err := h.read("proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(text, "\n")
	fields := strings.Fields(line)
	if len(fields) < 5 || fields[0] != "cpu" {
		return 0, fmt.Errorf("proc/stat begins with %q", line)
	}
	var busy, all uint64
	for i, field := range fields[1:min(len(fields), 9)] { // the others are guests, which are counted as users too
		n, err := strconv.ParseUint(field, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("proc/stat begins with %q", line)
		}
		if all += n; i != 3 && i != 4 { // idle, and idle while a disk works
			busy += n
		}
	}
	newlyBusy, _ := h.since("busy", busy, now)
	passed, _ := h.since("all", all, now)
	used := ratio(newlyBusy, passed)
	for folder := range h.groups() {
		quota, _ := h.read(filepath.Join(folder, "cpu.max"))
		fields := strings.Fields(quota)
		if len(fields) != 2 || fields[0] == "max" {
			continue
		}
		most, err1 := strconv.ParseFloat(fields[0], 64)
		period, err2 := strconv.ParseFloat(fields[1], 64)
		stat, err3 := h.read(filepath.Join(folder, "cpu.stat"))
		n, ok := value(stat, "usage_usec ")
		if err := errors.Join(err1, err2, err3); err != nil || !ok || most <= 0 {
			return 0, fmt.Errorf("cannot read how much of the quota in %s is in use: %w", folder, cmp.Or(err, errUnknown))
		}
		if spent, took := h.since(folder, n, now); took > 0 {
			used = max(used, float64(spent)/1e6/took/(most/period))
		}
	}
	return used, nil
}

var errUnknown = errors.New("unknown text")

// memory returns which part of the memory of the narrowest control group is in use, or of the host if that is more. What the
// kernel can reclaim at once does not count.
func (h *host) memory() (float64, error) {
	text, err := h.read("proc/meminfo")
	if err != nil {
		return 0, err
	}
	total, ok1 := value(text, "MemTotal:")
	available, ok2 := value(text, "MemAvailable:")
	if !ok1 || !ok2 || total == 0 {
		return 0, errors.New("proc/meminfo has no MemAvailable")
	}
	used := 1 - ratio(available, total)
	for folder := range h.groups() {
		most, err := h.read(filepath.Join(folder, "memory.max"))
		n, notNumber := strconv.ParseUint(strings.TrimSpace(most), 10, 64)
		if err != nil || notNumber != nil || n == 0 {
			continue
		}
		current, err1 := h.read(filepath.Join(folder, "memory.current"))
		now, err2 := strconv.ParseUint(strings.TrimSpace(current), 10, 64)
		if err := errors.Join(err1, err2); err != nil {
			return 0, fmt.Errorf("cannot read how much memory in %s is in use: %w", folder, err)
		}
		stat, _ := h.read(filepath.Join(folder, "memory.stat"))
		cache, _ := value(stat, "inactive_file ")
		used = max(used, ratio(now-min(cache, now), n))
	}
	return used, nil
}

// pressure returns in which part of the time something has waited for a processor, or for memory if that is more, in the
// control group of this process or, if that does not tell, on the host.
func (h *host) pressure(now time.Time) (float64, error) {
	var most float64
	for _, what := range []string{"cpu", "memory"} {
		name, text, err := "", "", error(fs.ErrNotExist)
		for folder := range h.groups() {
			name = filepath.Join(folder, what+".pressure")
			if text, err = h.read(name); err == nil {
				break
			}
		}
		if err != nil {
			name = "proc/pressure/" + what
			if text, err = h.read(name); err != nil {
				return 0, fmt.Errorf("the kernel does not tell of pressure: %w", err)
			}
		}
		line, _, _ := strings.Cut(text, "\n")
		_, total, ok := strings.Cut(line, "total=")
		n, err := strconv.ParseUint(total, 10, 64)
		if !ok || !strings.HasPrefix(line, "some ") || err != nil {
			return 0, fmt.Errorf("%s begins with %q", name, line)
		}
		if waited, took := h.since(name, n, now); took > 0 {
			most = max(most, float64(waited)/1e6/took)
		}
	}
	return min(most, 1), nil
}

// groups yields the directories of the control group of this process and those around it, from the inside out, relative to
// the root. The root of all groups has no limits.
func (h *host) groups() iter.Seq[string] {
	return func(yield func(string) bool) {
		text, _ := h.read("proc/self/cgroup")
		for line := range strings.Lines(text) {
			path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::")
			for ok {
				if !yield(filepath.Join("sys/fs/cgroup", path)) || path == "/" {
					return
				}
				path = filepath.Dir(path)
			}
		}
	}
}

// since returns by how much a counter has grown since the last call, and in how many seconds; 0 the first time.
func (h *host) since(name string, n uint64, now time.Time) (grown uint64, seconds float64) {
	if h.counters == nil {
		h.counters = map[string]counter{}
	}
	last, known := h.counters[name]
	h.counters[name] = counter{n, now}
	if !known || n < last.n {
		return 0, 0
	}
	return n - last.n, now.Sub(last.at).Seconds()
}

func (h *host) read(name string) (string, error) {
	b, err := os.ReadFile(filepath.Join(h.root, name))
	return string(b), err
}

// value returns the number after a name in a text.
func value(text, name string) (uint64, bool) {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			if fields := strings.Fields(rest); len(fields) > 0 {
				n, err := strconv.ParseUint(fields[0], 10, 64)
				return n, err == nil
			}
		}
	}
	return 0, false
}

func ratio(part, whole uint64) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}
