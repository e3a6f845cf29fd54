package cli

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

// sharedByThree is the state of one of three hosts, of which another one is absent.
func sharedByThree() api.Shared {
	return api.Shared{
		State: "joined", For: 3725, Group: "mainframe", Name: "gw1", Hosts: 4, Alone: "share", Counted: true, Failover: "fast", Live: 3, Gone: 1, LeaseAge: 0.04, LeaseLeft: 0.94, Epoch: 1764,
		Stores: []string{"rediss://10.0.9.1:6379"}, HotBuckets: 13,
		Problems: []api.Problem{{Severity: "warning", Title: "Host away", Text: `gw3 has not called for 5m, and 1/4 of each shared limit is kept for it.`}},
		Ledger: &api.Ledger{Epoch: 1764, Age: 86400, Settled: true, Unknown: 1, Hosts: []api.SharedHost{
			{Name: "gw1", State: "counted", Age: 0.04, LeaseLeft: 0.9, Version: "1.0"},
			{Name: "gw2\x1b[31m", State: "counted", Age: 0.1, LeaseLeft: 0.8, Version: "1.0"},
			{Name: "gw3", State: "absent", Age: 300, Version: "0.9"},
			{Name: "gw4", State: "gone"},
		}},
		Limits: []api.SharedLimit{
			{Limit: "per-office", Key: "source", Rate: 1.25e6, NewConnections: 40, ColdShare: 0.25, HotBuckets: 12, Buckets: []api.SharedBucket{
				{Key: "source 192.0.2.0/24", Hot: true, Share: 0.5, Want: 1, Short: true, Tight: true},
				{Key: "source 198.51.100.0/24", NewConnections: true, Hot: true, Share: 0.9, Want: 0.95},
			}},
			{Limit: "total", Key: "all", Rate: 1e7, Packets: 2000, MaxConnections: 200, HostConnections: 50, ColdShare: 0.25, HotBuckets: 1, Buckets: []api.SharedBucket{
				{Key: "all", Hot: true, Share: 0.31, Want: 0.4, Tight: true, Holders: []api.SharedHolder{{Host: "gw1", Share: 0.31}, {Host: "gw2", Share: 0.44}}},
				{Key: "all", Slots: true, Hot: true, Share: 0.3, Want: 0.45, Short: true, Tight: true, Holders: []api.SharedHolder{{Host: "gw1", Share: 0.3}, {Host: "gw2", Share: 0.22}}},
			}},
			{Limit: "visitors", Key: "source", MaxConnections: 10, HostConnections: 2, ColdShare: 0.25, Buckets: []api.SharedBucket{}},
			{Limit: "uplink", Key: "all", MaxConnections: 10, HostConnections: 2, ColdShare: 0.25, Buckets: []api.SharedBucket{}},
			{Limit: "quiet", Key: "all", NewConnections: 5, ColdShare: 0.25, Buckets: []api.SharedBucket{{Key: "all", NewConnections: true, Share: 0.25}}},
		},
	}
}

