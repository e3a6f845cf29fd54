package shedding

import (
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
	root string // "/", but for tests

	at       time.Time
	counters map[string]uint64 // the last values, by file and name
}

// cpu returns which part of the time of the processors was in use, or of the quota of the control group if that is more.
func (h *host) cpu(now time.Time) (float64, error) {
	text, err := h.read("proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(text, "\n")
	var busy, all uint64
	for i, field := range strings.Fields(line)[1:] {
		n, err := strconv.ParseUint(field, 10, 64)
		if err != nil || i == 8 { // guests, which are counted as users too
			break
		}
		if all += n; i != 3 && i != 4 { // idle, and idle while a disk works
			busy += n
		}
	}
	used := ratio(h.since("busy", busy), h.since("all", all))
	for folder := range h.groups() {
		quota, _ := h.read(filepath.Join(folder, "cpu.max"))
		fields := strings.Fields(quota)
		if len(fields) != 2 || fields[0] == "max" {
			continue
		}
		most, _ := strconv.ParseFloat(fields[0], 64)
		period, _ := strconv.ParseFloat(fields[1], 64)
		stat, err := h.read(filepath.Join(folder, "cpu.stat"))
		if n, ok := value(stat, "usage_usec "); err == nil && ok && most > 0 {
			spent := h.since(folder, n)
			if took := now.Sub(h.at).Seconds(); !h.at.IsZero() && took > 0 {
				used = max(used, float64(spent)/1e6/took/(most/period))
			}
		}
	}
	return used, nil
}

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
		current, _ := h.read(filepath.Join(folder, "memory.current"))
		stat, _ := h.read(filepath.Join(folder, "memory.stat"))
		now, _ := strconv.ParseUint(strings.TrimSpace(current), 10, 64)
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
		text, err := "", error(fs.ErrNotExist)
		for folder := range h.groups() {
			if text, err = h.read(filepath.Join(folder, what+".pressure")); err == nil {
				break
			}
		}
		if err != nil {
			if text, err = h.read("proc/pressure/" + what); err != nil {
				return 0, fmt.Errorf("the kernel does not tell of pressure: %w", err)
			}
		}
		line, _, _ := strings.Cut(text, "\n")
		_, total, ok := strings.Cut(line, "total=")
		n, err := strconv.ParseUint(total, 10, 64)
		if !ok || !strings.HasPrefix(line, "some ") || err != nil {
			return 0, fmt.Errorf("cannot read %q", line)
		}
		waited := h.since(what+".pressure", n)
		if took := now.Sub(h.at).Seconds(); !h.at.IsZero() && took > 0 {
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

// since returns by how much a counter has grown since the last call; the first time it is 0.
func (h *host) since(name string, n uint64) uint64 {
	if h.counters == nil {
		h.counters = map[string]uint64{}
	}
	last, known := h.counters[name]
	h.counters[name] = n
	if !known || n < last {
		return 0
	}
	return n - last
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
