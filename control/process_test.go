package control

import (
	"testing"
	"time"
)

// A status after a pause without requests covers the CPU time of the pause.
func TestMeasureProcess_AfterPause(t *testing.T) {
	var s cachedStatus
	s.measureProcess(time.Now())
	now := time.Now().Add(time.Minute)
	for range 100_000_000 {
		continue // takes some
	}
	if got := s.measureProcess(now).CPUCores; got <= 0 {
		t.Errorf("after a minute %v CPUs are in use", got)
	}
}
