package cli

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

// gateway is one of three daemons that share a limit; the first one serves the ledger.
type gateway struct {
	*controlledDaemon
	name, metrics, text string
}

// startGroup starts the daemons of a group, at real sockets.
func startGroup(t *testing.T) []*gateway {
	t.Helper()
	authority := testutil.NewAuthority(t)
	ledger := testutil.FreeAddr(t, "tcp")
	var all []*gateway
	for i, name := range []string{"gw1", "gw2", "gw3"} {
		g := &gateway{name: name, metrics: testutil.FreeAddr(t, "tcp")}
		cert, key := authority.Issue(name, time.Now().Add(time.Hour), ledger)
		serve := ""
		if i == 0 {
			serve = fmt.Sprintf("serve = %q\n", ledger)
		}
		g.text = configText(testutil.FreeAddr(t, "tcp"), g.metrics, testutil.ServeTCP(t, testutil.Echo), "1MB/s") + `
[[limit]]
name = "total"
rate = "80Mbit/s"
max_connections = 100
shared = true
[shared]
hosts = 3
` + fmt.Sprintf("name = %q\nstore = [\"shaperd://%s\"]\n%sca_file = %q\ncert_file = %q\nkey_file = %q\n", name, ledger, serve, authority.CAFile, cert, key)
		g.controlledDaemon = startControlled(t, writeConfig(t, "", g.text), "--state", filepath.Join(t.TempDir(), "state"))
		all = append(all, g)
	}
	return all
}

// reloadWith makes g's configuration text.
func (g *gateway) reloadWith(text string) {
	g.t.Helper()
	before := strings.Count(g.log.String(), "msg=reloaded")
	writeConfig(g.t, g.config, text)
	g.reload <- syscall.SIGHUP
	testutil.WaitFor(g.t, "reload", func() bool { return strings.Count(g.log.String(), "msg=reloaded") > before })
}

func (g *gateway) shared() (s api.Shared) {
	g.t.Helper()
	out, _ := g.verb("shared", "status", "--json")
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		g.t.Fatalf("%v: %s", err, out)
	}
	return s
}

// waitShared waits until ok returns true for the group as g knows it.
func (g *gateway) waitShared(what string, ok func(*api.Shared) bool) {
	g.t.Helper()
	var last api.Shared
	defer func() {
		if g.t.Failed() {
			text, _ := json.MarshalIndent(last, "", "  ")
			g.t.Logf("%s: %s: %s", g.name, what, text)
		}
	}()
	testutil.WaitFor(g.t, g.name+": "+what, func() bool {
		last = g.shared()
		return ok(&last)
	})
}

