// Package shedding decides how much the limits with shed refuse: once a second it looks at how short this host is of
// processors, memory, descriptors and time, and how full other limits are. What cannot be read sheds nothing.
package shedding

import (
	"context"
	"errors"
	"log/slog"
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

// samples is how often in an interval what changes fast is looked at.
const samples = 10

// Run looks once a second until ctx ends.
func Run(ctx context.Context, s *shaper.Shaper, proxy Proxy, log *slog.Logger) {
	d := newShedder(s, proxy, log, "/")
	tick := time.NewTicker(interval / samples)
	defer tick.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		d.sample(ctx)
		if n%samples == 0 {
			d.look(time.Now())
		}
	}
}

type shedder struct {
	shaper *shaper.Shaper
	proxy  Proxy
	log    *slog.Logger
	host   host
	shares map[*shaper.LimitState]float64

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

// inUseAt returns which part of the maximum is in flight at limit i, and 1 while connections wait.
func (d *shedder) inUseAt(policy *shaper.Policy, i int) float64 {
	bucket := d.proxy.Buckets(i, shaper.Key{Limit: policy.State(i).ID})[0]
	if bucket.Waiting > 0 {
		return 1
	}
	most := policy.Limit(i).MaxConnections
	if bucket.Slots > 0 {
		most = bucket.Slots
	}
	return float64(bucket.InFlight) / float64(most)
}

// look looks at all that the limits of the current policy look at, and sets how much they shed.
func (d *shedder) look(now time.Time) {
	policy := d.shaper.Policy()
	m := measured{shedder: d, policy: policy, now: now, found: map[string]finding{}}
	before := d.shares
	d.shares = map[*shaper.LimitState]float64{}
	var levels []*level
	for i := range policy.Sheds().All {
		l := &level{of: policy.State(i), order: policy.Limit(i).Shed.Order, share: before[policy.State(i)]}
		l.signals, l.load = m.signals(&policy.Limit(i).Shed)
		levels = append(levels, l)
	}
	d.host.at, d.late = now, 0
	clear(d.inUse)
	advance(levels)
	for _, l := range levels {
		was := before[l.of]
		d.shares[l.of] = l.share
		l.of.Shed.Store(&shaper.ShedStatus{Share: l.share, Signals: l.signals})
		switch {
		case was == 0 && l.share > 0:
			d.log.Warn("shedding begins", "limit", l.of.Name, "short", shortOf(l.signals))
		case was > 0 && l.share == 0:
			d.log.Info("shedding has ended", "limit", l.of.Name)
		}
	}
	for of := range before {
		if _, is := d.shares[of]; !is {
			of.Shed.Store(nil)
		}
	}
}

// shortOf names what is short.
func shortOf(signals []shaper.ShedSignal) string {
	var names []string
	for _, s := range signals {
		if s.Err == "" && s.Value >= s.Above {
			names = append(names, s.Name)
		}
	}
	return strings.Join(names, ", ")
}

// measured is what was found at one instant.
type measured struct {
	*shedder
	policy *shaper.Policy
	now    time.Time
	found  map[string]finding
}

type finding struct {
	value float64
	err   error
}

// signals returns what s looks at, and the largest as a part of its threshold.
func (m *measured) signals(s *shaper.Shed) (list []shaper.ShedSignal, load float64) {
	add := func(key, name string, above float64, read func() (float64, error)) {
		f, known := m.found[key]
		if !known {
			f.value, f.err = read()
			m.found[key] = f
		}
		signal := shaper.ShedSignal{Name: name, Value: f.value, Above: above}
		if f.err != nil {
			signal.Err = f.err.Error()
		} else {
			load = max(load, f.value/above)
		}
		list = append(list, signal)
	}
	percent := func(name string, n int, read func() (float64, error)) {
		if n > 0 {
			add(name, name, float64(n)/100, read)
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
		add("late", "late", s.Late.Seconds(), func() (float64, error) { return late, nil })
	}
	if s.Limit != "" {
		add("limit "+s.Limit, s.Limit, float64(s.Above)/100, func() (float64, error) { return mean(m.inUse[s.Limit]) })
	}
	return list, load
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
