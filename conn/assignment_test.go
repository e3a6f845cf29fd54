package conn

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// loopsRig is a proxy with several loops, whose listeners change in a test. Each has one port, by its name.
type loopsRig struct {
	t          testing.TB
	proxy      *Proxy
	shaper     *shaper.Shaper
	protocol   shaper.Protocol
	downstream shaper.Downstream
	ports      map[string]netip.AddrPort
}

func newLoopsRig(t testing.TB, loops int, protocol shaper.Protocol, downstream string) *loopsRig {
	s := shaper.New(10000)
	p, err := New(Options{Shaper: s, Clock: pacer.NewClock(), Log: testLog(t), TrafficLog: testLog(t), Loops: loops})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	to := netip.MustParseAddrPort(downstream)
	return &loopsRig{
		t: t, proxy: p, shaper: s, protocol: protocol,
		downstream: shaper.Downstream{Host: to.Addr().String(), Port: to.Port()}, ports: map[string]netip.AddrPort{},
	}
}

func (r *loopsRig) addr(name string) string {
	if _, ok := r.ports[name]; !ok {
		r.ports[name] = netip.MustParseAddrPort(testutil.FreeAddr(r.t, r.protocol.String()))
	}
	return r.ports[name].String()
}

func (r *loopsRig) listener(name string) shaper.Listener {
	r.addr(name)
	return shaper.Listener{
		Name: name, Downstream: []shaper.Downstream{r.downstream}, Addresses: []shaper.Address{addressOf(r.protocol, r.ports[name])},
		MaxQueue: 1000, ConnectTimeout: time.Minute, UDPIdleTimeout: time.Minute, MaxFlows: 1000,
	}
}

// apply applies listeners, by their names, and limits.
func (r *loopsRig) apply(names []string, limits ...shaper.Limit) {
	r.t.Helper()
	var all []shaper.Listener
	for _, name := range names {
		all = append(all, r.listener(name))
	}
	for i := range limits {
		if l := &limits[i]; l.IPv4Prefix == 0 {
			l.IPv4Prefix, l.IPv6Prefix = 32, 64
		}
	}
	policy, err := r.shaper.CompileRules(shaper.Rules{Limits: limits, Listeners: all})
	if err != nil {
		r.t.Fatal(err)
	}
	if err := r.proxy.Apply(r.t.Context(), all, policy, nil); err != nil {
		r.t.Fatal(err)
	}
}

// groups returns the names of the listeners on each loop, in order.
func (r *loopsRig) groups() string {
	byWorker := map[*worker][]string{}
	for name, ln := range r.proxy.listeners {
		byWorker[ln.proxy] = append(byWorker[ln.proxy], name)
	}
	var all []string
	for _, names := range byWorker {
		slices.Sort(names)
		all = append(all, fmt.Sprint(names))
	}
	slices.Sort(all)
	return fmt.Sprint(all)
}

var atAB = shaper.Match{Listen: []string{"a", "b"}}