func TestSharedStatus(t *testing.T) {
	d := newFakeDaemon()
	d.serve(t)
	for _, tt := range []struct {
		name   string
		shared api.Shared
		code   int
		want   []string
		no     string
	}{
		{"without [shared]", api.Shared{State: "none"}, 0, []string{"No limit is shared: the configuration has no [shared].\n"}, "HOST"},
		{
			"without a ledger",
			api.Shared{State: "static", Hosts: 3, Limits: sharedByThree().Limits[4:]},
			0,
			[]string{"No ledger: this host, one of 3, always has 1/3 of each shared limit.\n", "quiet  all     25% of 5/s = 1.25/s new connections        cold"},
			"HOST",
		},
		{"joined", sharedByThree(), 0, []string{
			"HOST AWAY: gw3 has not called for 5m, and 1/4 of each shared limit is kept for it.\n" +
				"gw1: joined for 1h2m, group mainframe; 2 of 4 hosts live, 1 gone\n" +
				"lease: 40ms old, ends in 940ms; alone = \"share\"; 13 hot buckets\n" +
				"ledger: rediss://10.0.9.1:6379, epoch 1764\n",
			"\ngw1 (this host)  counted            40ms ago       900ms  same    1.0\n",
			"\ngw3              absent, 1/4 kept     5m ago           -  same    0.9\n",
			"\ngw4              gone                      -           -  -\n",
			`"gw2\x1b[31m"`,
			"1 more host unknown yet. 1/4 of each shared limit is kept for each.\n",
			"\nper-office  cold ones               25% of 10Mbit/s = 2.5Mbit/s\n",
			"\nper-office  cold ones               25% of 40/s = 10/s new connections\n",
			"\nper-office  source 192.0.2.0/24     50% of 10Mbit/s = 5Mbit/s                      100%  hot, short, tight\n",
			"\nper-office  source 198.51.100.0/24  90% of 40/s = 36/s new connections              95%  hot\n",
			"\nper-office  and 10 more hot ones\n",
			"\ntotal       all                     60 of 200 slots                                  90  hot, short, tight  gw2 44\n",
			"\nvisitors    cold ones               2 of 10 slots\n",
			"\nuplink      connections             2 of 10 slots\n",
			"\ntotal       all                     31% of 80Mbit/s, 2000pps = 24.8Mbit/s, 620pps   40%  hot, tight         gw2 44%\n",
		}, "last call:"},
		{"strict", func() api.Shared {
			s := sharedByThree()
			s.Failover, s.Live, s.For, s.Epoch = "strict", 2, 0, 0
			return s
		}(), 0, []string{"gw1: joined just now, group mainframe; 2 of 4 hosts live, 1 gone\n", "\ngw4              gone, 1/4 kept ", "\nledger: rediss://10.0.9.1:6379\n"}, ""},
		{"by Sentinels", func() api.Shared {
			s := sharedByThree()
			s.Stores, s.Server = []string{"redis+sentinel://10.0.9.1:26379/main"}, "10.0.9.3:6379"
			return s
		}(), 0, []string{"\nledger: redis+sentinel://10.0.9.1:26379/main; 10.0.9.3:6379 answered last, epoch 1764\n"}, ""},
		{"disagreeing", func() api.Shared {
			s := sharedByThree()
			s.Problems = []api.Problem{{Severity: "critical", Title: "Hosts disagree", Text: "about x"}}
			s.Differences = []api.SharedDifference{{Host: "gw2", Limit: "total", Here: "rate 80Mbit/s", There: "rate 90Mbit/s"}, {Host: "gw3"}}
			s.Ledger.Hosts[1].Differs, s.Ledger.Settled, s.Ledger.Age = true, false, 0.5
			return s
		}(), exitFailure, []string{
			"HOSTS DISAGREE: about x\n", "  differ  ", "total differs at gw2: here rate 80Mbit/s; there rate 90Mbit/s\n", "a limit differs at gw3: here ?; there ?\n",
			"shared limits: hosts disagree", "The ledger began 500ms ago, and does not know the use of all hosts yet.\n",
		}, ""},
		{"alone", api.Shared{
			State: "alone", For: 12.34, Why: "no ledger answers: connection refused", Name: "gw1", Hosts: 4, Group: "default", Alone: "open", StoreError: "connection refused", LedgerError: "connection refused",
			Problems: []api.Problem{{Severity: "critical", Title: "Not limited together", Text: "alone for 12s"}},
		}, exitFailure, []string{
			"NOT LIMITED TOGETHER: alone for 12s\ngw1: alone for 12.3s, group default\nlease: ended; alone = \"open\"",
			"The hosts are unknown: connection refused.\n", "shared limits: not limited together",
		}, "live"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d.change(func() { d.shared = tt.shared })
			stdout, _, err := d.run(t, "shared", "status")
			all := stdout + fmt.Sprint(err)
			if code := exitCode(err); code != tt.code {
				t.Errorf("exit code %d: %v", code, err)
			}
			for _, want := range tt.want {
				if !strings.Contains(all, want) {
					t.Errorf("%q is not in:\n%s", want, all)
				}
			}
			if tt.no != "" && strings.Contains(stdout, tt.no) || strings.ContainsRune(stdout, '\x1b') {
				t.Errorf("unexpected text in:\n%s", stdout)
			}

			// The first lines of status.
			d.change(func() { d.status.Shared = &tt.shared })
			stdout, _, err = d.run(t, "status")
			if code := exitCode(err); code != tt.code {
				t.Errorf("exit code %d of status: %v", code, err)
			}
			for _, p := range tt.shared.Problems {
				if line := strings.ToUpper(p.Title) + ": " + p.Text + "\n"; !strings.HasPrefix(stdout, line) {
					t.Errorf("%q is not the first line of:\n%s", line, stdout)
				}
			}
			top, _, err := d.run(t, "top")
			if shows := strings.Contains(top, "HOSTS DISAGREE: about x") || strings.Contains(top, "NOT LIMITED TOGETHER: alone for 12s"); err != nil || shows != (tt.code != 0) {
				t.Errorf("top: %v\n%s", err, top)
			}
		})
	}
}

