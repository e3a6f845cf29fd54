package conn

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// gateModel is the specification of gates in plain counts. It tracks the connections in flight and
// waiting, and checks each admission.
type gateModel struct {
	fatalf   func(string, ...any)
	rig      *admissionRig
	rules    []gateRule
	inFlight map[string]int        // by rule and key
	last     map[string]leaky.Time // time of the last admission
	waiting  map[caller][]*visitor
	passed   map[caller]map[string]int // by other callers, since the key began to wait or was served
	bound    int                       // on the values of passed
	in       []*visitor
	priority map[string]int // by source
}

type caller struct {
	source string
	port   uint16
}

type gateRule struct {
	limit shaper.Limit
	gap   leaky.Time // between new connections
}

const modelWait = 500 * time.Millisecond

// slack covers rounding of leaky times.
const slack = leaky.Second / 1e6

func (m *gateModel) key(i int, c caller) string {
	key := fmt.Sprint(i)
	if m.rules[i].limit.Key&shaper.KeySource != 0 {
		key += " " + c.source
	}
	if m.rules[i].limit.Key&shaper.KeyPort != 0 {
		key += fmt.Sprint(" ", c.port)
	}
	return key
}

// open reports whether all rules admit c at now.
func (m *gateModel) open(c caller, now leaky.Time) bool {
	for i, rule := range m.rules {
		k := m.key(i, c)
		if rule.limit.MaxConnections > 0 && m.inFlight[k] >= rule.limit.MaxConnections {
			return false
		}
		if last, ok := m.last[k]; ok && rule.gap > 0 && now < last+rule.gap {
			return false
		}
	}
	return true
}

// held reports whether c waits because of another source's reservation.
func (m *gateModel) held(c caller) bool {
	q := m.waiting[c][0].queue
	return q != nil && slices.ContainsFunc(q.gates, func(gt *gate) bool { return gt.reservedAgainst(q, q.precedence, false) })
}

func (m *gateModel) visit(c caller) {
	done := false
	v := m.rig.visitPort(c.source, c.port, func(v *visitor) {
		done = true
		m.settled(c, v)
	})
	if !done {
		m.waiting[c] = append(m.waiting[c], v)
	}
}

func (m *gateModel) settled(c caller, v *visitor) {
	queue := m.waiting[c]
	at := slices.Index(queue, v)
	if at >= 0 {
		m.waiting[c] = slices.Delete(queue, at, at+1)
		if len(m.waiting[c]) == 0 {
			delete(m.passed, c)
		}
	}
	now := m.rig.now
	if !v.granted {
		if v.refusedFor == shaper.WaitTimeout && now < v.arrived+leaky.FromDuration(modelWait) {
			m.fatalf("refused after %v", now.Sub(v.arrived).Duration())
		}
		return
	}
	if at > 0 || at < 0 && len(queue) > 0 {
		m.fatalf("%v: one overtook %d of its own source", c, len(queue))
	}
	if !m.open(c, now+slack) {
		m.fatalf("%v: admitted through a gate that is shut", c)
	}
	for other, queue := range m.waiting {
		if other.source == c.source || len(queue) == 0 || !m.open(other, now-slack) || m.held(other) {
			continue
		}
		switch mine, its := m.priority[c.source], m.priority[other.source]; {
		case mine > its:
			continue
		case mine < its:
			m.fatalf("%v was served while %v of a higher priority waited and could have been served", c, other)
		}
		if m.passed[other] == nil {
			m.passed[other] = map[string]int{}
		}
		m.passed[other][c.source]++
		if n := m.passed[other][c.source]; n > m.bound {
			m.fatalf("%s was served %d times while %v waited and could have been served", c.source, n, other)
		}
	}
	for i := range m.rules {
		k := m.key(i, c)
		m.inFlight[k]++
		m.last[k] = now
	}
	for other := range m.passed {
		if other.source == c.source {
			delete(m.passed, other)
		}
	}
	m.in = append(m.in, v)
}

func (m *gateModel) finish(v *visitor) {
	m.in = slices.DeleteFunc(m.in, func(o *visitor) bool { return o == v })
	for i := range m.rules {
		m.inFlight[m.key(i, caller{v.flow.Source.String(), v.flow.Port})]--
	}
	v.finish()
}

// check checks the invariants.
func (m *gateModel) check() {
	for c, queue := range m.waiting {
		if len(queue) > 0 && m.open(c, m.rig.now-slack) && !m.held(c) {
			m.fatalf("%v waits for a free slot", c)
		}
		for _, v := range queue {
			most := leaky.FromDuration(modelWait)
			if m.rig.listener != nil {
				most *= 2 // once at limits, and once at a downstream
			}
			if m.rig.now > v.arrived+most {
				m.fatalf("%v waits longer than it may", c)
			}
		}
	}
	p := m.rig.admission.policy
	held := 0
	for _, v := range m.in {
		held += len(v.held)
	}
	if want := len(m.in) * p.Len(); held != want {
		m.fatalf("%d slots are held by %d connections under %d limits", held, len(m.in), p.Len())
	}
	for i, rule := range m.rules {
		if rule.limit.Name == "" {
			continue // the gate of the downstream
		}
		if n := p.State(p.Find(rule.limit.Name)).InFlight.Load(); int(n) != len(m.in) {
			m.fatalf("limit %d shows %d in flight, want %d", i, n, len(m.in))
		}
	}
	m.rig.consistent()
}