// Listeners are on one loop if connections at them have anything of a limit in common.
func TestAssign(t *testing.T) {
	second := time.Second
	for name, c := range map[string]struct {
		loops  int
		limits []shaper.Limit
		want   string
	}{
		"without limits":           {4, nil, "[[a] [b] [c]]"},
		"one loop":                 {1, nil, "[[a b c]]"},
		"two loops":                {2, nil, "[[a c] [b]]"},
		"one bucket":               {4, []shaper.Limit{{Name: "x", Rate: 8e6}}, "[[a b c]]"},
		"one bucket at two":        {4, []shaper.Limit{{Name: "x", Match: atAB, Rate: 8e6}}, "[[a b] [c]]"},
		"by source":                {4, []shaper.Limit{{Name: "x", Match: atAB, Key: shaper.KeySource, Rate: 8e6}}, "[[a b] [c]]"},
		"only observes":            {4, []shaper.Limit{{Name: "x", Match: atAB, Rate: 8e6, Observe: true}}, "[[a b] [c]]"},
		"by listener":              {4, []shaper.Limit{{Name: "x", Key: shaper.KeyListen, Rate: 8e6}}, "[[a] [b] [c]]"},
		"by source and listener":   {4, []shaper.Limit{{Name: "x", Key: shaper.KeySource | shaper.KeyListen, Rate: 8e6}}, "[[a] [b] [c]]"},
		"by connection":            {4, []shaper.Limit{{Name: "x", Key: shaper.KeyConnection, Rate: 8e6}}, "[[a] [b] [c]]"},
		"blocks":                   {4, []shaper.Limit{{Name: "x", Block: true, Match: shaper.Match{Source: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}}}, "[[a] [b] [c]]"},
		"sheds":                    {4, []shaper.Limit{{Name: "x", Shed: shaper.Shed{CPU: 90, Order: 1}}}, "[[a] [b] [c]]"},
		"slots by listener":        {4, []shaper.Limit{{Name: "x", Key: shaper.KeyListen, MaxConnections: 2}}, "[[a] [b] [c]]"},
		"places to wait":           {4, []shaper.Limit{{Name: "x", Match: atAB, Key: shaper.KeyListen, MaxConnections: 2, QueueTimeout: second, MaxQueue: 9}}, "[[a b] [c]]"},
		"a chain":                  {4, []shaper.Limit{{Name: "x", Match: atAB, Rate: 8e6}, {Name: "y", Match: shaper.Match{Listen: []string{"b", "c"}}, MaxConnections: 1}}, "[[a b c]]"},
		"one each":                 {4, []shaper.Limit{{Name: "x", Match: shaper.Match{Listen: []string{"a"}}, Rate: 8e6}, {Name: "y", Match: shaper.Match{Listen: []string{"b"}}, Rate: 8e6}}, "[[a] [b] [c]]"},
		"shared by hosts, at each": {4, []shaper.Limit{{Name: "x", Shared: true, Key: shaper.KeyListen, Rate: 8e6}}, "[[a b c]]"},
		"shared by hosts, at two":  {4, []shaper.Limit{{Name: "x", Shared: true, Match: shaper.Match{Listen: []string{"b"}}, Rate: 8e6}, {Name: "y", Shared: true, Match: shaper.Match{Listen: []string{"c"}}, Rate: 8e6}}, "[[a] [b c]]"},
		"penalties, which are of all": {4, []shaper.Limit{{
			Name: "x", Match: shaper.Match{Listen: []string{"a"}}, Key: shaper.KeySource, MaxConnections: 1,
			Penalty: &shaper.Penalty{After: shaper.Frequency{N: 10, Per: second}, Block: second, Most: second, Factor: 1},
		}}, "[[a b c]]"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newLoopsRig(t, c.loops, shaper.TCP, "127.0.0.1:9")
			r.apply([]string{"a", "b", "c"}, c.limits...)
			if got := r.groups(); got != c.want {
				t.Errorf("loops have %s, want %s", got, c.want)
			}
		})
	}
}

