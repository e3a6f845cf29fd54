package bpf

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// Only one process at a time holds a pin directory, though each holder removes it, and others
// check whether it is alive.
func TestLockPins_Exclusive(t *testing.T) {
	pins := filepath.Join(pins, t.Name())
	var all sync.WaitGroup
	var inside, took atomic.Int64
	for range 4 {
		all.Go(func() {
			for range 300 {
				f, err := lockPins(pins)
				if err != nil {
					continue // the others may be slow
				}
				took.Add(1)
				if n := inside.Add(1); n != 1 {
					t.Errorf("%d processes hold it", n)
				}
				Alive(pins)
				runtime.Gosched()
				inside.Add(-1)
				if err := os.Remove(pins); err != nil {
					t.Error(err)
				}
				f.Close()
			}
		})
	}
	all.Wait()
	if took.Load() < 300 {
		t.Errorf("it was held %d times", took.Load())
	}
}

// A process that only checks whether a daemon is alive does not prevent its start.
func TestLockPins_WaitsForProbe(t *testing.T) {
	pins := filepath.Join(pins, t.Name())
	if err := os.Mkdir(pins, 0o700); err != nil {
		t.Fatal(err)
	}
	probe, err := os.Open(pins)
	if err == nil {
		err = unix.Flock(int(probe.Fd()), unix.LOCK_SH)
	}
	if err != nil {
		t.Fatal(err)
	}
	release := make(chan struct{})
	go func() {
		<-release
		probe.Close()
	}()
	close(release)
	f, err := lockPins(pins)
	if err != nil {
		t.Fatal(err)
	}
	if !Alive(pins) {
		t.Error("not alive")
	}
	if err := Detach(pins); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("detach under a lock: %v", err)
	}
	f.Close()
	if err := errors.Join(Detach(pins), Detach(pins)); err != nil {
		t.Error(err)
	}
}
