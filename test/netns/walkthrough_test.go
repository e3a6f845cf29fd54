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

const walkthroughConfig = `[[listen]]
name       = "db"
address    = ["tcp://0.0.0.0:5432"]
downstream = ["10.2.0.5:5432"]
first_byte_timeout = "10s"

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

// walkthrough is a series of commands to a daemon under load.
type walkthrough struct {
	t          *testing.T
	d          *daemon
	transcript strings.Builder
	commands   []string // without repetitions
}

// run repeats a command until its output contains all of want, and returns the output.
func (s *walkthrough) run(command string, want ...string) (printed string) {
	s.t.Helper()
	s.commands = append(s.commands, command)
	waitFor(s.t, patience, func() error {
		cmd := exec.Command(daemonPath(s.t), strings.Fields(command)[1:]...)
		cmd.Env = append(os.Environ(), "SHAPERD_CONTROL="+s.d.Control)
		out, err := cmd.CombinedOutput()
		printed = string(out)
		for _, w := range want {
			if err == nil && !strings.Contains(printed, w) {
				err = fmt.Errorf("the output lacks %q", w)
			}
		}
		if err != nil {
			return fmt.Errorf("%s: %w:\n%s", command, err, printed)
		}
		return nil
	})
	fmt.Fprintf(&s.transcript, "$ %s\n%s\n", command, printed)
	return printed
}

// TestWalkthrough diagnoses a slow source, overrides a limit, checks that the source recovers, and removes
// the override. docs/walkthrough.md is its transcript with -figures -v.
func TestWalkthrough(t *testing.T) {
	const slow, modest = 's', 'm'
	f := ipv4
	n := newNetwork(t)
	sink := n.downstream.newSink(t, f.tcp())
	s := &walkthrough{t: t, d: n.shaper.shaperd(t, fmt.Sprintf("[daemon]\npin_path = %q\n", unusedPinPath)+walkthroughConfig)}

	// One source sends as much as it can, the other little.
	bulk := n.client.newBulk(t, f.sources[0], f.listenAddr(), 2, slow)
	little := n.client.newBulk(t, f.sources[1], f.listenAddr(), 1, modest)
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
		waitFor(t, patience, func() error {
			before, begun := sink.got(slow), time.Now()
			time.Sleep(time.Second)
			got = float64(sink.got(slow)-before) * 8 / 1e6 / time.Since(begun).Seconds()
			if got < low || got > high {
				return fmt.Errorf("the source passes %.1f Mbit/s, want %v to %v", got, low, high)
			}
			return nil
		})
		fmt.Fprintf(&s.transcript, "# at the database: %.1f Mbit/s of %v\n\n", got, f.sources[0])
	}

	rate(8, 10.5)
	s.run("shaperd status", "conformance: ok\n", "per-source  ", "Most delayed: 10.1.1.10, ", "mode enforce")
	s.run("shaperd talkers", "\n10.1.1.10 ", "\n10.1.2.10 ")
	s.run("shaperd keys --limit per-source", "\nsource 10.1.1.10/32 ")
	s.run("shaperd connections --source 10.1.1.10", " db tcp/5432  10.2.0.5:5432  open ", " per-source ")
	s.run("shaperd explain --source 10.1.1.10 --to tcp/5432", `New traffic would be delayed by `, `: limit "per-source", rate.`,
		"Bytes to the downstream: bottleneck is \"per-source\".\n")

	s.run("shaperd set limit per-source rate=40Mbit/s --for 10m",
		"was  10Mbit/s, ", "now  40Mbit/s, ", "set  rate=40Mbit/s, until ")
	rate(30, 42)
	s.run("shaperd limits", "(override: rate=40Mbit/s)", " ok ")
	s.run("shaperd status", "conformance: ok\n", "\nOVERRIDE OF ", "\nper-source   rate=40Mbit/s ")
	s.run("shaperd explain --source 10.1.2.10 --to tcp/5432", "\nper-source  source 10.1.2.10/32 ")

	s.run("shaperd unset limit per-source", "was  40Mbit/s, ", "now  10Mbit/s, ")
	rate(8, 10.5)
	if out := s.run("shaperd status", "conformance: ok\n"); strings.Contains(out, "OVERRIDE OF") {
		t.Errorf("an override remains:\n%s", out)
	}
	s.run("shaperd events", `limit overridden by operator`, `limit override removed by operator`)
	t.Logf("the transcript:\n%s", s.transcript.String())
	if documented := commandsIn(t, "../../docs/walkthrough.md"); !slices.Equal(documented, s.commands) {
		t.Errorf("docs/walkthrough.md has the commands\n%s\nwant\n%s", strings.Join(documented, "\n"), strings.Join(s.commands, "\n"))
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
func commandsIn(t *testing.T, file string) (commands []string) {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, err)
	for line := range strings.Lines(string(text)) {
		if command, is := strings.CutPrefix(strings.TrimSpace(line), "$ "); is {
			commands = append(commands, command)
		}
	}
	return commands
}
