//go:build profile

package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"syscall"
)

// In a build with the tag profile, the environment variable SHAPERD_PROFILE names a
// folder. Between SIGUSR1 and SIGUSR2 the daemon profiles itself into cpu.pprof; the
// allocations are the difference of allocs-before.pprof and allocs.pprof.
func init() {
	dir := os.Getenv("SHAPERD_PROFILE")
	if dir == "" {
		return
	}
	runtime.MemProfileRate = 16 << 10
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1, syscall.SIGUSR2)
	go func() {
		for s := range signals {
			if err := profile(dir, s == syscall.SIGUSR1); err != nil {
				fmt.Fprintf(os.Stderr, "shaperd: profile: %v\n", err)
			}
		}
	}()
}

func profile(dir string, begin bool) error {
	name := "allocs.pprof"
	if begin {
		name = "allocs-before.pprof"
	} else {
		pprof.StopCPUProfile()
	}
	runtime.GC() // the profile has allocations up to the last collection
	f, err := os.Create(filepath.Join(dir, name))
	if err != nil {
		return err
	}
	err = errors.Join(pprof.Lookup("allocs").WriteTo(f, 0), f.Close())
	if err != nil || !begin {
		return err
	}
	if f, err = os.Create(filepath.Join(dir, "cpu.pprof")); err != nil {
		return err
	}
	return pprof.StartCPUProfile(f) // runs until StopCPUProfile
}
