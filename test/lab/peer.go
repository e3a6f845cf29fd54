package lab

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
)

// StartPeer starts a program inside a host that reads a configuration from a file, and waits until it listens for TCP at
// the address. command returns its command line for the path of the file, which is alone in its directory. stop kills
// the program and removes the directory.
func StartPeer(ctx context.Context, h *Host, config string, at netip.AddrPort, command func(path string) []string) (p *Process, stop func() error, err error) {
	dir, err := TempDir()
	if err != nil {
		return nil, nil, err
	}
	path := filepath.Join(dir, "config")
	remove := func() error { return RemoveDir(dir) }
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		return nil, nil, errors.Join(err, remove())
	}
	argv := command(path)
	p, err = StartProcess(h.Start, exec.Command(argv[0], argv[1:]...))
	if err == nil {
		if err = p.AwaitListening(ctx, h, at, false); err != nil {
			p.Kill()
		}
	}
	if err != nil {
		return nil, nil, errors.Join(err, remove())
	}
	return p, func() error { p.Kill(); return remove() }, nil
}
