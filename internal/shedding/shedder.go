// Package shedding decides how much the limits with shed refuse: once a second it looks at how short this host is of
// processors, memory, descriptors and time, and how full other limits are. What cannot be read sheds nothing.
package shedding

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"slices"
	"strings"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// Proxy is what is asked of the proxy plane.
type Proxy interface {
	// Descriptors returns how many descriptors are in use, and how many may be.
	Descriptors() (used, most int)

	// Answer returns how long the loop took to answer, at most the given time.
	Answer(ctx context.Context, most time.Duration) time.Duration

	// Buckets returns the state of the buckets of keys under limit i of the current policy.
	Buckets(i int, keys ...shaper.Key) []shaper.BucketState
}

// sampleEvery is how often what changes fast is looked at, if a limit sheds.
const sampleEvery = interval / 10

// Run looks once a second until ctx ends.
func Run(ctx context.Context, s *shaper.Shaper, proxy Proxy, log *slog.Logger) {
	d := newShedder(s, proxy, log, "/")
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for d.lookedAt = time.Now(); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		d.sample(ctx)
		if now := time.Now(); now.Sub(d.lookedAt) >= interval-sampleEvery/2 {
			d.look(now)
			if s.Policy().Sheds() != 0 {
				tick.Reset(sampleEvery)
			} else {
				tick.Reset(interval) // an idle host should sleep
			}
		}
	}
}

type shedder struct {
	shaper   *shaper.Shaper
	proxy    Proxy
	log      *slog.Logger
	host     host
	levels   map[*shaper.LimitState]*level // of the last look
	lookedAt time.Time

	// Since the last look:
	late  time.Duration        // the longest
	inUse map[string][]float64 // parts of the maxima of limits
}

func newShedder(s *shaper.Shaper, proxy Proxy, log *slog.Logger, root string) *shedder {
	return &shedder{shaper: s, proxy: proxy, log: log, host: host{root: root}, inUse: map[string][]float64{}}
}

// sample looks at what changes fast.
func (d *shedder) sample(ctx context.Context) {
	policy := d.shaper.Policy()
	late, named := false, map[string]bool{}
	for i := range policy.Sheds().All {
		s := &policy.Limit(i).Shed
		late = late || s.Late > 0
		named[s.Limit] = true
	}
	if late {
		d.late = max(d.late, d.proxy.Answer(ctx, interval))
	}
	for name := range named {
		if i := policy.Find(name); i >= 0 {
			d.inUse[name] = append(d.inUse[name], d.inUseAt(policy, i))
		}
	}
}

// inUseAt returns which part of the maximum is in flight at limit i, and 1 while connections wait. An adaptive maximum is no
// more than what is in use, so there only those that wait count.
func (d *shedder) inUseAt(policy *shaper.Policy, i int) float64 {
	l, bucket := policy.Limit(i), d.proxy.Buckets(i, shaper.Key{Limit: policy.State(i).ID})[0]
	most := l.MaxConnections
	if bucket.Slots > 0 {
		most = bucket.Slots
	}
	switch {
	case bucket.Waiting > 0:
		return 1
	case l.Adapt == shaper.AdaptOn:
		return 0
	}
	return float64(bucket.InFlight) / float64(most)
}

// look looks at all that the limits of the current policy look at, and sets how much they shed.
func (d *shedder) look(now time.Time) {
	policy := d.shaper.Policy()
	m := measured{shedder: d, now: now, found: map[string]finding{}}
	before := d.levels
	d.levels = map[*shaper.LimitState]*level{}
	var levels []*level
	for i := range policy.Sheds().All {
		l := &level{of: policy.State(i), order: policy.Limit(i).Shed.Order, observes: policy.Limit(i).Observe}
		if was := before[l.of]; was != nil {
			l.share = was.share
		}
		m.measure(l, &policy.Limit(i).Shed)
		levels = append(levels, l)
		d.levels[l.of] = l
	}
	advance(levels, min(now.Sub(d.lookedAt), 5*interval).Seconds())
	d.lookedAt, d.late = now, 0
	clear(d.inUse)
	for _, l := range levels {
		l.of.Shed.Store(&shaper.ShedStatus{Share: l.share, Signals: l.signals})
		was := before[l.of]
		if was == nil {
			was = &level{}
		}
		d.logChange(was, l)
	}
	for of, was := range before {
		if d.levels[of] == nil {
			of.Shed.Store(nil)
			d.logChange(was, &level{of: of, observes: was.observes})
		}
	}
}

// logChange logs that a limit has begun or ended to shed, or cannot read something.
func (d *shedder) logChange(was, is *level) {
	mode := shaper.Mode(is.observes).String()
	switch {
	case was.share == 0 && is.share > 0:
		d.log.Warn("shedding begins", "limit", is.of.Name, "mode", mode, "short", strings.Join(is.short(), ", "))
	case was.share > 0 && is.share == 0:
		d.log.Info("shedding has ended", "limit", is.of.Name, "mode", mode)
	}
	for _, s := range is.signals {
		if s.Err != "" && !slices.ContainsFunc(was.signals, func(w shaper.ShedSignal) bool { return w.Name == s.Name && w.Err != "" }) {
			d.log.Warn("nothing is shed for what cannot be read", "limit", is.of.Name, "signal", s.Name, "err", s.Err)
		}
	}
}

// short names what is short.
func (l *level) short() (names []string) {
	for _, s := range l.signals {
		if s.Err == "" && s.Value >= s.Above {
			names = append(names, strings.TrimSpace(s.Name+" "+s.Limit))
		}
	}
	return names
}

// measured is what was found at one instant.
type measured struct {
	*shedder
	now   time.Time
	found map[string]finding
}

type finding struct {
	value float64
	err   error
}

// measure sets what l looks at, and what follows.
func (m *measured) measure(l *level, s *shaper.Shed) {
	add := func(name, limit string, above, most float64, read func() (float64, error)) {
		key := name + " " + limit
		f, known := m.found[key]
		if !known {
			f.value, f.err = read()
			m.found[key] = f
		}
		signal := shaper.ShedSignal{Name: name, Limit: limit, Value: f.value, Above: above}
		if f.err != nil {
			signal.Err = f.err.Error()
		} else {
			l.load = max(l.load, f.value/above)
			excess := 1.0
			if all := min(1.1*above, most); all > above {
				excess = (f.value - above) / (all - above)
			}
			l.excess = max(l.excess, excess)
		}
		l.signals = append(l.signals, signal)
		l.looksAt = append(l.looksAt, key)
	}
	percent := func(name string, n int, read func() (float64, error)) {
		if n > 0 {
			add(name, "", float64(n)/100, 1, read)
		}
	}
	percent("cpu", s.CPU, func() (float64, error) { return m.host.cpu(m.now) })
	percent("memory", s.Memory, m.host.memory)
	percent("pressure", s.Pressure, func() (float64, error) { return m.host.pressure(m.now) })
	percent("descriptors", s.Descriptors, func() (float64, error) {
		used, most := m.proxy.Descriptors()
		return float64(used) / float64(max(most, 1)), nil
	})
	if s.Late > 0 {
		late := m.shedder.late.Seconds()
		add("late", "", s.Late.Seconds(), math.Inf(1), func() (float64, error) { return late, nil })
	}
	if s.Limit != "" {
		add("limit", s.Limit, float64(s.Above)/100, 1, func() (float64, error) { return mean(m.inUse[s.Limit]) })
	}
}

func mean(values []float64) (float64, error) {
	if len(values) == 0 {
		return 0, errors.New("not looked at yet")
	}
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values)), nil
}
