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

// A folder of pins is one process's at a time, though each that leaves it removes it, and
// others look whether it is alive.
func TestFolderIsOnesAtATime(t *testing.T) {
	pins := filepath.Join(pins, t.Name())
	var all sync.WaitGroup
	var inside, took atomic.Int64
	for range 4 {
		all.Go(func() {
			for range 300 {
				f, err := occupy(pins)
				if err != nil {
					continue // the others may be slow
				}
				took.Add(1)
				if n := inside.Add(1); n != 1 {
					t.Errorf("%d are in it", n)
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
		t.Errorf("it was had %d times", took.Load())
	}
}

// Who only looks whether a daemon is alive keeps none from its start.
func TestLookKeepsNobodyOut(t *testing.T) {
	pins := filepath.Join(pins, t.Name())
	if err := os.Mkdir(pins, 0o700); err != nil {
		t.Fatal(err)
	}
	look, err := os.Open(pins)
	if err == nil {
		err = unix.Flock(int(look.Fd()), unix.LOCK_SH)
	}
	if err != nil {
		t.Fatal(err)
	}
	looks := make(chan struct{})
	go func() {
		<-looks
		look.Close()
	}()
	close(looks)
	f, err := occupy(pins)
	if err != nil {
		t.Fatal(err)
	}
	if !Alive(pins) {
		t.Error("it is not alive")
	}
	if err := Detach(pins); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("detach under a lock: %v", err)
	}
	f.Close()
	if err := errors.Join(Detach(pins), Detach(pins)); err != nil {
		t.Error(err)
	}
}
