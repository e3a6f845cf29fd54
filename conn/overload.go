// Owner: any thread; what is not atomic does not change.

package conn

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/leaky"
)

// headroom is how many descriptors and how much memory the process may still use. When they are low,
// existing connections continue, and new ones wait or are shed.
type headroom struct {
	maxFDs   int          // limit of the process
	otherFDs int          // other than the sockets and pipes of the loops
	sockets  atomic.Int64 // watched by the loops
	pipes    atomic.Int64 // of the loops, of two descriptors each

	memoryPercent atomic.Int32 // in use, of the limit of its cgroup
	close         func()       // ends the watch of memory
}

const (
	// acceptWatermark is the percentage of descriptors or memory in use beyond which no connection is
	// accepted and no UDP flow is opened.
	acceptWatermark = 95

	// shedWatermark is the percentage beyond which accepted connections are closed instead of
	// connected.
	shedWatermark = 98

	// acceptPause is how long a port pauses when it may not or cannot accept.
	acceptPause = leaky.Second / 50

	memoryInterval = 200 * time.Millisecond
)

func newHeadroom() *headroom {
	ctx, stop := context.WithCancel(context.Background())
	h := &headroom{maxFDs: math.MaxInt32, close: stop}
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil && limit.Cur < math.MaxInt32 {
		h.maxFDs = int(limit.Cur)
	}
	if used, err := os.ReadDir("/proc/self/fd"); err == nil {
		h.otherFDs = len(used)
	}
	if folder := memoryCgroup(); folder != "" {
		go h.watchMemory(ctx, folder)
	}
	return h
}

// overloaded reports whether more than percent of the descriptors or the memory is in use.
func (l *loop) overloaded(percent int) bool {
	h := l.headroom
	used := h.descriptors()
	return used*100 >= h.maxFDs*percent || int(h.memoryPercent.Load()) >= percent
}

// Descriptors returns how many descriptors are in use, and how many the process may have.
func (p *Proxy) Descriptors() (used, most int) {
	return p.headroom.descriptors(), p.headroom.maxFDs
}

func (h *headroom) descriptors() int { return h.otherFDs + int(h.sockets.Load()+2*h.pipes.Load()) }

// memoryCgroup returns the directory of the nearest cgroup with a memory limit, or "".
func memoryCgroup() string {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::")
		for ok {
			folder := filepath.Join("/sys/fs/cgroup", path)
			if n := readNumber(folder, "memory.max"); n > 0 {
				return folder
			}
			if path == "/" { // the root, or that of the container
				break
			}
			path = filepath.Dir(path)
		}
	}
	return ""
}

// readNumber reads a number from a file, or returns 0.
func readNumber(folder, name string) int64 {
	text, _ := os.ReadFile(filepath.Join(folder, name))
	n, _ := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return n
}

// watchMemory monitors the memory usage of a cgroup. Memory that the kernel can reclaim at once, such
// as page cache, is not counted.
func (h *headroom) watchMemory(ctx context.Context, folder string) {
	tick := time.NewTicker(memoryInterval)
	defer tick.Stop()
	for {
		percent := int64(0)
		if limit := readNumber(folder, "memory.max"); limit > 0 {
			percent = 100 * (readNumber(folder, "memory.current") - inactiveFile(folder)) / limit
		}
		h.memoryPercent.Store(int32(percent))
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func inactiveFile(folder string) int64 {
	text, _ := os.ReadFile(filepath.Join(folder, "memory.stat"))
	for line := range strings.Lines(string(text)) {
		if n, ok := strings.CutPrefix(line, "inactive_file "); ok {
			bytes, _ := strconv.ParseInt(strings.TrimSpace(n), 10, 64)
			return bytes
		}
	}
	return 0
}
