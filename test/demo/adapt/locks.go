package main

import (
	"bufio"
	"net"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// lockServerVerb makes this program the server with locks.
const lockServerVerb = "serve-locks"

const (
	reading = 4 * time.Millisecond // of a disk, before the lock
	holding = time.Millisecond     // of the processor, with the lock
)

// serveLocks answers a question a connection by a thread of its own, which waits for a disk, and then spins for the one
// lock. Threads that spin take the processors from the one that has the lock, so the more there are the fewer are
// answered. It returns when it fails.
func serveLocks(address string) error {
	runtime.GOMAXPROCS(256) // each has a thread that the kernel schedules
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	var lock atomic.Bool
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			if _, err := bufio.NewReader(c).ReadByte(); err != nil {
				return
			}
			time.Sleep(reading)
			runtime.LockOSThread()
			for !lock.CompareAndSwap(false, true) {
			}
			for start := threadTime(); threadTime()-start < holding; {
			}
			lock.Store(false)
			runtime.UnlockOSThread()
			c.Write([]byte("a"))
		}()
	}
}

// threadTime is the processor time of this thread.
func threadTime() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t)
	return time.Duration(t.Nano())
}