func TestGroup(t *testing.T) {
	t.Parallel()
	all := startGroup(t)
	for _, g := range all {
		g.waitShared("joined", func(s *api.Shared) bool {
			return s.State == "joined" && s.Counted && s.Live == 3 && len(s.Problems) == 0 && s.Limits[0].HostConnections == 33
		})
	}
	gw1, gw2, gw3 := all[0], all[1], all[2]
	gw2.must("shared status", "gw2: joined ", "group default; 3 of 3 hosts live\n", "\ngw2 (this host)  counted ", "\ntotal  all     33% of 80Mbit/s", "\ntotal  all     33 of 100 slots")
	gw2.must("limits total", "80Mbit/s, queue 200ms, 100 connections", "shared by 3 hosts, here ", ", 33 connections; one bucket")
	port := regexp.MustCompile(`tcp://127[0-9.]+:([0-9]+)`).FindStringSubmatch(gw2.text)[1]
	gw2.must("explain --source 127.0.0.9 --to tcp/"+port, "100 connections", ", here 33% = ", ", 33 connections ")
	scraped := testutil.MustScrape(t, gw2.metrics)
	for _, want := range []string{
		"shaperd_shared_joined 1\n", "shaperd_shared_hosts 3\n", "shaperd_shared_live_hosts 3\n", "shaperd_shared_counted 1\n", "shaperd_shared_withdrawn 0\n",
		`shaperd_shared_share_ratio{limit="total"} 0.3`, `shaperd_shared_calls_total{result="answered"} `, `shaperd_shared_call_seconds_bucket{le="0.001"} `,
	} {
		if !strings.Contains(scraped, want) {
			t.Errorf("%s is not in the metrics", strings.TrimSpace(want))
		}
	}

	// Another rate at one host.
	gw3.reloadWith(strings.Replace(gw3.text, "80Mbit/s", "90Mbit/s", 1))
	gw1.waitShared("disagreement", func(s *api.Shared) bool {
		return len(s.Differences) == 1 && s.Differences[0].Limit == "total" && s.Differing == 1
	})
	out, err := gw1.verb("status")
	if line := `HOSTS DISAGREE: about limit "total": here rate 80Mbit/s = 10MB/s; at gw3 rate 90Mbit/s = 11.25MB/s.` + "\n"; !strings.HasPrefix(out, line) || exitCode(err) != exitFailure {
		t.Errorf("status: %v\n%s", err, out)
	}
	gw3.reloadWith(gw3.text)
	gw1.waitShared("agreement", func(s *api.Shared) bool { return s.Differing == 0 && len(s.Problems) == 0 })

	keepsThird := func(s *api.Shared) bool {
		return s.Ledger != nil && len(s.Ledger.Hosts) == 3 && s.Ledger.Hosts[2].State != "gone"
	}
	// Another number of hosts at one: it has a part as if it were one of those, and the others keep its place.
	gw3.reloadWith(strings.Replace(gw3.text, "hosts = 3", "hosts = 4", 1))
	gw3.waitShared("alone among four", func(s *api.Shared) bool {
		return s.State == "alone" && strings.Contains(s.Problems[0].Text, "the group has hosts = 3, and this host hosts = 4") && strings.Contains(s.Problems[0].Text, "lets 1/4 of each")
	})
	gw1.waitShared("the place of gw3 in the ledger", keepsThird)
	// Without a store, it always has a third.
	withoutStore, _, _ := strings.Cut(gw3.text, `name = "gw3"`)
	gw3.reloadWith(withoutStore)
	gw3.waitShared("without a store", func(s *api.Shared) bool { return s.State == "static" })
	gw1.waitShared("the place of gw3 in the ledger", keepsThird)
	gw3.reloadWith(gw3.text)
	gw3.waitShared("joined again", func(s *api.Shared) bool { return s.State == "joined" && s.Counted && s.Live == 3 })

	// doctor asks the ledger itself. Other checks may fail on this host, and a slow answer is worth a warning.
	answers := regexp.MustCompile(`"name": "shared",\s*"state": "ok",\s*"text": "the ledger at shaperd://[0-9.:]+ answers in [0-9.]+[mµ]s, with 3 of 3 hosts"`)
	testutil.WaitFor(t, "doctor to find the ledger in order", func() bool {
		out, _ = gw2.verb("doctor", "--json", "--config", gw2.config)
		return answers.MatchString(out)
	})
	other := writeConfig(t, "", strings.Replace(gw2.text, "80Mbit/s", "90Mbit/s", 1))
	out, _ = gw2.verb("doctor", "--json", "--config", other)
	for _, want := range []string{`hosts disagree about limit \"total\": here rate 90Mbit/s = 11.25MB/s; at gw1 rate 80Mbit/s = 10MB/s.`, "at gw3", "the shared limits of the daemon differ from the configuration"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in:\n%s", want, out)
		}
	}

	// A host that runs cannot be forgotten.
	gw1.mustFail("shared forget gw2 --yes", "gw2 called ")
	gw1.mustFail("shared forget gw1 --yes", "gw1 is this host itself")
	gw1.mustFail("shared forget gw9 --yes", `there is no host "gw9" in this group: known are gw1, gw2, gw3`)

	// One that stops in order is gone.
	gw3.stop()
	gw3.waitLog("msg=stopped")
	gw1.waitShared("gw3 gone", func(s *api.Shared) bool { return s.Ledger != nil && s.Ledger.Hosts[2].State == "gone" && s.Live == 3 })
	gw1.must("shared status", "; 2 of 3 hosts live, 1 gone\n")
	gw1.must("shared forget gw3 --yes", "gw3 is forgotten")
	gw1.waitLog(`msg="host of the group forgotten by operator" host=gw3 uid=`)

	// The ledger ends with its daemon.
	gw1.stop()
	gw1.waitLog("msg=stopped")
	gw2.waitShared("alone", func(s *api.Shared) bool { return s.State == "alone" && s.StoreError != "" })
	out, err = gw2.verb("status")
	if !strings.HasPrefix(out, "ALONE: no ledger answers: ") || !strings.Contains(out, ", and lets 1/3 of each shared limit pass.\n") || exitCode(err) != exitFailure ||
		err.Error() != "shared limits: alone" {
		t.Errorf("status: %v\n%s", err, out)
	}
	if scraped := testutil.MustScrape(t, gw2.metrics); !strings.Contains(scraped, "shaperd_shared_joined 0\n") || strings.Contains(scraped, "shaperd_shared_alone_seconds_total 0\n") {
		t.Error("the metrics do not say that it is alone")
	}
}
