package metrics_test

import (
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	promtest "github.com/prometheus/client_golang/prometheus/testutil"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control/internal/fakes"
	"shaperd.dev/shaperd/control/metrics"
	"shaperd.dev/shaperd/control/monitor"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

type daemon struct{}

func (daemon) Describe(s *api.Status)        {}
func (daemon) SharedMetrics() metrics.Shared { return fakes.SharedMetrics() }

// newCollector returns a collector of s and of fakes.
func newCollector(t *testing.T, s *shaper.Shaper) *metrics.Collector {
	t.Helper()
	m := monitor.New(s, fakes.Proxy{}.Downstreams, slog.New(slog.DiscardHandler))
	t.Cleanup(m.Close)
	return &metrics.Collector{
		Shaper: s, Proxy: fakes.Proxy{}, Packets: fakes.Packets{}, Daemon: daemon{}, Monitor: m, Reloads: &monitor.Reloads{},
		Clock: func() leaky.Time { return leaky.Second }, LogDropped: func() uint64 { return 2 }, Version: "1.0",
	}
}

func TestCollector_WellFormed(t *testing.T) {
	c := newCollector(t, fakes.Shaper(t, 2))
	c.Reloads.Record(time.Millisecond)
	c.Reloads.Record(time.Millisecond, "no")
	problems, err := promtest.CollectAndLint(c)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	want := `
# HELP shaperd_config_reload_success 1 if the last reload succeeded, 0 if it failed and the previous configuration is effective.
# TYPE shaperd_config_reload_success gauge
shaperd_config_reload_success 0
# HELP shaperd_config_reloads_total Reloads by result, including the first load.
# TYPE shaperd_config_reloads_total counter
shaperd_config_reloads_total{result="failure"} 1
shaperd_config_reloads_total{result="success"} 1
# HELP shaperd_attachment_up 1 if limits apply to packets at the interface. The interface label is empty if a named interface is missing; there is no series while no interface matches the patterns.
# TYPE shaperd_attachment_up gauge
shaperd_attachment_up{attachment="lost",direction="ingress",interface="",mode="police"} 0
shaperd_attachment_up{attachment="uplink",direction="egress",interface="eth0",mode="shape"} 1
# HELP shaperd_attachment_queue_drops_total Packets dropped by the queue of the interface after they were charged: the interface is slower than its traffic.
# TYPE shaperd_attachment_queue_drops_total counter
shaperd_attachment_queue_drops_total{attachment="uplink",direction="egress",interface="eth0"} 3
# HELP shaperd_downstream_up 1 if the downstream is reachable and not drained; 0 if checks or dials fail, it has no address, or an operator drained it.
# TYPE shaperd_downstream_up gauge
shaperd_downstream_up{downstream="10.0.0.5:5432",listener="l"} 1
shaperd_downstream_up{downstream="db.local:5432",listener="l"} 0
# HELP shaperd_packet_buckets Buckets of the packet plane that have a backlog.
# TYPE shaperd_packet_buckets gauge
shaperd_packet_buckets 5
# HELP shaperd_shared_alone_seconds_total Time for which this host was not in its group, or its lease had ended.
# TYPE shaperd_shared_alone_seconds_total counter
shaperd_shared_alone_seconds_total 1.5
# HELP shaperd_shared_calls_total Calls to the ledger, by result.
# TYPE shaperd_shared_calls_total counter
shaperd_shared_calls_total{result="answered"} 9
shaperd_shared_calls_total{result="failed"} 2
shaperd_shared_calls_total{result="refused"} 1
shaperd_shared_calls_total{result="timed-out"} 3
# HELP shaperd_shared_connections_max Connections that may be in flight at this host under the limit; with a key, of each cold bucket.
# TYPE shaperd_shared_connections_max gauge
shaperd_shared_connections_max{limit="aa"} 30
# HELP shaperd_shared_joined 1 if this host is in its group and its lease has not ended, 0 if it is alone.
# TYPE shaperd_shared_joined gauge
shaperd_shared_joined 1
# HELP shaperd_shared_share_ratio Part of the rates of the limit that this host may use, from 0 to 1; with a key, of each cold bucket.
# TYPE shaperd_shared_share_ratio gauge
shaperd_shared_share_ratio{limit="aa"} 0.31
shaperd_shared_share_ratio{limit="ab"} 0.5
# HELP shaperd_shared_short Buckets of the limit of which this host should get more, as soon as other hosts have returned it; with a key, among the ten of which it has most.
# TYPE shaperd_shared_short gauge
shaperd_shared_short{limit="aa"} 1
shaperd_shared_short{limit="ab"} 0
`
	if err := promtest.CollectAndCompare(c, strings.NewReader(want), "shaperd_config_reload_success", "shaperd_config_reloads_total",
		"shaperd_attachment_up", "shaperd_downstream_up", "shaperd_attachment_queue_drops_total", "shaperd_packet_buckets",
		"shaperd_shared_alone_seconds_total", "shaperd_shared_calls_total", "shaperd_shared_connections_max", "shaperd_shared_joined", "shaperd_shared_share_ratio", "shaperd_shared_short"); err != nil {
		t.Error(err)
	}
}

// The number of series depends only on the configuration.
func TestCollector_CardinalityIsBounded(t *testing.T) {
	const limits = shaper.MaxLimits
	s := fakes.Shaper(t, limits)
	c := newCollector(t, s)
	before := promtest.CollectAndCount(c)
	p := s.Policy()
	for i := range 10000 {
		f := shaper.Flow{Source: addr(i), Port: uint16(i), Protocol: shaper.TCP}
		r := p.Route(&f)
		s.Decide(p, &f, r, r.ToDownstream, 100, 1, leaky.Second)
	}
	if after := promtest.CollectAndCount(c); after != before {
		t.Errorf("%d series became %d", before, after)
	}
	if most := limits*(3*shaper.NumVerdicts*shaper.NumReasons+10) + 150; before > most {
		t.Errorf("%d series, at most %d", before, most)
	}
}

func addr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}) }
