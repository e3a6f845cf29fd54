package bpf

import (
	"fmt"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
)

// sweep starts the timer that ends connections which are silent for too long, by the programs of
// this daemon. It goes on without the daemon.
func (k *kernel) sweep() error {
	var program struct {
		Sweep *ebpf.Program `ebpf:"shaperd_sweep"`
	}
	if err := k.load(kernelAttachment{}, nil, &program); err != nil {
		return fmt.Errorf("load what ends connections: %w", err)
	}
	defer program.Sweep.Close()
	return startSweeper(program.Sweep)
}

// startSweeper runs the program that starts the timer, until there is memory for it.
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
			return fmt.Errorf("start the timer of connections: %w", err)
		}
	}
}