// Over random changes, the listeners that a naive closure joins are on one loop, and as long as there are loops for all, no others.
// What was together stays together.
func TestAssign_Closure(t *testing.T) {
	rnd := testutil.Rand(t)
	names := []string{"a", "b", "c", "d", "e"}
	for range 20 {
		r := newLoopsRig(t, len(names), shaper.TCP, "127.0.0.1:9")
		var before []shaper.Limit
		var listened []string
		together := map[[2]string]bool{}
		for range 6 {
			var listens []string
			for _, name := range names {
				if rnd.IntN(3) > 0 {
					listens = append(listens, name)
				}
			}
			if len(listens) == 0 {
				continue
			}
			limits := randomLimits(rnd, listens)
			r.apply(listens, slices.Clone(limits)...)
			next := map[[2]string]bool{}
			for _, x := range names {
				for _, y := range names {
					next[[2]string{x, y}] = x == y || together[[2]string{x, y}] && slices.Contains(listened, x) && slices.Contains(listened, y) ||
						meet(limits, before, x, y, listens, listened)
				}
			}
			for _, via := range names { // Warshall
				for _, x := range names {
					for _, y := range names {
						next[[2]string{x, y}] = next[[2]string{x, y}] || next[[2]string{x, via}] && next[[2]string{via, y}]
					}
				}
			}
			for _, x := range listens {
				for _, y := range listens {
					if got := r.proxy.listeners[x].proxy == r.proxy.listeners[y].proxy; got != next[[2]string{x, y}] {
						t.Fatalf("%s and %s: together %v, want %v; loops have %s, limits%s, before%s", x, y, got, !got, r.groups(), describe(limits), describe(before))
					}
				}
			}
			before, listened, together = limits, listens, next
		}
		r.proxy.Close()
	}
}

// randomLimits returns limits that match some of the listeners.
func randomLimits(rnd *rand.Rand, listens []string) (limits []shaper.Limit) {
	for _, name := range []string{"x", "y", "z"}[:rnd.IntN(4)] {
		l := shaper.Limit{Name: name, Key: []shaper.Fields{0, shaper.KeySource, shaper.KeyListen, shaper.KeyConnection}[rnd.IntN(4)], IPv4Prefix: 32, IPv6Prefix: 64}
		if rnd.IntN(2) == 0 {
			l.Rate = 8e6
		} else {
			l.MaxConnections = 5
			if rnd.IntN(2) == 0 {
				l.QueueTimeout, l.MaxQueue = time.Second, 10
			}
		}
		if rnd.IntN(8) > 0 {
			for range 1 + rnd.IntN(2) {
				if at := listens[rnd.IntN(len(listens))]; !slices.Contains(l.Match.Listen, at) {
					l.Match.Listen = append(l.Match.Listen, at)
				}
			}
		}
		limits = append(limits, l)
	}
	return limits
}

func describe(limits []shaper.Limit) (text string) {
	for i := range limits {
		l := &limits[i]
		text += fmt.Sprintf(" %s at %v by %v (%d connections, %d wait)", l.Name, l.Match.Listen, l.Key, l.MaxConnections, l.MaxQueue)
	}
	return text
}

// meet reports whether connections of x under some limits, and of y under these or those before, have anything of one in common. The
// connections of a listener that has gone are under the limits of all listeners.
func meet(limits, before []shaper.Limit, x, y string, listens, listened []string) bool {
	type at struct {
		name   string
		limits []shaper.Limit
		among  []string
	}
	var ats [2][]at
	for i, name := range []string{x, y} {
		if slices.Contains(listens, name) || slices.Contains(listened, name) {
			ats[i] = append(ats[i], at{name, limits, listens})
		}
		if slices.Contains(listened, name) {
			ats[i] = append(ats[i], at{name, before, listened})
		}
	}
	state := func(a at, l *shaper.Limit) string {
		named := slices.Contains(a.among, a.name)
		switch {
		case len(l.Match.Listen) > 0 && !slices.Contains(l.Match.Listen, a.name):
			return ""
		case l.MaxConnections > 0 && l.MaxQueue > 0:
			return l.Name
		case l.Key == shaper.KeyConnection:
			return ""
		case l.Key == shaper.KeyListen && named:
			return l.Name + " at " + a.name
		case l.Key == shaper.KeyListen:
			return l.Name + " at none"
		}
		return l.Name
	}
	for _, a := range ats[0] {
		for _, b := range ats[1] {
			for i := range a.limits {
				for j := range b.limits {
					if s := state(a, &a.limits[i]); s != "" && s == state(b, &b.limits[j]) {
						return true
					}
				}
			}
		}
	}
	return false
}
