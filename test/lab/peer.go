package lab

import (
	"context"
	"errors"
	"fmt"
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

// StartHAProxy starts HAProxy inside a host, between two addresses. options are those of its server, such as "maxconn 20".
func (b Binaries) StartHAProxy(ctx context.Context, h *Host, outer, inner netip.AddrPort, options string) (p *Process, stop func() error, err error) {
	return StartPeer(ctx, h, fmt.Sprintf(`global
	maxconn 2000
defaults
	mode tcp
	timeout connect 5s
	timeout client 1m
	timeout server 1m
	timeout queue 1m
listen l
	bind %s
	server one %s %s
`, outer, inner, options), outer, func(path string) []string { return append(b.HAProxy, "-db", "-f", path) })
}
