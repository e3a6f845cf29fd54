package daemon

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/bpf"
	"shaperd.dev/shaperd/conn"
	"shaperd.dev/shaperd/control/metrics"
	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// packetPlane is the packet plane of a daemon. It exists only while the configuration has
// attachments, since it needs privileges that the proxy plane does not.
type packetPlane struct {
	shaper    *shaper.Shaper
	clock     *pacer.Clock
	proxy     *conn.Proxy
	log       *slog.Logger
	plane     *bpf.Plane
	published atomic.Pointer[bpf.Plane] // plane, for readers in other goroutines
	shares    packetShares
}

// PacketStatus returns the status for metrics and the API.
func (p *packetPlane) PacketStatus() (out metrics.PacketStatus, ok bool, err error) {
	plane := p.published.Load()
	if plane == nil {
		return out, false, nil
	}
	s, err := plane.Status()
	if err != nil {
		return out, true, err
	}
	for _, pt := range s.Points {
		a := api.AttachmentStatus{
			Name: pt.Attachment, Interface: pt.Interface, Direction: pt.Direction.String(), Mode: pt.Mode.String(), PrecedingPrograms: pt.PrecedingPrograms, UnmatchedPatterns: pt.UnmatchedPatterns,
		}
		if a.Error = pt.Err; a.Error == "" && pt.Uncovered != "" {
			a.Error = "not enforced: " + pt.Uncovered
		}
		a.Up = a.Error == ""
		if pt.Mode == shaper.AttachShape {
			queue := api.QueueStatus(pt.Queue)
			a.Queue = &queue
		}
		out.Attachments = append(out.Attachments, a)
	}
	out.Buckets = s.Buckets
	return out, true, nil
}

// Bucket returns the state of the bucket of a key.
func (p *packetPlane) Bucket(i int, k shaper.Key) (shaper.BucketState, bool) {
	plane := p.published.Load()
	if plane == nil {
		return shaper.BucketState{}, false
	}
	return plane.KeyBucket(i, k)
}

// bucketOf returns the state of the bucket of a flow under limit i.
func (p *packetPlane) bucketOf(i int, f *shaper.Flow, r shaper.Route) (shaper.BucketState, bool) {
	plane := p.published.Load()
	if plane == nil {
		return shaper.BucketState{}, false
	}
	return plane.Bucket(i, f, r)
}

// forgetBucket forgets what the bucket of a key owes, or returns false if that is not possible.
func (p *packetPlane) forgetBucket(i int, k shaper.Key) bool {
	plane := p.published.Load()
	return plane != nil && plane.ForgetBucket(i, k)
}

// planeChange is a prepared change of the packet plane. It is committed together with that of
// the proxy plane.
type planeChange struct {
	*packetPlane
	change  *bpf.Change // nil when there is none, or after it has ended
	opened  bool        // the plane did not exist before
	closing bool        // there are no attachments left
}

func (p *packetPlane) prepare(l *plan.Plan, policy *shaper.Policy) (*planeChange, error) {
	c := &planeChange{packetPlane: p, closing: len(l.Config.Attach) == 0}
	pins := l.Config.Daemon.PinPath
	if c.closing && p.plane == nil {
		// Remove what an earlier daemon left attached: this configuration does not have it.
		if _, err := os.Stat(pins); errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) || bpf.Alive(pins) {
			return c, nil // or it belongs to another running daemon
		}
		if err := bpf.Detach(pins); err != nil {
			return nil, fmt.Errorf("an earlier daemon left programs attached: run \"shaperd detach --pin-path %s\" as root: %w", pins, err)
		}
		return c, nil
	}
	if p.plane == nil {
		plane, err := bpf.Open(bpf.Options{Shaper: p.shaper, Clock: p.clock, PinPath: pins, Keys: l.Config.Daemon.MaxBuckets, Log: p.log})
		if err != nil {
			return nil, err
		}
		p.plane, c.opened = plane, true
		p.proxy.OnSocket(plane.MarkProxied)
	}
	change, err := p.plane.Prepare(l.Config.Attach, l.TCPListeners(), policy)
	if err != nil {
		c.cancel()
		return nil, err
	}
	c.change = change
	return c, nil
}

// commit applies the change. On an error nothing has changed, and the caller must still call
// cancel.
func (c *planeChange) commit() error {
	change := c.change
	c.change = nil // both success and failure end it
	if change == nil {
		return nil
	}
	return change.Commit()
}

// cancel restores the state before prepare.
func (c *planeChange) cancel() {
	if c.change != nil {
		c.change.Cancel()
	}
	if c.opened {
		c.proxy.OnSocket(nil)
		c.plane.Release()
		c.plane = nil
	}
}

// finish completes the change after both planes have committed.
func (c *planeChange) finish() {
	if c.plane == nil {
		return
	}
	c.published.Store(c.plane)
	c.shares.use(c.plane)
	if c.closing {
		c.close()
	}
}

// close closes the plane. Attachments with on_stop = "keep" stay.
func (p *packetPlane) close() {
	if p.plane == nil {
		return
	}
	p.published.Store(nil)
	p.shares.use(nil)
	p.proxy.OnSocket(nil)
	if err := p.plane.Close(); err != nil {
		p.log.Error("detaching failed", "err", err)
	}
	p.plane = nil
}
