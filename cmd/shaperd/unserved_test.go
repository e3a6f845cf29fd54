package main

import (
	"encoding/json"
	"net"
	"strings"
	"testing"
	"time"

	"shaperd/control"
)

// A listener whose downstream cannot be reached is the first line of status, and its exit
// code; of explain, of the metrics and of the page's data too. It goes on being tried.
func TestNobodyIsServed(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"tcp", "udp"} {
		t.Run(protocol, func(t *testing.T) {
			listen, metrics, downstream := freePort(t), freePort(t), freePort(t)
			text := strings.Replace(configText(listen, metrics, downstream, "1MB/s"), "tcp://", protocol+"://", 1)
			s := startSteered(t, writeConfig(t, "", text))
			_, port, err := net.SplitHostPort(listen)
			if err != nil {
				t.Fatal(err)
			}
			explain := "explain --source 192.0.2.7 --to " + protocol + "/" + port
			s.must("status", "The promise is kept.\nNobody is slowed.")
			up := `shaperd_downstream_up{downstream="` + downstream + `",listener="db"} `
			if !strings.Contains(scrape(t, metrics), up+"1") {
				t.Error("it is not up to begin with")
			}

			why := "NOBODY IS SERVED at db: " + downstream + " is failing (connection refused)."
			await(t, "status tells", func() bool {
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
			if !strings.HasPrefix(out, why+"\n") || strings.Contains(out, "Nobody is slowed") || !strings.Contains(out, "failing: connection refused") {
				t.Errorf("status:\n%s", out)
			}
			if err == nil || err.Error() != "nobody is served at db" || exitCode(err) != exitFailure {
				t.Errorf("status fails with %v", err)
			}
			out, err = s.verb("status", "--json")
			var status control.Status
			if wrong := json.Unmarshal([]byte(out), &status); wrong != nil || err == nil || status.Listeners[0].Unserved == "" {
				t.Errorf("status --json: %v, %v\n%s", err, wrong, out)
			}
			s.must(explain, why)
			s.must("downstreams", "failing: connection refused")
			if !strings.Contains(scrape(t, metrics), up+"0") {
				t.Error("its metric is not 0")
			}
			s.waitLog("downstream is failing")

			// It is back.
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
			await(t, "it is served again", func() bool {
				if c, err := net.Dial(protocol, listen); err == nil {
					c.Write([]byte("x"))
					c.Close()
				}
				_, err := s.verb("status")
				return err == nil
			})
			if !strings.Contains(scrape(t, metrics), up+"1") {
				t.Error("its metric is not 1 again")
			}

			// An operator has it get nothing.
			s.must("downstreams drain "+downstream, "drained")
			out, err = s.verb("status")
			if err == nil || !strings.HasPrefix(out, "NOBODY IS SERVED at db: "+downstream+" is drained.\n") {
				t.Errorf("status of a drained one: %v\n%s", err, out)
			}
			text = scrape(t, metrics)
			if !strings.Contains(text, up+"0") || !strings.Contains(text, `shaperd_downstream_drained{downstream="`+downstream+`",listener="db"} 1`) {
				t.Error("the metrics do not tell that it is drained")
			}
			s.must(explain, "NOBODY IS SERVED at db")
		})
	}
}
