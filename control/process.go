package control

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control/metrics"
	"shaperd.dev/shaperd/leaky/pacer"
)

// cachedStatus is the part of the status that is too expensive to compute for each request.
type cachedStatus struct {
	mu       sync.Mutex
	at       time.Time
	packets  metrics.PacketStatus
	found    bool
	err      error
	process  api.Process
	cpuTimes []cpuTime // over the last 10 s, and at least two: requests may be rarer
}

type cpuTime struct {
	at  time.Time
	cpu time.Duration
}

// processStart is about when the process started.
var processStart = time.Now()

// cacheTime is the maximum age of a cachedStatus.
const cacheTime = 2 * time.Second

// refresh returns the status of the packet plane and of the process, at most cacheTime old.
func (v *view) refresh() (_ metrics.PacketStatus, found bool, process api.Process, err error) {
	s := &v.cached
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.at) >= cacheTime {
		s.packets, s.found, s.err = v.Packets.PacketStatus()
		s.at = time.Now() // not earlier: requests that waited for this use it, however long it took
		s.process = s.measureProcess(s.at)
		s.process.WakeupLatencyP99 = v.wakeupLatencyP99()
	}
	return s.packets, s.found, s.process, s.err
}

// measureProcess returns the resource usage of the process.
func (s *cachedStatus) measureProcess(now time.Time) api.Process {
	var p api.Process
	var usage unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &usage) == nil {
		cpu := time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
		if len(s.cpuTimes) == 0 {
			s.cpuTimes = append(s.cpuTimes, cpuTime{processStart, 0})
		}
		s.cpuTimes = append(s.cpuTimes, cpuTime{now, cpu})
		for len(s.cpuTimes) > 2 && now.Sub(s.cpuTimes[0].at) > 10*time.Second {
			s.cpuTimes = s.cpuTimes[1:]
		}
		p.CPU = cpu.Seconds()
		if first := s.cpuTimes[0]; now.After(first.at) {
			p.CPUCores = (cpu - first.cpu).Seconds() / now.Sub(first.at).Seconds()
		}
	}
	if text, err := os.ReadFile("/proc/self/statm"); err == nil {
		if fields := strings.Fields(string(text)); len(fields) > 1 {
			pages, _ := strconv.ParseUint(fields[1], 10, 64)
			p.Memory = pages * uint64(os.Getpagesize())
		}
	}
	if folder, err := os.Stat("/proc/self/fd"); err == nil && folder.Size() > 0 { // since Linux 6.2
		p.Descriptors = int(folder.Size())
	} else if entries, err := os.ReadDir("/proc/self/fd"); err == nil {
		p.Descriptors = len(entries)
	}
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil {
		p.MaxDescriptors = int(min(limit.Cur, 1<<31-1))
	}
	return p
}

func (v *view) wakeupLatencyP99() float64 {
	counts, _ := v.Proxy.Lateness()
	var all, seen uint64
	for _, n := range counts {
		all += n
	}
	for i, n := range counts {
		if seen += n; all > 0 && seen*100 >= all*99 {
			return pacer.LatenessBounds[min(i, len(pacer.LatenessBounds)-1)].Seconds()
		}
	}
	return 0
}
