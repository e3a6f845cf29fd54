package conn

import (
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/quota"
)

// randomQuotas returns some limits of three names, of which most have a quota.
func randomQuotas(rnd *rand.Rand) (limits []shaper.Limit) {
	periods := []quota.Period{aDay, {Rolling: time.Hour}, {Calendar: quota.Month, Zone: "UTC"}, {Calendar: quota.Day, Zone: "Europe/Berlin"}}
	for _, name := range []string{"a", "b", "c"} {
		l := shaper.Limit{Name: name, MaxDelay: time.Second, QueueTimeout: time.Second, MaxQueue: 50, Observe: rnd.IntN(6) == 0}
		if name != "c" || rnd.IntN(2) == 0 {
			l.Key = shaper.KeySource
		}
		if rnd.IntN(3) > 0 {
			l.Rate = uint64(10+rnd.IntN(300)) * 1e6
		}
		period := periods[rnd.IntN(len(periods))]
		switch rnd.IntN(5) {
		case 0, 1:
			l.Quota = quota.Quota{Amount: 1 + rnd.Uint64N(3_000_000), Period: period}
			l.QuotaSlow = uint64(rnd.IntN(2)*(1+rnd.IntN(50))) * 1e6
		case 2:
			l.Quota = quota.Quota{Amount: 1 + rnd.Uint64N(300), Unit: quota.Connections, Period: period}
			l.MaxConnections = rnd.IntN(2) * 5
		default:
			l.Rate = max(l.Rate, 10e6) // a limit must limit something
		}
		if rnd.IntN(6) > 0 {
			limits = append(limits, l)
		}
	}
	return limits
}

// checkBudgets checks that r has the budgets that are in use, each once.
func (r *quotaRig) checkBudgets() {
	r.t.Helper()
	r.proxy.home.loop.call(func(leaky.Time) {
		refs := map[*budget]int{}
		for _, q := range r.proxy.home.loop.scheduler.byKey {
			if q.budget != nil {
				refs[q.budget]++
			}
		}
		for _, gt := range r.proxy.home.admission.byKey {
			if gt.budget != nil {
				refs[gt.budget]++
			}
		}
		qs := r.proxy.home.loop.quotas
		for i, b := range qs.list {
			if b.refs != refs[b] || qs.budgets[b.name] != b || b.index != i {
				r.t.Errorf("%s has %d references, want %d", b.name, b.refs, refs[b])
			}
			delete(refs, b)
		}
		for b := range refs {
			r.t.Errorf("%s is in use, and was dropped", b.name)
		}
	})
}

// Reloads, failures of the file, days and resets at random, during traffic: nothing panics, stands still or is left behind.
func TestQuota_Churn(t *testing.T) {
	t.Parallel()
	rnd := testutil.Rand(t)
	var at sink
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, at.serve), randomQuotas(rnd)...)
	var stop atomic.Bool
	var clients sync.WaitGroup
	for i := range 12 {
		rnd := rand.New(rand.NewPCG(*testutil.Seed, uint64(i+1)))
		clients.Go(func() {
			for !stop.Load() {
				r.visit(net.IPv4(127, 0, 0, byte(1+i%4)), rnd)
			}
		})
	}
	passing := func(since time.Duration) bool {
		return since < 2*time.Second || at.received.Load() == 0 && since < testTimeout
	}
	for begun := time.Now(); passing(time.Since(begun)) && !t.Failed(); {
		time.Sleep(time.Duration(rnd.IntN(30)) * time.Millisecond)
		switch rnd.IntN(8) {
		case 0:
			r.file.fail(errors.New("no space left"))
		case 1, 2:
			r.file.fail(nil)
		case 3:
			r.set(r.wall.Load().Add(time.Duration(rnd.IntN(48)-12) * time.Hour))
		case 4:
			if p := r.shaper.Policy(); p.Len() > 0 {
				r.proxy.ResetQuota(0, p.KeyOf(0, netip.MustParseAddr("127.0.0.1")))
			}
		case 5:
			r.proxy.Quotas(func(*shaper.QuotaStatus) {})
		default:
			r.apply(randomQuotas(rnd)...)
		}
		r.checkBudgets()
	}
	stop.Store(true)
	r.file.fail(nil)
	clients.Wait()
	if at.received.Load() == 0 {
		t.Error("nothing passed")
	}
	r.apply(shaper.Limit{Name: "rate", Rate: 1e9, MaxDelay: time.Second})
	testutil.WaitFor(t, "all gates to be dropped", func() (dropped bool) {
		r.proxy.home.loop.call(func(leaky.Time) { dropped = len(r.proxy.home.admission.byKey) == 0 })
		return dropped
	})
	r.settle()
	r.checkBudgets()
}

// visit sends on a connection of its own, and ends it in order or not.
func (r *quotaRig) visit(source net.IP, rnd *rand.Rand) {
	c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: source}}).Dial("tcp4", r.addr())
	if err != nil {
		return
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(300 * time.Millisecond))
	c.Write(make([]byte, rnd.IntN(300_000)))
	if rnd.IntN(3) == 0 {
		c.(*net.TCPConn).SetLinger(0)
		return
	}
	c.(*net.TCPConn).CloseWrite()
	c.Read(make([]byte, 1))
}
