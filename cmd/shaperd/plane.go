package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"

	"shaperd/bpf"
	"shaperd/conn"
	"shaperd/control"
	"shaperd/leaky"
	"shaperd/shaper"
	"shaperd/shaper/config"
)

// packetPlane is the packet plane of a daemon, which is there only while the
// configuration names attachments: it needs privileges that the proxy does not.
type packetPlane struct {
	shaper *shaper.Shaper
	clock  *leaky.Clock
	proxy  *conn.Proxy
	log    *slog.Logger
	plane  *bpf.Plane
	shown  atomic.Pointer[bpf.Plane] // plane, for metrics
}

// PacketStatus returns what metrics show.
func (p *packetPlane) PacketStatus() (out control.PacketStatus, ok bool, err error) {
	plane := p.shown.Load()
	if plane == nil {
		return out, false, nil
	}
	s, err := plane.Status()
	if err != nil {
		return out, true, err
	}
	for _, pt := range s.Points {
		direction := config.Egress
		if pt.Ingress {
			direction = config.Ingress
		}
		a := control.Attachment{
			Name: pt.Attachment, Interface: pt.Interface, Direction: direction.String(), Mode: pt.Mode.String(), Before: pt.Before, Waits: pt.Waits,
		}
		if a.Err = pt.Err; a.Err == "" && pt.Bypass != "" {
			a.Err = "not enforced: " + pt.Bypass
		}
		a.Up = a.Err == ""
		if pt.Mode == bpf.Shape {
			a.Queue = &control.Queue{Packets: pt.Queue.Packets, Bytes: pt.Queue.Bytes, Drops: pt.Queue.Drops}
		}
		out.Attachments = append(out.Attachments, a)
	}
	out.Buckets = s.Buckets
	return out, true, nil
}

// Bucket returns how the bucket of a key is doing.
func (p *packetPlane) Bucket(i int, k shaper.Key) (shaper.BucketState, bool) {
	plane := p.shown.Load()
	if plane == nil {
		return shaper.BucketState{}, false
	}
	return plane.KeyBucket(i, k)
}

// bucketOf returns how the bucket of a flow is doing under limit i.
func (p *packetPlane) bucketOf(i int, f *shaper.Flow, r shaper.Route) (shaper.BucketState, bool) {
	plane := p.shown.Load()
	if plane == nil {
		return shaper.BucketState{}, false
	}
	return plane.Bucket(i, f, r)
}

// planeChange is a change of the packet plane that waits for the proxy's.
type planeChange struct {
	*packetPlane
	change *bpf.Change // nil when there is none, or none any more
	opened bool        // the plane was not there before
	ends   bool        // there are no attachments any more
}

func (p *packetPlane) prepare(l *loaded, policy *shaper.Policy) (*planeChange, error) {
	c := &planeChange{packetPlane: p, ends: len(l.attach) == 0}
	pins := l.config.Daemon.Pins
	if c.ends && p.plane == nil {
		// What an earlier daemon was to keep is not in this configuration.
		if _, err := os.Stat(pins); errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) || bpf.Alive(pins) {
			return c, nil // or it is another daemon's, which runs
		}
		if err := bpf.Detach(pins); err != nil {
			return nil, fmt.Errorf("what an earlier daemon attached is still in force: run \"shaperd detach --pins %s\" as root: %w", pins, err)
		}
		return c, nil
	}
	if p.plane == nil {
		plane, err := bpf.Open(p.shaper, p.clock, pins, l.config.Daemon.Buckets, p.log)
		if err != nil {
			return nil, err
		}
		p.plane, c.opened = plane, true
		p.proxy.Own(plane.Own)
	}
	change, err := p.plane.Prepare(l.attach, l.tcpListeners(), policy)
	if err != nil {
		c.cancel()
		return nil, err
	}
	c.change = change
	return c, nil
}

// commit puts the change in force. On an error all stays as it was, and it is still to be
// cancelled.
func (c *planeChange) commit() error {
	change := c.change
	c.change = nil // it ends by either
	if change == nil {
		return nil
	}
	return change.Commit()
}

// cancel leaves the plane as it was found.
func (c *planeChange) cancel() {
	if c.change != nil {
		c.change.Cancel()
	}
	if c.opened {
		c.proxy.Own(nil)
		c.plane.Release()
		c.plane = nil
	}
}

// done is what follows when both planes are changed.
func (c *planeChange) done() {
	if c.plane == nil {
		return
	}
	c.shown.Store(c.plane)
	if c.ends {
		c.close()
	}
}

// close ends the plane. What is to be kept while no daemon runs stays.
func (p *packetPlane) close() {
	if p.plane == nil {
		return
	}
	p.shown.Store(nil)
	p.proxy.Own(nil)
	if err := p.plane.Close(); err != nil {
		p.log.Error("detach", "err", err)
	}
	p.plane = nil
}
