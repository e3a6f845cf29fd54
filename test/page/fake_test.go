package page

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/http"
	"sync/atomic"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control"
	"shaperd.dev/shaperd/control/web"
)

// A fake serves the control API of a daemon in a scenario.
type fake struct {
	scenario     string
	every        time.Duration // between live events
	started      time.Time
	disconnected atomic.Bool // streams are ended and requests fail: between POST /disconnect and POST /reconnect
}

// scenarios are the scenarios, in the order of their screenshots.
var scenarios = []string{"idle", "overload", "violated", "bypass", "observe", "trouble", "unavailable", "many", "empty", "shared", "alone", "disconnected", "slow"}

func (f *fake) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", web.Handler())
	mux.HandleFunc("GET /v1/history", f.history)
	mux.HandleFunc("GET /v1/live", f.live)
	mux.HandleFunc("POST /disconnect", func(http.ResponseWriter, *http.Request) { f.disconnected.Store(true) })
	mux.HandleFunc("POST /reconnect", func(http.ResponseWriter, *http.Request) { f.disconnected.Store(false) })
	return mux
}

func (f *fake) history(w http.ResponseWriter, r *http.Request) {
	if f.scenario == "slow" { // the response times out
		<-r.Context().Done()
		return
	}
	if f.disconnected.Load() {
		http.Error(w, "disconnected", http.StatusServiceUnavailable)
		return
	}
	h := api.History{Limits: make(map[string]api.LimitHistory)}
	now := time.Now()
	for i := 299; i >= 0; i-- {
		t := now.Add(-time.Duration(i) * time.Second)
		h.Times = append(h.Times, t)
		for _, l := range f.limits(t) {
			s := h.Limits[l.Name]
			s.Rate = append(s.Rate, l.Bytes.S1)
			s.Packets = append(s.Packets, l.PacketsRate.S1)
			s.P99 = append(s.P99, l.QueueDelay.P99)
			s.InFlight = append(s.InFlight, l.InFlight)
			s.Waiting = append(s.Waiting, l.Waiting)
			refused := 0.0
			for _, n := range l.RefusedRate {
				refused += n
			}
			s.Refused = append(s.Refused, refused)
			h.Limits[l.Name] = s
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(h)
}

// live streams events until the client goes.
func (f *fake) live(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	tick := time.NewTicker(f.every)
	defer tick.Stop()
	for i := 0; !f.disconnected.Load(); i++ {
		data, err := json.Marshal(f.at(time.Now(), i))
		if err != nil {
			panic(err)
		}
		if _, err := fmt.Fprintf(w, "event: live\ndata: %s\n\n", data); err != nil {
			return
		}
		w.(http.Flusher).Flush()
		select {
		case <-r.Context().Done():
			return
		case <-tick.C:
		}
	}
}

func (f *fake) overloaded() bool {
	return f.scenario != "idle" && f.scenario != "empty"
}

// nasty is text as an attacker might choose it.
const nasty = `<img src=x onerror="document.title='pwned'"><script>document.title='pwned'</script>`

// at returns the i-th live event of a stream, at time t.
func (f *fake) at(t time.Time, i int) api.Live {
	s := api.Status{
		Version: "0.1.0", PID: 4711, Config: "/etc/shaperd/shaperd.toml", Started: f.started, Now: t,
		State: "running", Mode: "enforce", Conformance: "conformant",
		Reload:    api.ReloadStatus{OK: true, At: f.started, Loaded: f.started, Duration: 0.0042, Errors: []string{}},
		Overrides: []api.Override{}, Blocks: []api.Block{},
		Listeners: []api.ListenerStatus{}, Attachments: []api.AttachmentStatus{},
		Buckets: []api.TableStatus{
			{Plane: "proxy", Entries: 1204, Capacity: 65536, EvictedDrained: 88121},
			{Plane: "packet", Entries: 61204, Capacity: 65536, EvictedDrained: 1288121, EvictedBacklogged: 12},
		},
		Process: api.Process{
			CPU: 812.4, CPUCores: 0.07 + 0.01*wave(t, 7), Memory: 48 << 20, Descriptors: 231,
			MaxDescriptors: 524288, WakeupLatencyP99: 0.00018,
		},
	}
	live := api.Live{Limits: f.limits(t), Talkers: f.talkers(t), Events: []api.Event{}}
	if f.scenario != "empty" {
		s.Listeners, s.Attachments = f.listeners(t), []api.AttachmentStatus{
			{Name: "plant", Interface: "eth1", Direction: "egress", Mode: "shape", Up: true, Queue: &api.QueueStatus{Packets: 112, Bytes: 150112, Drops: 3}},
			{Name: "edge", Interface: "wan0", Direction: "ingress", Mode: "police", Up: true},
		}
		live.Events = f.events(t, i)
	}
	until := f.started.Add(3*time.Hour + 10*time.Minute)
	switch f.scenario {
	case "violated":
		s.Conformance = "violated"
	case "bypass":
		s.Bypass = &api.Bypass{Since: f.started.Add(3 * time.Hour), Until: &until}
	case "observe":
		s.Mode, live.Quotas = "observe", quotas(12)
	case "shared", "alone":
		s.Shared = f.shared(t)
	case "unavailable":
		down := s.Listeners[0].Downstreams
		for i := range down[:2] {
			down[i].State, down[i].Error, down[i].InFlight = "failing", "connection refused "+nasty, 0
		}
		down[1].State, down[1].Error, down[1].RetryIn = "open", "breaker is open: connection reset by peer", 7.2
		s.Listeners[0].Unavailable = control.UnavailableReason(down)
	case "trouble":
		live.Quotas, s.QuotaError = quotas(2), "no space left on device "+nasty
		s.State = "stopping"
		s.RolledBack = &api.Revision{Revision: "5f0c61", At: t.Add(-2 * time.Hour)}
		s.SourceErrors, s.ScheduleError = []string{"/etc/shaperd/gold.txt:3: " + nasty}, "no memory "+nasty
		s.StateError, s.EndpointErrors = "read-only file system "+nasty, []string{"metrics: address in use " + nasty}
		s.Reload = api.ReloadStatus{At: t.Add(-20 * time.Minute), Loaded: f.started, Duration: 0.003, Errors: []string{
			`/etc/shaperd/shaperd.toml:14:12: limit "database": rate: "10mbps" is megabits to most people and megabytes to tc: write "10Mbit/s" or "10MB/s"`,
			`/etc/shaperd/conf.d/50-sms.toml:3:1: unknown key "max_conections": is "max_connections" meant?`,
		}}
		s.Overrides = []api.Override{
			{Limit: "database", Set: map[string]string{"rate": "20Mbit/s"}, Since: t.Add(-50 * time.Second), Until: &until},
			{Limit: "database", Set: map[string]string{"max_connections": "100"}, Since: t.Add(-40 * time.Second), UntilReload: true},
			{Limit: nasty, Set: map[string]string{"observe": nasty}, Since: t.Add(-50 * time.Second)},
		}
		s.Blocks = []api.Block{{Prefix: "192.0.2.0/24", Since: t.Add(-time.Minute), Until: &until}, {Prefix: "2001:db8::/32", Since: t.Add(-time.Minute)}}
		s.Penalized, s.WouldBePenalized = 12, 1
		s.Attachments[1].Up, s.Attachments[1].Error = false, "attach tcx ingress wan0: no such device "+nasty
		s.Listeners[0].Downstreams[1].State = "down"
	}
	live.Status = s
	return live
}

// quotas returns n quotas, of which the first one is used up.
func quotas(n int) *api.Quotas {
	all := &api.Quotas{Total: n + 30, UsedUp: 1, Quotas: []api.Quota{}}
	for i := range min(n, 10) {
		used := uint64(100e9) / uint64(i+1)
		all.Quotas = append(all.Quotas, api.Quota{Limit: "a-month", Key: fmt.Sprintf("source=198.51.100.%d/32", i+1), Unit: "bytes", Period: "month Europe/Berlin", Amount: 100e9, Used: used, Ends: 188000})
	}
	all.Quotas[1].Limit, all.Quotas[1].Key = nasty, nasty
	return all
}

func (f *fake) limits(t time.Time) []api.Limit {
	switch f.scenario {
	case "empty":
		return []api.Limit{}
	case "many":
		var list []api.Limit
		for i := range 16 {
			for _, l := range f.fourLimits(t.Add(time.Duration(i) * 11 * time.Second)) {
				l.Name = fmt.Sprintf("%s-%02d", l.Name, i+1)
				list = append(list, l)
			}
		}
		return list
	case "trouble":
		list := f.fourLimits(t)
		list[0].Override = map[string]string{"rate": "20Mbit/s", "max_connections": "100"}
		list[0].Penalty = &api.LimitPenalty{Mode: "enforce", Blocked: 12, Imposed: 40}
		list[1].Penalty = &api.LimitPenalty{Mode: "observe", WouldBlock: 1, WouldImpose: 3}
		list[0].Rate, list[0].Summary = 2.5e6, "20Mbit/s, queue 1s, 100 connections, wait 5s"
		list[3].Name, list[3].Override = nasty, map[string]string{"mode": nasty}
		list[3].NewConnections = 2.0 / 3600
		return list
	case "shared", "alone":
		list := f.fourLimits(t)
		for _, l := range f.shared(t).Limits {
			for i := range list {
				if list[i].Name == l.Limit {
					list[i].Shared = &api.LimitShare{Share: l.ColdShare, Connections: l.HostConnections}
					list[i].Summary += ", shared by 4 hosts"
				}
			}
		}
		list[0].Shared.Share = f.shared(t).Limits[0].Buckets[0].Share
		list[0].Bytes, list[0].InFlight = rates(10e6*list[0].Shared.Share*0.99), 25
		return list
	}
	return f.fourLimits(t)
}

// fourLimits returns four limits: one with a single bucket for bytes and connections, one per source,
// one for packets in the packet plane, and one for new connections only.
func (f *fake) fourLimits(t time.Time) []api.Limit {
	busy := f.overloaded()
	load := 0.18 + 0.08*wave(t, 40) + 0.03*wave(t, 7)
	database := limit("database", "proxy", "all", "80Mbit/s, queue 1s, 100 connections, wait 5s")
	database.Rate, database.MaxDelay, database.MaxConnections, database.QueueTimeout = 10e6, 1, 100, 5
	source := limit("per-source", "proxy", "source", "10Mbit/s, queue 500ms, 20 connections, wait 2s")
	source.Rate, source.MaxDelay, source.MaxConnections, source.QueueTimeout, source.Single = 1.25e6, 0.5, 20, 2, false
	plc := limit("plc", "packet", "all", "2000/s packets burst 20, queue 200ms")
	plc.Packets, plc.MaxDelay, plc.Direction = 2000, 0.2, "to-downstream"
	logins := limit("logins", "proxy", "source,port", "5/s new connections, wait 1s")
	logins.NewConnections, logins.QueueTimeout, logins.Single = 5, 1, false

	if busy {
		load = 0.998 + 0.004*wave(t, 3)
		database.InFlight, database.Waiting = 100, int64(36+10*wave(t, 20))
		database.DelayedShare = 0.84
		database.QueueDelay = api.Delay{Count: 1 << 16, P50: 0.212, P99: 0.61 + 0.2*wave(t, 60)}
		database.ConnectionWait = api.Delay{Count: 1201, P50: 0.4, P99: 2.1}
		database.Refused = map[string]uint64{"queue-full": 121312, "wait-timeout": 412}
		database.RefusedRate = map[string]float64{"queue-full": 31.2 + 8*wave(t, 15), "wait-timeout": 1.4}
		source.InFlight, source.Waiting, source.DelayedShare = 212, 14, 0.31
		source.QueueDelay = api.Delay{Count: 9112, P50: 0.011, P99: 0.12 + 0.05*wave(t, 31)}
		plc.DelayedShare = 0.12
		database.Throttling, source.Throttling, plc.Throttling = true, true, true
		plc.QueueDelay = api.Delay{Count: 300, P50: 0.0004, P99: 0.0031}
	} else {
		database.InFlight, source.InFlight = int64(12+4*wave(t, 30)), int64(12+4*wave(t, 30))
	}
	source.Bytes, database.Bytes = rates(14e6*load), rates(10e6*load)
	database.BytesTotal, source.BytesTotal = 12<<40, 14<<40
	plc.PacketsRate, plc.Bytes, plc.PacketsTotal = rates(1800*load), rates(180000*load), 123456789
	logins.Admitted, logins.AdmittedTotal, logins.Bytes = rates(3+2*wave(t, 9)), 190001, rates(8e5*load)
	database.Admitted, database.AdmittedTotal = rates(8+2*wave(t, 9)), 918273
	logins.Conformance = api.Conformance{Conformant: true, Unmonitored: true}
	database.Conformance = api.Conformance{Conformant: true, Sigma: 12600, SigmaMax: 20111, Allowed: 34816}
	source.Conformance = api.Conformance{Conformant: true, Sigma: 4100, SigmaMax: 8000, Allowed: 9000, Sampled: true}
	plc.Conformance = api.Conformance{Conformant: true, Sigma: 3, SigmaMax: 12, Allowed: 22, InPackets: true}

	switch f.scenario {
	case "violated":
		database.Conformance = api.Conformance{Sigma: 5.2e6, SigmaMax: 5.2e6, Allowed: 34816, Violations: 4120}
		if t.Second()/20 == 1 {
			database.Bytes = rates(15e6)
		}
	case "bypass", "observe":
		for _, l := range []*api.Limit{&database, &source, &plc, &logins} {
			l.Mode, l.Conformance = "observe", api.Conformance{Conformant: true, Unmonitored: true}
		}
		// The limit shows what would have left at its rate; the listeners show the actual traffic.
		database.InFlight, database.Waiting = 341, 0
	}
	return []api.Limit{database, source, plc, logins}
}

func limit(name, plane, key, summary string) api.Limit {
	return api.Limit{
		Name: name, Plane: plane, Mode: "enforce", Key: key, Single: true, Summary: summary, Direction: "both",
		Refused: map[string]uint64{}, RefusedRate: map[string]float64{},
	}
}

func (f *fake) listeners(t time.Time) []api.ListenerStatus {
	l := f.fourLimits(t)[0]
	if l.Mode == "observe" {
		l.Bytes = rates(23e6 + 3e6*wave(t, 12))
	}
	return []api.ListenerStatus{
		{
			Name: "db", Addresses: []string{"tcp://0.0.0.0:5432", "tcp://[::]:5432"}, Connections: l.InFlight + l.Waiting,
			ToDownstreamRate: l.Bytes.S10 * 0.3, FromDownstreamRate: l.Bytes.S10 * 0.7, ToDownstream: 4 << 40, FromDownstream: 8 << 40,
			Accepted: 918273, Ended: map[string]uint64{"closed": 917000, "reset-by-client": 800, "refused": 412}, DialErrors: 3,
			Downstreams: []api.DownstreamStatus{
				{Listener: "db", Downstream: "10.0.0.5:5432", State: "up", InFlight: int(l.InFlight) / 2, MaxConnections: 60, Turns: 81_345_000, TurnsRate: 1220 + 90*wave(t, 17), Connect: api.Delay{Count: 4000, P50: 0.00021, P99: 0.002}, Answer: api.Delay{Count: 73000, P50: 0.0042, P99: 0.061}, RTT: api.Delay{Count: 900, P50: 0.00034, P99: 0.001}},
				{Listener: "db", Downstream: "10.0.0.6:5432", State: "up", InFlight: int(l.InFlight) / 2, MaxConnections: 60, Turns: 40_100_000, TurnsRate: 310 + 40*wave(t, 11), Connect: api.Delay{Count: 900, P50: 0.00023, P99: 0.021}, Answer: api.Delay{Count: 18000, P50: 0.034, P99: 0.82}, DialsRefused: 212, DialsTimedOut: 3, Resets: 41},
				{Listener: "db", Downstream: "10.0.0.7:5432", State: "drained"},
			},
		},
		{
			Name: "dns", Addresses: []string{"udp://0.0.0.0:53"}, Flows: 1804, ToDownstreamRate: 21000, FromDownstreamRate: 84000,
			Ended:       map[string]uint64{},
			Downstreams: []api.DownstreamStatus{{Listener: "dns", Downstream: "10.0.0.9:53", State: "up", InFlight: 1804, Answer: api.Delay{Count: 54000, P50: 0.0012, P99: 0.009}, TurnsRate: 912, Turns: 3_280_112, ICMPErrors: 3}},
		},
	}
}

func (f *fake) talkers(t time.Time) map[string][]api.Talker {
	all := map[string][]api.Talker{"source": {}, "prefix": {}, "asn": {}}
	if f.scenario == "empty" {
		return all
	}
	for i := range 8 {
		n := float64(8 - i)
		talker := api.Talker{Rate: api.Estimate{Value: 1.9e5*n + 1e4*wave(t, 9+n), Error: 31000}}
		if f.overloaded() {
			talker.Delayed, talker.Dropped = api.Estimate{Value: 1.7 * n, Error: 0.02}, api.Estimate{Value: 4 * (n - 4), Error: 0.3}
			if i >= 4 {
				talker.Dropped = api.Estimate{}
			}
		}
		for kind, name := range map[string]string{
			"source": fmt.Sprintf("198.51.100.%d", 7+13*i), "prefix": fmt.Sprintf("2001:db8:%x::/48", 4096+i), "asn": fmt.Sprintf("AS%d", 64500+i),
		} {
			talker.Name, talker.ASName = name, fmt.Sprintf("EXAMPLE-%d Networks Ltd", i)
			if f.scenario == "trouble" && i == 2 {
				talker.ASName = nasty
			}
			all[kind] = append(all[kind], talker)
		}
	}
	return all
}

// events returns 12 events for the first live event of a stream, and one for every fourth; in
// "trouble", some are omitted before that.
func (f *fake) events(t time.Time, i int) []api.Event {
	first, n := 12+i/4, 1
	if f.scenario == "trouble" {
		first = 12 + i
	}
	if i == 0 {
		first, n = 1, 12
	} else if i%4 != 0 {
		return []api.Event{}
	}
	kinds := []api.Event{
		{Level: "info", Message: "ready", Attrs: map[string]string{"listeners": "2", "limits": "4"}},
		{Level: "warn", Message: "downstream is down", Attrs: map[string]string{"listener": "db", "downstream": "10.0.0.6:5432", "error": "dial tcp 10.0.0.6:5432: i/o timeout"}},
		{Level: "info", Message: "downstream is up again", Attrs: map[string]string{"listener": "db", "downstream": "10.0.0.6:5432"}},
		{Level: "warn", Message: "refused", Attrs: map[string]string{"limit": "database", "reason": "queue-full", "source": "198.51.100.7", "more": "311"}},
		{Level: "error", Message: "reload", Attrs: map[string]string{"error": "/etc/shaperd/shaperd.toml:14:12: limit \"database\": rate: \"10mbps\" has two readings"}},
	}
	if f.scenario == "trouble" {
		kinds[3].Message = nasty
		kinds[3].Attrs = maps.Clone(kinds[3].Attrs)
		kinds[3].Attrs[nasty] = nasty
	}
	var list []api.Event
	for id := first; id < first+n; id++ {
		e := kinds[id%len(kinds)]
		e.ID, e.Time = uint64(id), t.Add(-time.Duration(first+n-id-1)*47*time.Second)
		list = append(list, e)
	}
	return list
}

func rates(v float64) api.Rates { return api.Rates{S1: v, S10: v * 0.98, S60: v * 0.96} }

// wave returns a sine between -1 and 1.
func wave(t time.Time, period float64) float64 {
	return math.Sin(float64(t.UnixMilli()) / 1000 / period * 2 * math.Pi)
}
