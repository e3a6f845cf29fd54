package daemon

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/cluster/member"
	"shaperd.dev/shaperd/cluster/peer"
	"shaperd.dev/shaperd/internal/sharing"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// group is this daemon as one of the hosts that share limits. Its methods are called by the loop of
// serve, except status.
type group struct {
	shaper  *shaper.Shaper
	clock   *pacer.Clock
	planes  []member.Plane // the proxy plane, then the packet plane
	log     *slog.Logger
	version string
	file    *groupFile // nil without a state file
	proxy   adaptivePlane
	info    atomic.Pointer[sharing.Info] // of the configuration

	slotsInUse func() bool // whether connections are in flight that count for shared limits

	server  *peer.Server  // nil while this daemon does not serve the ledger
	opened  *peer.Server  // by prepare, or server
	config  config.Shared // of member and server
	member  *member.Member
	keep    bool // programs use its shares when this daemon has ended
	end     func()
	current atomic.Pointer[member.Member] // member, for readers in other goroutines
	ledger  ledgerCache
}

func (s *server) newGroup() *group {
	g := &group{shaper: s.shaper, clock: s.clock, log: s.log, version: s.options.Version}
	if s.options.State != "" {
		g.file = &groupFile{path: s.options.groupPath(), log: s.log}
	}
	return g
}

// short tells the member that a bucket has begun to delay units. Any goroutine may call it.
func (g *group) short() {
	if m := g.current.Load(); m != nil {
		m.Short()
	}
}

// prepare does what may fail before c takes effect: it opens the port at which the ledger is served. If no
// host runs yet, it makes the planes let nothing of shared limits pass. follow or cancel must be next.
func (g *group) prepare(c *config.Config) (err error) {
	s := &c.Shared
	switch {
	case s.Serve == "":
		g.opened = nil
	case g.server != nil && g.config.Serve == s.Serve:
		g.opened = g.server
	default:
		g.opened, err = peer.Serve(peer.ServerOptions{Address: s.Serve, Files: sharing.Files(s), Hosts: s.Hosts, Clock: boottime, Log: g.log})
	}
	if err == nil && g.config.Hosts == 0 && s.Hosts > 0 {
		g.setLease(shaper.Lease{})
	}
	return err
}

// cancel undoes prepare.
func (g *group) cancel() {
	if g.opened != nil && g.opened != g.server {
		g.opened.Close()
	}
	g.opened = nil
}

func (g *group) setLease(l shaper.Lease) {
	for _, p := range g.planes {
		p.SetShares(shaper.Shares{Lease: l, Reset: true})
	}
}

// follow makes the group that of c, whose policy has taken effect.
func (g *group) follow(ctx context.Context, c *config.Config) {
	s, was := &c.Shared, &g.config
	g.keep = keepsShares(c)
	g.info.Store(sharing.NewInfo(g.version, c))
	if g.server != nil && g.server != g.opened {
		g.server.Close()
	}
	if g.server, g.opened = g.opened, nil; g.server != nil {
		g.server.SetFiles(sharing.Files(s))
	}
	switch {
	case g.member != nil && reflect.DeepEqual(s, was):
		g.member.SetInfo(c.SharedDigest(), g.info.Load().Text(nil))
	case g.member != nil && len(s.Store) > 0 && sharing.Params(s) == sharing.Params(was) && sharing.HostName(s) == sharing.HostName(was) && s.Alone == was.Alone:
		g.member.SetInfo(c.SharedDigest(), g.info.Load().Text(nil))
		g.member.SetStore(sharing.OpenStore(s, g.server), s.Interval)
	default:
		// The next member of the same host has its place, and what the ledger keeps for it.
		if s.Hosts == 0 || sharing.Params(s) == sharing.Params(was) && sharing.HostName(s) != sharing.HostName(was) {
			g.leave(ctx)
		}
		lent := g.member != nil
		g.close()
		g.join(ctx, c, lent)
	}
	g.config = *s
}

// join makes this daemon one of the hosts of c. lent is set if hosts of a ledger may still use what it has lent them
// of the part of this one.
func (g *group) join(ctx context.Context, c *config.Config, lent bool) {
	s := &c.Shared
	if s.Hosts == 0 {
		return
	}
	if len(s.Store) == 0 {
		lease := staticLease(s.Hosts)
		if lent {
			lease.Cold, lease.Between, lease.SlotsCold = 0, 0, 0
			lease.AloneAt = g.clock.Boot().Add(leaky.FromDuration(3 * g.config.Lease))
		}
		g.setLease(lease)
		return
	}
	saved := g.file.begin(ctx, sharing.Params(s))
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	g.member = member.Start(ctx, member.Options{
		Host: cluster.HostOptions{
			Params: sharing.Params(s), Name: sharing.HostName(s), Start: saved.Start, Salt: rand.Int64N(cluster.MaxSalt), Alone: cluster.Alone(s.Alone), Left: saved.Left, Away: cluster.Time(saved.Away),
			Digest: c.SharedDigest(), Info: g.info.Load().Text(nil),
		},
		Interval: s.Interval, Store: sharing.OpenStore(s, g.server), Planes: g.planes, Names: sharedNames{g.shaper, sharing.Params(s)},
		Clock: boottime, Now: g.clock.Boot, Log: g.log, Joined: g.file.joined,
	})
	g.current.Store(g.member)
	adapted := make(chan struct{})
	go func() {
		defer close(adapted)
		g.adapt(ctx, g.member, *s)
	}()
	g.end = func() { cancel(); g.member.Wait(); <-adapted }
}

// staticLease returns what a host may always use without a ledger.
func staticLease(hosts int) shaper.Lease {
	floor := uint32(shaper.Whole / hosts)
	return shaper.Lease{Cold: floor, Between: floor, Alone: floor, Hosts: hosts, SlotsCold: floor}
}

// keepsShares reports whether programs go on to use shares when this daemon has ended.
func keepsShares(c *config.Config) bool {
	return slices.ContainsFunc(c.Limits, func(l shaper.Limit) bool { return l.Shared && l.InPacketPlane() }) &&
		slices.ContainsFunc(c.Attach, func(a shaper.Attachment) bool { return a.OnStop == shaper.StopKeep })
}

// leaveTimeout bounds how long the ledger is told that this host leaves.
const leaveTimeout = time.Second

// leave ends the member. If this host uses nothing any more, the ledger is told, so that others may. While
// connections are in flight it looks like a crash: the next member says what is in use.
func (g *group) leave(ctx context.Context) {
	if g.member == nil {
		return
	}
	if status, _ := g.member.Status(ctx); status.Joined && !g.keep && !g.slotsInUse() {
		ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
		defer cancel()
		// A host that is back uses nothing before it has joined if the file says so: others may
		// use its part. So it is written first.
		ready := func() error {
			if g.slotsInUse() {
				return errors.New("connections are still in flight")
			}
			return g.file.leave(ctx)
		}
		if err := g.member.Leave(ctx, ready); err != nil {
			g.log.Warn("leaving the group of shared limits failed; the others keep this host's part for it", "err", err)
		}
	}
	g.close()
}

// close ends the member. To the ledger it looks like a crash.
func (g *group) close() {
	if g.member == nil {
		return
	}
	g.end()
	g.member = nil
	g.current.Store(nil)
}

// stop ends everything.
func (g *group) stop() {
	g.close()
	if g.server != nil {
		g.server.Close()
	}
}

// boottime reads CLOCK_BOOTTIME.
func boottime() cluster.Time {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	return cluster.FromDuration(time.Duration(ts.Nano()))
}
