package doctor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/cluster/redis"
	"shaperd.dev/shaperd/internal/sharing"
	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper/config"
)

const sharedConfig = proxyConfig + `shared = true
[shared]
hosts = 3
`

// withLedger is the configuration of gw1.
const withLedger = sharedConfig + "name = \"gw1\"\nstore = [\"rediss://10.0.0.9:6379\"]\n"

// loadText returns a configuration.
func loadText(t *testing.T, text string) *config.Config {
	t.Helper()
	file := filepath.Join(t.TempDir(), "shaperd.toml")
	writeFile(t, file, text)
	c, err := config.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// answer returns the answer of a ledger to which hosts with configurations, by their names, have just called.
func answer(t *testing.T, hosts map[string]string) (a ledgerAnswer) {
	a.roundTrip = 500 * time.Microsecond
	a.about = &redis.About{Name: "Redis 7.0.15", Eviction: "noeviction"}
	a.skew = -1234 * time.Millisecond
	for _, name := range slices.Sorted(maps.Keys(hosts)) {
		c := loadText(t, hosts[name])
		a.shot.Epoch, a.shot.Params = 7, sharing.Params(&c.Shared)
		a.shot.Hosts = append(a.shot.Hosts, cluster.HostStatus{
			Name: name, Age: 100 * cluster.Millisecond, Counted: true, Digest: c.SharedDigest(), Info: sharing.NewInfo("1.0", c).Text(nil),
		})
	}
	return a
}

func TestDoctor_Shared(t *testing.T) {
	type ledgers = map[string]ledgerAnswer
	const redisHost = "10.0.0.9:6379"
	same := answer(t, map[string]string{"gw1": withLedger, "gw2": withLedger})
	but := func(change func(*ledgerAnswer)) hostSpec {
		a := answer(t, map[string]string{"gw1": withLedger, "gw2": withLedger})
		change(&a)
		return hostSpec{daemonRuns: true, ledgers: ledgers{redisHost: a}}
	}
	peers := sharedConfig + `name = "gw1"
serve = "10.0.0.1:9466"
store = ["shaperd://10.0.0.1:9466", "shaperd://10.0.0.2:9466"]
ca_file = "/etc/shaperd/ca.pem"
cert_file = "/etc/shaperd/cert.pem"
key_file = "/etc/shaperd/key.pem"
`
	files := map[string]string{"etc/shaperd/ca.pem": "x", "etc/shaperd/cert.pem": "x", "etc/shaperd/key.pem": "x"}
	for _, tt := range []struct {
		name, config string
		host         hostSpec
		want         []string // findings: state, text, fix
	}{
		{"nothing shared", proxyConfig, hostSpec{}, []string{"skip no limit is shared"}},
		{"static", sharedConfig, hostSpec{}, []string{"ok no ledger: this host, one of 3, always has 1/3 of each limit"}},
		{"good", withLedger, hostSpec{daemonRuns: true, ledgers: ledgers{redisHost: same}}, []string{
			"ok the ledger at rediss://10.0.0.9:6379 answers in 500µs, with 2 of 3 hosts; Redis 7.0.15, with a clock 1.234s behind that of this host, which has no effect",
		}},
		{"no host has called", withLedger, hostSpec{ledgers: ledgers{redisHost: {roundTrip: time.Millisecond}}}, []string{"ok the ledger at rediss://10.0.0.9:6379 answers in 1ms, with 0 of 3 hosts"}},
		{"unreachable", withLedger, hostSpec{}, []string{"fail the ledger at rediss://10.0.0.9:6379 cannot be used: connection refused -> check that it runs"}},
		{"far away", withLedger, but(func(a *ledgerAnswer) { a.roundTrip = 60 * time.Millisecond }), []string{
			`warn rediss://10.0.0.9:6379 answers in 60ms: with lease = "1s", a few slow answers put this host out of the group -> raise lease`,
		}},
		{"too far away", withLedger, but(func(a *ledgerAnswer) { a.roundTrip = 300 * time.Millisecond }), []string{
			`fail rediss://10.0.0.9:6379 answers in 300ms: with lease = "1s", a host waits for 250ms -> use a ledger that is nearer`,
		}},
		{"evicts", withLedger, but(func(a *ledgerAnswer) { a.about.MaxMemory, a.about.Eviction, a.about.Evicted = 1<<20, "allkeys-lru", 9 }), []string{
			"warn rediss://10.0.0.9:6379 evicts keys when it has 1048576 bytes (maxmemory-policy allkeys-lru): hosts then claim their parts again; 9 keys were evicted -> redis-cli config set",
		}},
		{"would evict, but has no maximum", withLedger, but(func(a *ledgerAnswer) { a.about.Eviction = "allkeys-lru" }), []string{"ok "}},
		{"other parameters", withLedger, hostSpec{daemonRuns: true, ledgers: ledgers{redisHost: answer(t, map[string]string{"gw2": strings.Replace(withLedger, "hosts = 3", "hosts = 4", 1)})}}, []string{
			"fail rediss://10.0.0.9:6379: the group has hosts = 4, and this host hosts = 3 -> make [shared] the same",
			"fail hosts disagree about [shared]: here hosts 3; at gw2 hosts 4. -> make [shared] the same",
		}},
		{"another rate", withLedger, hostSpec{daemonRuns: true, ledgers: ledgers{redisHost: answer(t, map[string]string{"gw2": strings.Replace(withLedger, "max_queue = 50", "max_queue = 50\nqueue_timeout = \"1s\"", 1)})}}, []string{
			`fail hosts disagree about limit "slots": here queue_timeout 2s; at gw2 queue_timeout 1s. -> make the limits the same`,
		}},
		{"not reloaded", withLedger, hostSpec{daemonRuns: true, ledgers: ledgers{redisHost: answer(t, map[string]string{"gw1": strings.Replace(withLedger, "max_connections = 100", "max_connections = 90", 1)})}}, []string{
			"warn the shared limits of the daemon differ from the configuration: it was not reloaded -> systemctl reload shaperd",
		}},
		{"an absent host with another rate", withLedger, but(func(a *ledgerAnswer) { a.shot.Hosts[1].Age, a.shot.Hosts[1].Digest = 3*cluster.Second, 1 }), []string{"ok "}},
		{"the name of another host", withLedger, hostSpec{ledgers: ledgers{redisHost: same}}, []string{
			"warn a host with the name gw1 called the ledger 100ms ago, and no daemon runs here: another host has this name -> set another name",
		}},
		{"problems of the daemon", withLedger, func() hostSpec {
			spec := but(func(*ledgerAnswer) {})
			spec.problems = []api.Problem{{Severity: "critical", Title: "Name used twice", Text: "x\x1b"}, {Severity: "warning", Title: "Host away", Text: "y"}}
			return spec
		}(), []string{`fail the daemon says: Name used twice: "x\x1b" -> shaperd shared status`, "warn the daemon says: Host away: y -> shaperd shared status"}},
		{"a password for all", withLedger + "password_file = \"/etc/shaperd/redis.pass\"\n", hostSpec{
			daemonRuns: true, ledgers: ledgers{redisHost: same}, files: map[string]string{"etc/shaperd/redis.pass": "secret"},
		}, []string{"warn /etc/shaperd/redis.pass: readable by every user, who can then lift the limits -> chmod o-r /etc/shaperd/redis.pass"}},
		{"no password", withLedger + "password_file = \"/etc/shaperd/redis.pass\"\n", hostSpec{}, []string{"fail /etc/shaperd/redis.pass: does not exist -> create it"}},
		{"credentials of the unit", withLedger + "password_file = \"redis.pass\"\n", hostSpec{}, []string{"skip only the unit has the credentials"}},
		{"served here, and elsewhere", peers, hostSpec{files: files, ledgers: ledgers{"10.0.0.2:9466": {roundTrip: time.Millisecond}}}, []string{
			"warn /etc/shaperd/key.pem: readable by every user",
		}},
		{"served here", peers, hostSpec{files: files}, []string{
			"warn /etc/shaperd/key.pem: readable by every user", "warn the ledger at shaperd://10.0.0.2:9466 cannot be used",
		}},
		{"served here, which does not answer", peers, hostSpec{daemonRuns: true, files: files}, []string{
			"warn /etc/shaperd/key.pem: readable by every user", "fail the ledger at shaperd://10.0.0.1:9466 cannot be used", "fail the ledger at shaperd://10.0.0.2:9466 cannot be used",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			for _, f := range tt.host.doctor(t, tt.config).run() {
				switch {
				case f.Name == "shared":
					got = append(got, strings.TrimSuffix(fmt.Sprintf("%s %s -> %s", f.State, f.Text, f.Fix), " -> "))
				case f.State == Fail:
					t.Errorf("unexpected finding: %+v", f)
				}
			}
			for i, line := range got {
				if len(got) != len(tt.want) || !strings.HasPrefix(line, tt.want[i]) {
					t.Fatalf("%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(tt.want, "\n"))
				}
			}
		})
	}
}

// askLedger asks a real server.
func TestAskLedger(t *testing.T) {
	address := testutil.FreeAddr(t, "tcp")
	host, port, _ := net.SplitHostPort(address)
	cmd := exec.Command("redis-server", "--bind", host, "--port", port, "--requirepass", "right", "--save", "", "--dir", t.TempDir())
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	password := filepath.Join(t.TempDir(), "pass")
	s := &config.Shared{Hosts: 2, Name: "gw1", Store: []string{"redis://" + address}, PasswordFile: password, Prefix: "shaperd", Group: "default", Lease: time.Second, Interval: 100 * time.Millisecond}
	writeFile(t, password, "right\n")
	var a ledgerAnswer
	var err error
	testutil.WaitFor(t, "the server", func() bool {
		a, err = askLedger(t.Context(), s)
		return err == nil
	})
	if a.shot.Epoch != 0 || a.roundTrip <= 0 || a.roundTrip > time.Second || a.about == nil || !strings.HasPrefix(a.about.Name, "Redis ") || a.skew.Abs() > 10*time.Second {
		t.Errorf("%+v, %+v", a, a.about)
	}
	store := sharing.OpenStore(s, nil)
	defer store.Close()
	h := cluster.NewHost(cluster.HostOptions{Params: sharing.Params(s), Name: "gw2", Start: 1}, 0)
	if _, err := store.Call(t.Context(), h.Request(1, nil)); err != nil {
		t.Fatal(err)
	}
	if a, err = askLedger(t.Context(), s); err != nil || len(a.shot.Hosts) != 1 || a.shot.Hosts[0].Name != "gw2" {
		t.Errorf("%+v, %v", a, err)
	}
	writeFile(t, password, "wrong\n")
	if _, err = askLedger(t.Context(), s); err == nil || !strings.Contains(err.Error(), "wrong user or password") {
		t.Errorf("with a wrong password: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err = askLedger(ctx, s); !errors.Is(err, context.Canceled) {
		t.Errorf("after an interrupt: %v", err)
	}
}
