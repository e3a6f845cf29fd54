package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
)

// A Redis is a running redis-server that writes nothing to disk.
type Redis struct {
	*Process
	dir string
}

// StartRedis starts a server with further arguments at an address of the host, and waits until it
// listens.
func StartRedis(ctx context.Context, h *Host, at netip.AddrPort, args ...string) (*Redis, error) {
	dir, err := TempDir()
	if err != nil {
		return nil, err
	}
	r := &Redis{dir: dir}
	r.Process, err = StartProcess(h.Start, exec.Command("redis-server", append([]string{
		"--bind", at.Addr().String(), "--port", fmt.Sprint(at.Port()), "--protected-mode", "no",
		"--save", "", "--appendonly", "no", "--dir", dir,
	}, args...)...))
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	if err := r.AwaitListening(ctx, h, at, false); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// Close kills the server and removes its directory.
func (r *Redis) Close() error {
	r.Kill()
	return os.RemoveAll(r.dir)
}