// Limits that are shared show what this host may use.
func TestLimits_ShowShares(t *testing.T) {
	d := newFakeDaemon()
	d.serve(t)
	d.change(func() {
		d.limits[0].Shared = &api.LimitShare{Share: 0.25, Connections: 5}
		d.limits[1].Shared = &api.LimitShare{}
		d.limits[2].Shared = &api.LimitShare{Share: 0.31}
		d.limits = append(d.limits, api.Limit{Name: "sign-on", Summary: "5/s new connections", NewConnections: 5, Shared: &api.LimitShare{Share: 0.5}},
			api.Limit{Name: "slots", Summary: "20 connections", MaxConnections: 20, Shared: &api.LimitShare{Share: 0.5, Connections: 10}})
	})
	d.change(func() { d.explain.Limits[0].Shared = &api.LimitShare{Share: 0.5, Connections: 7} })
	if out, _, err := d.run(t, "explain", "--source", "192.0.2.7", "--to", "tcp/5432"); !strings.Contains(out, "10Mbit/s, queue 200ms, here 50% = 5Mbit/s, 7 connections  ") {
		t.Errorf("explain: %v\n%s", err, out)
	}
	for _, verb := range []string{"limits", "top"} {
		out, _, err := d.run(t, verb)
		for _, want := range []string{
			"10Mbit/s, queue 200ms, 20 connections, here 25% = 2.5Mbit/s, 5 connections\n", "100pps packets, queue 200ms, here 0% = 0\n",
			"80Mbit/s, queue 200ms, here 31% = 24.8Mbit/s\n", "5/s new connections, here 50% = 2.5/s new connections\n", "20 connections, here 10 connections\n",
		} {
			if !strings.Contains(out, want) {
				t.Errorf("%s: %v: %q is not in\n%s", verb, err, want, out)
			}
		}
	}
}

func TestSharedForget(t *testing.T) {
	d := newFakeDaemon()
	d.serve(t)
	d.shared = sharedByThree()
	strict := sharedByThree()
	strict.Failover = "strict"
	if got := forgottenText(&strict); got != `another host may take its place. With failover = "strict" its part is kept until one does, or hosts is lowered on all hosts.` {
		t.Error(got)
	}
	for _, tt := range []struct {
		args string
		code int
		want string
	}{
		{"shared forget gw3 --yes", 0, "gw3 is forgotten: the others use its part.\n"},
		{"shared forget gw1 --yes", exitFailure, `the ledger keeps the part of "gw1"`},
		{"shared forget gw3", exitUsage, "standard input is not a terminal: use --yes to confirm"},
		{"shared forget", exitUsage, "shared forget requires HOST"},
		{"shared", exitUsage, "shared requires status, or forget HOST"},
		{"shared stauts", exitUsage, "shared requires status, or forget HOST"},
		{"__complete shared forget ", 0, "gw3\n:4"},
		{"__complete shared forget gw3 ", 0, ":4"},
	} {
		stdout, _, err := d.run(t, strings.Split(tt.args, " ")...)
		if all := stdout + fmt.Sprint(err); exitCode(err) != tt.code || !strings.Contains(all, tt.want) {
			t.Errorf("%s: exit code %d, %s", tt.args, exitCode(err), all)
		}
	}
	if got := fmt.Sprint(d.changes); got != "[DELETE /v1/shared/hosts/gw3 DELETE /v1/shared/hosts/gw1]" {
		t.Errorf("requests: %s", got)
	}
}

// A user at a terminal is asked.
func TestSharedForget_Confirmation(t *testing.T) {
	d := newFakeDaemon()
	d.serve(t)
	for answer, forgets := range map[string]bool{"y\n": true, "YES\n": true, "\n": false, "n\n": false, "gw3\n": false, "\x04": false} {
		terminal, keyboard := openTerminal(t)
		if _, err := keyboard.WriteString(answer); err != nil {
			t.Fatal(err)
		}
		d.change(func() { d.changes = nil })
		var out, errOut testutil.Buffer
		err := run(t.Context(), env{stdin: terminal, stdout: &out, stderr: &errOut}, []string{"--control", d.path, "shared", "forget", "gw3"})
		if want := "If gw3 still runs, all hosts together may exceed the limits. Forget it? [y/N] "; errOut.String() != want {
			t.Errorf("%q: the question is %q", answer, errOut.String())
		}
		if (err == nil) != forgets || len(d.changes) > 0 != forgets || !forgets && err.Error() != "nothing was changed" {
			t.Errorf("%q: %v, %v", answer, err, d.changes)
		}
	}
}

// openTerminal returns a pseudo-terminal, and what types on it.
func openTerminal(t *testing.T) (terminal, keyboard *os.File) {
	t.Helper()
	keyboard, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { keyboard.Close() })
	if err := unix.IoctlSetPointerInt(int(keyboard.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(keyboard.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { terminal.Close() })
	return terminal, keyboard
}
