package netns

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"
)

const storyConfig = `[[listen]]
name       = "db"
address    = ["tcp://0.0.0.0:5432"]
downstream = ["10.2.0.5:5432"]

[[limit]]
name            = "per-source"
key             = ["source"]
rate            = "10Mbit/s"
max_connections = 20

[[limit]]
name            = "database"
rate            = "80Mbit/s"
max_connections = 100
`

// A story is commands that somebody gives beside a daemon under load, and what comes of them.
type story struct {
	t      *testing.T
	d      *daemon
	told   strings.Builder // the transcript
	orders []string        // without repetitions
}

// gives gives a command until what it prints has all of want, and returns that.
func (s *story) gives(order string, want ...string) (printed string) {
	s.t.Helper()
	s.orders = append(s.orders, order)
	waitFor(s.t, 10*time.Second, func() error {
		cmd := exec.Command(daemonPath(s.t), strings.Fields(order)[1:]...)
		cmd.Env = append(os.Environ(), "SHAPERD_CONTROL="+s.d.control)
		out, err := cmd.CombinedOutput()
		printed = string(out)
		for _, w := range want {
			if err == nil && !strings.Contains(printed, w) {
				err = fmt.Errorf("nothing has %q", w)
			}
		}
		if err != nil {
			return fmt.Errorf("%s: %w:\n%s", order, err, printed)
		}
		return nil
	})
	fmt.Fprintf(&s.told, "$ %s\n%s\n", order, printed)
	return printed
}

// TestStory has a source that is slow, finds out why, loosens a limit for it, sees it
// recover, and puts the limit back. docs/story.md tells it, as it is with -figures -v.
func TestStory(t *testing.T) {
	const slow, modest = 's', 'm'
	f := ipv4
	n := newNetwork(t)
	sink := n.downstream.newSink(t, f.tcp())
	s := &story{t: t, d: n.shaper.shaperd(t, fmt.Sprintf("[daemon]\npin_path = %q\n", noPins)+storyConfig)}

	// One that sends what it can, and one that sends little.
	bulk := n.client.newBulk(t, f.sources[0], f.door(), 2, slow)
	little := n.client.newBulk(t, f.sources[1], f.door(), 1, modest)
	done := make(chan error, 1)
	go func() { done <- bulk.flood(time.Minute) }()
	stop := make(chan struct{})
	t.Cleanup(func() {
		bulk.abort()
		<-done
		close(stop)
	})
	go trickle(little, stop)
	rate := func(low, high float64) {
		t.Helper()
		var got float64
		if *figures {
			time.Sleep(12 * time.Second) // until the figures over 10 s have settled
		}
		waitFor(t, 10*time.Second, func() error {
			before, begun := sink.got(slow), time.Now()
			time.Sleep(time.Second)
			got = float64(sink.got(slow)-before) * 8 / 1e6 / time.Since(begun).Seconds()
			if got < low || got > high {
				return fmt.Errorf("the source passes %.1f Mbit/s, want %v to %v", got, low, high)
			}
			return nil
		})
		fmt.Fprintf(&s.told, "# at the database: %.1f Mbit/s of %v\n\n", got, f.sources[0])
	}

	rate(8, 10.5)
	s.gives("shaperd status", "The promise is kept.\n", "per-source  ", "Waits most: 10.1.1.10, ", "mode enforce")
	s.gives("shaperd who", "\n10.1.1.10 ", "\n10.1.2.10 ")
	s.gives("shaperd keys --limit per-source", "\nsource 10.1.1.10/32 ")
	s.gives("shaperd connections --source 10.1.1.10", " db tcp/5432  10.2.0.5:5432  open ", " per-source ")
	s.gives("shaperd explain --source 10.1.1.10 --to tcp/5432", `What came now would leave in `, `: "per-source", rate.`,
		"Bytes to the downstream: \"per-source\" binds first.\n")

	s.gives("shaperd set limit per-source rate=40Mbit/s --for 10m",
		"was  10Mbit/s, ", "now  40Mbit/s, ", "set  rate=40Mbit/s, until ")
	rate(30, 42)
	s.gives("shaperd limits", "(set: rate=40Mbit/s)", " kept ")
	s.gives("shaperd status", "The promise is kept.\n", "\nSET IN LIMIT ", "\nper-source    rate=40Mbit/s ")
	s.gives("shaperd explain --source 10.1.2.10 --to tcp/5432", "\nper-source  source 10.1.2.10/32 ")

	s.gives("shaperd unset limit per-source", "was  40Mbit/s, ", "now  10Mbit/s, ")
	rate(8, 10.5)
	if out := s.gives("shaperd status", "The promise is kept.\n"); strings.Contains(out, "SET IN LIMIT") {
		t.Errorf("something is still set:\n%s", out)
	}
	s.gives("shaperd events", `limit set by an operator`, `limit is as in the configuration again`)
	t.Logf("the transcript:\n%s", s.told.String())
	if told := commandsIn(t, "../../docs/story.md"); !slices.Equal(told, s.orders) {
		t.Errorf("docs/story.md has the commands\n%s\nand this test\n%s", strings.Join(told, "\n"), strings.Join(s.orders, "\n"))
	}
}

// trickle sends 2 Mbit/s, until stop is closed or the connection ends.
func trickle(b *bulk, stop <-chan struct{}) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
			if b.send(25_000) != nil {
				return
			}
		}
	}
}

// commandsIn returns the commands of transcripts in a document.
func commandsIn(t *testing.T, file string) (orders []string) {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, err)
	for line := range strings.Lines(string(text)) {
		if order, is := strings.CutPrefix(strings.TrimSpace(line), "$ "); is {
			orders = append(orders, order)
		}
	}
	return orders
}