// Whatever sources do, in whatever order, under whatever limits: caps and rates hold, no waiter holds
// a slot, none waits for a free slot, and none is served twice while another one waits that could be
// served.
func TestAdmission_AgainstModel(t *testing.T) {
	for _, tt := range []struct {
		ports   int
		full    bool // the downstream may be full, too
		classes bool // sources have priorities
	}{{1, false, false}, {1, true, false}, {3, false, false}, {3, true, false}, {1, true, true}, {3, false, true}, {3, true, true}} {
		ports := tt.ports
		t.Run(fmt.Sprintf("%d ports, downstream full %v, classes %v", ports, tt.full, tt.classes), func(t *testing.T) {
			var served, left int
			rapid.Check(t, func(rt *rapid.T) {
				m := &gateModel{
					fatalf: rt.Fatalf, inFlight: map[string]int{}, last: map[string]leaky.Time{}, waiting: map[caller][]*visitor{},
					passed: map[caller]map[string]int{}, bound: ports,
				}
				keys := []shaper.Fields{0, shaper.KeySource, shaper.KeyPort, shaper.KeySource | shaper.KeyPort}
				var limits []shaper.Limit
				for i, key := range rapid.Permutation(keys).Draw(rt, "keys")[:rapid.IntRange(1, 3).Draw(rt, "limits")] {
					l := shaper.Limit{
						Name: fmt.Sprint("limit", i), Key: key, QueueTimeout: modelWait, MaxQueue: rapid.IntRange(3, 40).Draw(rt, "max_queue"),
						MaxConnections: rapid.IntRange(0, 4).Draw(rt, "cap"),
					}
					rule := gateRule{}
					if n := rapid.SampledFrom([]uint64{0, 0, 20, 200}).Draw(rt, "pace"); n > 0 || l.MaxConnections == 0 {
						n = max(n, 20)
						l.NewConnections = shaper.Frequency{N: n, Per: time.Second}
						rule.gap = leaky.Second / leaky.Time(n)
					}
					rule.limit = l
					m.rules = append(m.rules, rule)
					limits = append(limits, l)
				}
				var classes []shaper.TrafficClass
				if m.priority = map[string]int{}; tt.classes {
					for i := range 5 {
						source := fmt.Sprint("10.0.0.", 1+i)
						c := classOf(source+"/32", 1)
						c.Priority = rapid.IntRange(0, 2).Draw(rt, "priority")
						classes, m.priority[source] = append(classes, c), c.Priority
					}
				}
				m.rig = newClassAdmissionRig(t, classes, limits...)
				if tt.full {
					most := rapid.IntRange(1, 5).Draw(rt, "downstream")
					m.rules = append(m.rules, gateRule{limit: shaper.Limit{MaxConnections: most}})
					m.rig.listener = m.rig.newMultiListener(shaper.Listener{Downstream: []shaper.Downstream{{MaxConnections: most}}, MaxQueue: 1000, ConnectTimeout: modelWait}, "10.1.0.1")
				}
				for range rapid.IntRange(20, 200).Draw(rt, "steps") {
					switch action := rapid.IntRange(0, 9).Draw(rt, "action"); {
					case action < 4:
						c := caller{fmt.Sprint("10.0.0.", rapid.IntRange(1, 5).Draw(rt, "source")), uint16(rapid.IntRange(1, ports).Draw(rt, "port"))}
						for range rapid.IntRange(1, 5).Draw(rt, "times") {
							m.visit(c)
						}
					case action < 7 && len(m.in) > 0:
						m.finish(m.in[rapid.IntRange(0, len(m.in)-1).Draw(rt, "ends")])
						served++
					case action == 7:
						c := caller{fmt.Sprint("10.0.0.", rapid.IntRange(1, 5).Draw(rt, "source")), uint16(rapid.IntRange(1, ports).Draw(rt, "port"))}
						if n := len(m.waiting[c]); n > 0 {
							m.waiting[c][rapid.IntRange(0, n-1).Draw(rt, "leaves")].leave()
							left++
						}
					default:
						m.rig.sleep(time.Duration(rapid.IntRange(0, 100).Draw(rt, "ms")) * time.Millisecond)
					}
					m.check()
				}
				m.rig.sleep(modelWait)
				for len(m.in) > 0 {
					m.finish(m.in[0])
				}
				m.rig.sleep(4 * modelWait)
				for len(m.in) > 0 {
					m.finish(m.in[0])
				}
				m.rig.idle()
				if t.Failed() {
					rt.FailNow()
				}
			})
			if served == 0 || left == 0 {
				t.Errorf("%d served, %d left", served, left)
			}
		})
	}
}
