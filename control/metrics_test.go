package control

import (
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	promtest "github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"

	"shaperd.dev/shaperd/control/monitor"
	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

func TestMain(m *testing.M) {
	if help := helpers[os.Getenv("SHAPERD_TEST_HELPER")]; help != nil {
		if err := help(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	flag.Parse()
	flag.Set("test.parallel", "4") // they wait, mostly
	goleak.VerifyTestMain(m)
}

// busy returns a shaper with every counter of every limit in use.
func busy(t *testing.T, limits int) *shaper.Shaper {
	t.Helper()
	s := shaper.New(1000)
	var all []shaper.Limit
	for i := range limits {
		all = append(all, shaper.Limit{Name: string(rune('a'+i/26)) + string(rune('a'+i%26)), Rate: 8e6, Observe: i%2 == 1})
	}
	p, err := s.Compile(all, []shaper.Listener{{Name: "l", TCP: true}}, nil, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	s.Swap(p, leaky.Second)
	for i := range p.Len() {
		st := p.State(i)
		for v := range shaper.NumVerdicts {
			for r := range shaper.NumReasons {
				st.Bytes.Add(shaper.Verdict(v), shaper.Reason(r), 1000)
				st.Packets.Add(shaper.Verdict(v), shaper.Reason(r), 2)
				st.Connections.Add(shaper.Verdict(v), shaper.Reason(r), 1)
			}
		}
		st.SlotWait.Observe(3 * time.Millisecond)
		st.QueueDelay.Observe(time.Hour)
	}
	return s
}

func TestMetricsAreWellFormed(t *testing.T) {
	reloads := &monitor.Reloads{}
	reloads.Record(time.Millisecond)
	reloads.Record(time.Millisecond, "no")
	o := options(t, busy(t, 2))
	o.Reloads = reloads
	c := &collector{o}
	problems, err := promtest.CollectAndLint(c)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	want := `
# HELP shaperd_config_reload_success 1 if the last reload succeeded, 0 if the previous configuration stayed.
# TYPE shaperd_config_reload_success gauge
shaperd_config_reload_success 0
# HELP shaperd_config_reloads_total Reloads by result, including the first load.
# TYPE shaperd_config_reloads_total counter
shaperd_config_reloads_total{result="failure"} 1
shaperd_config_reloads_total{result="success"} 1
# HELP shaperd_attachment_up 1 if packets at the interface are limited. The interface label is empty if a named interface is missing; there is no series while no interface matches the patterns.
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
`
	if err := promtest.CollectAndCompare(c, strings.NewReader(want), "shaperd_config_reload_success", "shaperd_config_reloads_total",
		"shaperd_attachment_up", "shaperd_downstream_up", "shaperd_attachment_queue_drops_total", "shaperd_packet_buckets"); err != nil {
		t.Error(err)
	}
}

// The number of series depends only on the configuration.
func TestCardinalityIsBounded(t *testing.T) {
	const limits = shaper.MaxLimits
	s := busy(t, limits)
	c := &collector{options(t, s)}
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
	if most := limits*(3*shaper.NumVerdicts*shaper.NumReasons+9) + 100; before > most {
		t.Errorf("%d series, at most %d", before, most)
	}
}

func TestServeMetrics(t *testing.T) {
	at := testutil.FreeAddr(t, "tcp")
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	waits, err := ServeMetrics(at, options(t, busy(t, 1)))
	if err != nil {
		t.Errorf("a port in use: %v", err)
	}
	waits.Close()
	l.Close()
	if _, err := ServeMetrics("192.0.2.1:9464", options(t, busy(t, 1))); err == nil {
		t.Error("served at an address of another host")
	}
	m, err := ServeMetrics(at, options(t, busy(t, 1)))
	if err != nil {
		t.Fatal(err)
	}
	defer http.DefaultClient.CloseIdleConnections()
	for path, want := range map[string]int{"/metrics": 200, "/": 404} {
		r, err := http.Get("http://" + at + path)
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		if r.StatusCode != want {
			t.Errorf("GET %s: %d, want %d", path, r.StatusCode, want)
		}
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	off, err := ServeMetrics("", nil)
	if err != nil || off.Close() != nil {
		t.Errorf("off: %v", err)
	}
}

func addr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}) }
