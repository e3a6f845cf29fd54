package conn

import (
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"shaperd/leaky"
)

// headroom is what the process may still take of the host: connections that are there
// go on when there is little, and new ones wait or are shed.
type headroom struct {
	descriptors int // that the process may have
	others      int // that are not the loop's sockets and pipes
	sockets     int // watched

	memory atomic.Int32 // of its control group, in percent
	stop   chan struct{}
}

const (
	// enough is the percentage of descriptors or memory in use beyond which no
	// connection is accepted, and no UDP flow opened.
	enough = 95

	// tooMuch is the percentage beyond which those that have been accepted are not
	// connected any more.
	tooMuch = 98

	// overloadRest is for how long a port rests that may not or cannot accept.
	overloadRest = leaky.Second / 50

	memoryEvery = 200 * time.Millisecond
)

func newHeadroom() *headroom {
	h := &headroom{descriptors: math.MaxInt32, stop: make(chan struct{})}
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil && limit.Cur < math.MaxInt32 {
		h.descriptors = int(limit.Cur)
	}
	if used, err := os.ReadDir("/proc/self/fd"); err == nil {
		h.others = len(used)
	}
	if folder := memoryGroup(); folder != "" {
		go h.watchMemory(folder)
	}
	return h
}

func (h *headroom) close() { close(h.stop) }

// short reports whether more than percent of what there is is in use.
func (l *loop) short(percent int) bool {
	h := l.headroom
	used := h.others + h.sockets + 2*l.pipeCount
	return used*100 >= h.descriptors*percent || int(h.memory.Load()) >= percent
}

// memoryGroup returns the folder of the nearest control group with a bound on memory,
// or "".
func memoryGroup() string {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::")
		for ok {
			folder := filepath.Join("/sys/fs/cgroup", path)
			if n := number(folder, "memory.max"); n > 0 {
				return folder
			}
			if path == "/" { // in a container it is that of the container
				break
			}
			path = filepath.Dir(path)
		}
	}
	return ""
}

// number reads a number from a file, or 0.
func number(folder, name string) int64 {
	text, _ := os.ReadFile(filepath.Join(folder, name))
	n, _ := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return n
}

// watchMemory looks after how much of its memory a control group uses. What the kernel
// can take back at once, such as files it has read, is not counted.
func (h *headroom) watchMemory(folder string) {
	tick := time.NewTicker(memoryEvery)
	defer tick.Stop()
	for {
		percent := int64(0)
		if most := number(folder, "memory.max"); most > 0 {
			percent = 100 * (number(folder, "memory.current") - inactiveFile(folder)) / most
		}
		h.memory.Store(int32(percent))
		select {
		case <-tick.C:
		case <-h.stop:
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
