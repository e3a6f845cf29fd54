package lab

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"time"
)

// Binaries are the programs that a demonstration compares.
type Binaries struct {
	Shaperd string   // absolute path
	HAProxy []string // command
}

// ParseDemo parses the command line of a demonstration, with flags for the paths of its programs, and removes what an
// earlier run has left. It needs root.
func ParseDemo(flags *flag.FlagSet, args []string) (b Binaries, err error) {
	shaperd := flags.String("bin", filepath.Join("bin", "shaperd"), "`path` of the daemon")
	peers := flags.String("peers", filepath.Join("build", "peers"), "`directory` of HAProxy")
	if err := flags.Parse(args); err != nil {
		return b, err
	}
	if flags.NArg() > 0 {
		return b, fmt.Errorf("usage: %s takes no arguments", flags.Name())
	}
	if os.Geteuid() != 0 {
		return b, errors.New("network namespaces need root: run as root or with sudo")
	}
	if b.Shaperd, err = filepath.Abs(*shaperd); err != nil {
		return b, err
	}
	root, err := filepath.Abs(*peers)
	if err != nil {
		return b, err
	}
	b.HAProxy = HAProxy(root)
	return b, Sweep()
}

// NewPath creates a row with one client, a program at outer, and a server at inner. Both are IPv4 addresses that end in 1
// and 2, of two networks of 24 bits.
func NewPath(outer, inner netip.AddrPort) (*Row, error) {
	return NewRow(RowAddresses{
		Clients: []netip.Addr{outer.Addr().Next()}, Outer: []netip.Addr{outer.Addr()}, OuterBits: 24,
		Inner: inner.Addr().Prev(), Downstream: inner.Addr(), InnerBits: 24,
	})
}

// Ask connects from a host, sends a byte, and waits for up to 30 s until one comes back. The end of ctx ends that.
func (h *Host) Ask(ctx context.Context, to netip.AddrPort) error {
	c, err := h.Dial(ctx, netip.Addr{}, to, 10*time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return err
	}
	b := []byte("q")
	if _, err := c.Write(b); err != nil {
		return err
	}
	_, err = io.ReadFull(c, b)
	return err
}
