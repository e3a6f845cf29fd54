package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// A program is what runs on the gateways.
type program struct {
	name, note string
	faults     bool // whether faults concern it; otherwise only the first phase runs
	start      func(ctx context.Context, b binaries, s *site, gateway int) (*running, error)
}

// Running is a program on a gateway.
type running struct {
	*lab.Process
	stop func() error // returns an error if it had exited
}

// shaperd is the first, and the one that must pass the checks.
var programs = [...]program{
	{"shaperd", "a limit with shared = true, and Redis as its store", true, startShared},
	{"HAProxy", "bwlim with a stick table that its peers share", true, startHAProxy},
	{"per hit", "Redis is asked before each chunk, as by Envoy's ratelimit", true, startPerHit},
	{"thirds", "shaperd without a store: each gateway has a third", false, startThirds},
}

// binaries are the paths of the programs.
type binaries struct {
	shaperd, perhit string
	haproxy         []string // with its own C library
}

// findBinaries locates the programs. make demo-cluster puts the peers into a directory.
func findBinaries(shaperd, peers string) (b binaries, err error) {
	if b.shaperd, err = filepath.Abs(shaperd); err != nil {
		return b, err
	}
	if peers, err = filepath.Abs(peers); err != nil {
		return b, err
	}
	b.perhit, b.haproxy = filepath.Join(peers, "perhit"), lab.HAProxy(peers)
	for _, path := range append([]string{b.shaperd, b.perhit}, b.haproxy...) {
		if _, err := os.Stat(path); strings.HasPrefix(path, "/") && err != nil {
			return b, fmt.Errorf("%w: run \"make demo-cluster\", which builds and installs it", err)
		}
	}
	return b, nil
}

// sharedConfig returns shaperd's configuration of a gateway.
func sharedConfig(gateway int, store string) string {
	return fmt.Sprintf(`[daemon]
metrics = %q

[shared]
hosts = %d
%s
[[listen]]
name       = "gateway"
address    = "tcp://%v"
downstream = "%v"

[[limit]]
name   = "downstream"
match  = { listen = ["gateway"] }
rate   = "%dMbit/s"
shared = true
`, lab.MetricsAddr, gateways, store, atGateway(gateway), atDownstream, rate*8/1_000_000)
}

func startShared(ctx context.Context, b binaries, s *site, gateway int) (*running, error) {
	return startShaperd(ctx, b, s, gateway, fmt.Sprintf("name  = %q\nstore = [\"redis://%v\"]\n", gatewayName(gateway), atStore))
}

func startThirds(ctx context.Context, b binaries, s *site, gateway int) (*running, error) {
	return startShaperd(ctx, b, s, gateway, "")
}

func startShaperd(ctx context.Context, b binaries, s *site, gateway int, store string) (*running, error) {
	d, err := lab.StartDaemon(ctx, lab.DaemonOptions{
		Binary: b.shaperd, Host: s.gateways[gateway], Config: sharedConfig(gateway, store),
		Args: []string{"--drain-timeout", "0s"},
	})
	if err != nil {
		return nil, err
	}
	return &running{d.Process, func() error { return d.Stop(6 * time.Second) }}, nil
}

// haproxyConfig returns HAProxy's configuration of a gateway.
func haproxyConfig(gateway int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "global\n  maxconn 1000\n  localpeer %s\n", gatewayName(gateway))
	b.WriteString("defaults\n  mode tcp\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n")
	b.WriteString("peers gateways\n")
	for i := range gateways {
		fmt.Fprintf(&b, "  peer %s %v:10000\n", gatewayName(i), gatewayAddr(i))
	}
	fmt.Fprintf(&b, "frontend gateway\n  bind %v\n", atGateway(gateway))
	fmt.Fprintf(&b, "  filter bwlim-in downstream limit %d key int(1) table rates min-size 2896\n", rate)
	b.WriteString("  tcp-request content set-bandwidth-limit downstream\n  default_backend downstream\n")
	fmt.Fprintf(&b, "backend downstream\n  server downstream %v\n", atDownstream)
	b.WriteString("backend rates\n  stick-table type integer size 10 expire 60s store bytes_in_rate(1s) peers gateways\n")
	return b.String()
}

func startHAProxy(ctx context.Context, b binaries, s *site, gateway int) (*running, error) {
	dir, err := lab.TempDir()
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, "haproxy.cfg")
	if err := os.WriteFile(path, []byte(haproxyConfig(gateway)), 0o644); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	r, err := startPeer(ctx, s, gateway, b.haproxy[0], append(slices.Clone(b.haproxy[1:]), "-db", "-f", path)...)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	kill := r.stop
	r.stop = func() error { return errors.Join(kill(), os.RemoveAll(dir)) }
	return r, nil
}

func startPerHit(ctx context.Context, b binaries, s *site, gateway int) (*running, error) {
	return startPeer(ctx, s, gateway, b.perhit, atGateway(gateway).String(), atDownstream.String(), atStore.String(), fmt.Sprint(rate))
}

// startPeer starts a program on a gateway, and waits until it listens.
func startPeer(ctx context.Context, s *site, gateway int, name string, args ...string) (*running, error) {
	h := s.gateways[gateway]
	p, err := lab.StartProcess(h.Start, exec.Command(name, args...))
	if err != nil {
		return nil, err
	}
	r := &running{p, func() (err error) {
		if !p.Running() {
			err = p.Errorf("it exited unexpectedly")
		}
		p.Kill()
		return err
	}}
	if err := p.AwaitListening(ctx, h, atGateway(gateway), false); err != nil {
		return nil, errors.Join(err, r.stop())
	}
	return r, nil
}
