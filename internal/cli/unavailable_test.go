package cli

import (
	"encoding/json"
	"net"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

// TestStatus_ListenerUnavailable checks that status, its exit code, explain and the metrics report a
// listener whose downstream cannot be reached, and that the downstream is retried.
func TestStatus_ListenerUnavailable(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"tcp", "udp"} {
		t.Run(protocol, func(t *testing.T) {
			listen, metrics, downstream := testutil.FreeAddr(t, "tcp"), testutil.FreeAddr(t, "tcp"), testutil.FreeAddr(t, "tcp")
			text := strings.Replace(configText(listen, metrics, downstream, "1MB/s"), "tcp://", protocol+"://", 1)
			s := startControlled(t, writeConfig(t, "", text))
			_, port, err := net.SplitHostPort(listen)
			if err != nil {
				t.Fatal(err)
			}
			explain := "explain --source 192.0.2.7 --to " + protocol + "/" + port
			s.must("status", "conformance: ok\nNo traffic is throttled.")
			up := `shaperd_downstream_up{downstream="` + downstream + `",listener="db"} `
			if !strings.Contains(testutil.MustScrape(t, metrics), up+"1") {
				t.Error("the downstream is not up initially")
			}

			why := "NO DOWNSTREAM IS UP at db: " + downstream + " is failing (connection refused)."
			testutil.WaitFor(t, "status to report it", func() bool {
				if c, err := net.Dial(protocol, listen); err == nil {
					c.SetDeadline(time.Now().Add(100 * time.Millisecond))
					c.Write([]byte("x"))
					c.Read(make([]byte, 1))
					c.Close()
				}
				_, err := s.verb("status")
				return err != nil
			})
			out, err := s.verb("status")
			if !strings.HasPrefix(out, why+"\n") || strings.Contains(out, "No traffic is throttled") || !strings.Contains(out, "failing: connection refused") {
				t.Errorf("status:\n%s", out)
			}
			if err == nil || err.Error() != "no downstream is up at db" || exitCode(err) != exitFailure {
				t.Errorf("status fails with %v", err)
			}
			out, err = s.verb("status", "--json")
			var status api.Status
			if wrong := json.Unmarshal([]byte(out), &status); wrong != nil || err == nil || status.Listeners[0].Unavailable == "" {
				t.Errorf("status --json: %v, %v\n%s", err, wrong, out)
			}
			s.must(explain, why)
			s.must("downstreams", "failing: connection refused")
			if !strings.Contains(testutil.MustScrape(t, metrics), up+"0") {
				t.Error("its metric is not 0")
			}
			s.waitLog("downstream is failing")

			// The downstream is back.
			if protocol == "tcp" {
				l, err := net.Listen("tcp4", downstream)
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
			} else {
				l, err := net.ListenPacket("udp4", downstream)
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				go func() {
					b := make([]byte, 1)
					for {
						_, from, err := l.ReadFrom(b)
						if err != nil {
							return
						}
						l.WriteTo(b, from)
					}
				}()
			}
			testutil.WaitFor(t, "the downstream to be used again", func() bool {
				if c, err := net.Dial(protocol, listen); err == nil {
					c.Write([]byte("x"))
					c.Close()
				}
				_, err := s.verb("status")
				return err == nil
			})
			if !strings.Contains(testutil.MustScrape(t, metrics), up+"1") {
				t.Error("its metric is not 1 again")
			}

			// The downstream is drained.
			s.must("downstreams drain "+downstream, "drained")
			out, err = s.verb("status")
			if err == nil || !strings.HasPrefix(out, "NO DOWNSTREAM IS UP at db: "+downstream+" is drained.\n") {
				t.Errorf("status of a drained one: %v\n%s", err, out)
			}
			text = testutil.MustScrape(t, metrics)
			if !strings.Contains(text, up+"0") || !strings.Contains(text, `shaperd_downstream_drained{downstream="`+downstream+`",listener="db"} 1`) {
				t.Error("the metrics do not report the drain")
			}
			s.must(explain, "NO DOWNSTREAM IS UP at db")
		})
	}
}
