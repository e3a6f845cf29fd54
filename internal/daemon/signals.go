package daemon

import (
	"context"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// stopSignals returns a context that the first SIGTERM or SIGINT cancels, and a channel that
// receives the following ones.
func stopSignals(ctx context.Context) (_ context.Context, force <-chan os.Signal, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	first, second := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(first, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		select {
		case <-first:
			signal.Notify(second, syscall.SIGTERM, syscall.SIGINT)
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, second, func() { cancel(); signal.Stop(first); signal.Stop(second) }
}

// blockSignals keeps the signals that stop or reload the daemon from the thread of the caller,
// until the returned function is called. The kernel delivers a signal to one thread, preferably
// the first one: a thread that hangs in a system call would never handle it.
func blockSignals() (undo func()) {
	runtime.LockOSThread()
	var block, was unix.Sigset_t
	const bits = 8 * unsafe.Sizeof(block.Val[0])
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT} {
		block.Val[uintptr(s-1)/bits] |= 1 << (uintptr(s-1) % bits)
	}
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, &block, &was); err != nil {
		return runtime.UnlockOSThread
	}
	return func() {
		_ = unix.PthreadSigmask(unix.SIG_SETMASK, &was, nil)
		runtime.UnlockOSThread()
	}
}
