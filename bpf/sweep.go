package bpf

import (
	"fmt"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
)

// loadSweeper starts the timer that expires idle connections, with the programs of this daemon. It
// continues without the daemon.
func (k *kernel) loadSweeper() error {
	var program struct {
		Sweep *ebpf.Program `ebpf:"shaperd_sweep"`
	}
	if err := k.load(kernelConfig{}, nil, &program); err != nil {
		return fmt.Errorf("load connection sweeper: %w", err)
	}
	defer program.Sweep.Close()
	return startSweeper(program.Sweep)
}

// startSweeper runs the program that starts the timer, and retries while memory is short.
func startSweeper(p *ebpf.Program) error {
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		result, err := p.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
		if err == nil && result != 0 {
			err = syscall.Errno(-int32(result))
		}
		if err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("start connection sweeper: %w", err)
		}
	}
}
