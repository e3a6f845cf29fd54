package cli

import (
	"net"
	"strings"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestFlowQuota_IsReported checks that status, explain, events and metrics report a source that has
// exhausted its UDP flows, and name the key to raise.
func TestFlowQuota_IsReported(t *testing.T) {
	t.Parallel()
	listen, metrics := testutil.FreeAddr(t, "tcp"), testutil.FreeAddr(t, "tcp")
	silent, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() })
	s := startControlled(t, writeConfig(t, "", `[daemon]
metrics = "`+metrics+`"
dashboard = ""
pin_path  = "/nowhere/pins"
[[listen]]
name = "dns"
address = ["udp://`+listen+`"]
downstream = ["`+silent.LocalAddr().String()+`"]
max_flows = 100
max_flows_per_source = 2
`))
	_, port, err := net.SplitHostPort(listen)
	if err != nil {
		t.Fatal(err)
	}
	ask := func() {
		for range 4 { // each from a new port
			c, err := net.Dial("udp4", listen)
			if err != nil {
				t.Fatal(err)
			}
			c.Write([]byte("question"))
			defer c.Close()
		}
	}
	explain := "explain --source 127.0.0.1 --to udp/" + port
	s.must("status", "No traffic is throttled.", "0 of 100")
	s.must(explain, "No limit matches: traffic passes without delay.", "UDP flows: 0 of 2 for this source, 0 of 100 at the listener.")
	testutil.WaitFor(t, "explain to report it", func() bool {
		ask()
		out, err := s.verb(strings.Fields(explain)...)
		return err == nil && strings.Contains(out, "UDP flows: 2 of 2 for this source, 2 of 100 at the listener.\n"+
			"A new flow would be REFUSED: the quota is exhausted (max_flows_per_source).\nNo limit matches.\n")
	})
	testutil.WaitFor(t, "status to report it", func() bool {
		ask()
		out, err := s.verb("status")
		return err == nil && strings.Contains(out, "UDP FLOW QUOTA EXHAUSTED at dns: ") && strings.Contains(out, "2 of 100 flows") &&
			!strings.Contains(out, "No traffic is throttled")
	})
	testutil.WaitFor(t, "an idle flow that can be evicted", func() bool {
		out, err := s.verb(strings.Fields(explain)...)
		return err == nil && strings.Contains(out, "2 of 100 at the listener.\nA new flow would evict an idle one.\nNo limit matches: traffic passes without delay.\n")
	})
	s.must("events", "UDP flow refused", "max_flows_per_source", "127.0.0.1")
	text := testutil.MustScrape(t, metrics)
	for _, want := range []string{`shaperd_listener_udp_flows_max{listener="dns"} 100`, `shaperd_listener_udp_flows{listener="dns"} 2`} {
		if !strings.Contains(text, want) {
			t.Errorf("the metrics have no %s", want)
		}
	}
}
