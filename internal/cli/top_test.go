package cli

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"shaperd.dev/shaperd/api"
)

// asShaperd is the environment variable that makes the test binary run as shaperd.
const asShaperd = "SHAPERD_TEST_MAIN"

// noRaceSleep makes a process with the race detector exit at once.
const noRaceSleep = "GORACE=atexit_sleep_ms=0"

func TestMain_ExitCodes(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]int{"version": 0, "check /nowhere": exitFailure, "fly": exitUsage, "status --control /nowhere": exitNoDaemon} {
		cmd := exec.Command(self, strings.Split(args, " ")...)
		cmd.Env = append(os.Environ(), asShaperd+"=1", noRaceSleep)
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		if code := cmd.ProcessState.ExitCode(); code != want || strings.Contains(string(out), "See \"shaperd --help\"") != (code == exitUsage) {
			t.Errorf("%s: exit code %d, want %d\n%s", args, code, want, out)
		}
	}
}

// terminal is a private tmux server.
type terminal struct {
	t      *testing.T
	socket string
}

func newTerminal(t *testing.T, width, height int, env []string, args ...string) *terminal {
	t.Helper()
	dir, err := os.MkdirTemp("", "tmux")
	if err != nil {
		t.Fatal(err)
	}
	term := &terminal{t, filepath.Join(dir, "s")}
	t.Cleanup(func() {
		exec.Command("tmux", "-S", term.socket, "kill-server").Run()
		os.RemoveAll(dir)
	})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	start := []string{"-f", "/dev/null", "new-session", "-d", "-x", fmt.Sprint(width), "-y", fmt.Sprint(height)}
	for _, e := range append(env, asShaperd+"=1", noRaceSleep) {
		start = append(start, "-e", e)
	}
	// Keep the screen after the program has exited.
	start = append(start, fmt.Sprintf("%s %s; echo ended with $?; read x", self, strings.Join(args, " ")))
	term.tmux(start...)
	return term
}

func (term *terminal) tmux(args ...string) string {
	term.t.Helper()
	out, err := exec.Command("tmux", append([]string{"-u", "-S", term.socket}, args...)...).CombinedOutput()
	if err != nil {
		term.t.Fatalf("tmux %v: %v\n%s", args, err, out)
	}
	return string(out)
}

func (term *terminal) keys(keys ...string) {
	term.t.Helper()
	term.tmux(append([]string{"send-keys"}, keys...)...)
}

// waitFor waits until the screen has all texts, and returns it with colors.
func (term *terminal) waitFor(texts ...string) string {
	term.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		screen := term.tmux("capture-pane", "-p", "-e")
		missing := ""
		for _, text := range texts {
			if !strings.Contains(ansi.Strip(screen), text) {
				missing = text
			}
		}
		if missing == "" {
			return screen
		}
		if time.Now().After(deadline) {
			term.t.Fatalf("%q is not on the screen:\n%s", missing, ansi.Strip(screen))
		}
	}
}

// TestTop_TerminalCloses checks that top exits when its terminal goes away.
func TestTop_TerminalCloses(t *testing.T) {
	t.Parallel()
	d := newFakeDaemon()
	defer d.serve(t)()
	term := newTerminal(t, 80, 24, nil, "top", "--control", d.path)
	term.waitFor("q quit")
	shell := strings.TrimSpace(term.tmux("display-message", "-p", "#{pane_pid}"))
	children := fmt.Sprintf("/proc/%s/task/%[1]s/children", shell)
	text, err := os.ReadFile(children)
	if err != nil {
		t.Fatal(err)
	}
	top := strings.TrimSpace(string(text))
	if top == "" || strings.Contains(top, " ") {
		t.Fatalf("the shell's children are %q", text)
	}
	term.tmux("kill-server")
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat("/proc/" + top); err != nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("top is still running without its terminal")
		}
	}
}

func TestTop_InTerminal(t *testing.T) {
	t.Parallel()
	d := newFakeDaemon()
	stop := d.serve(t)
	term := newTerminal(t, 80, 24, nil, "top", "--control", d.path)
	screen := term.waitFor("conformance ok, refusing 7.3/s", "> per-source", "keys of per-source, by delayed", "source 192.0.2.7/32", "q quit")
	if strings.Contains(screen, "\x1b[31m") {
		t.Errorf("red without a problem:\n%q", screen)
	}
	term.keys("j")
	term.waitFor("> watch", "keys of watch")
	term.keys("k")
	term.waitFor("> per-source", "keys of per-source")
	term.keys("Enter")
	term.waitFor("> source 192.0.2.7/32")
	term.keys("Enter")
	term.waitFor("New traffic would be delayed by 35.1ms", "Bytes to the downstream", "4711  192.0.2.7:40000")
	term.keys("Escape")
	term.waitFor("> source 192.0.2.7/32")
	term.keys("Tab")
	term.waitFor("sources, by delayed", `"evil\x1b]0;x\a"`)
	term.keys("/", "evil")
	term.waitFor("filter: evil_", `> "evil`)
	term.keys("Escape")
	term.waitFor("> 192.0.2.7", "q quit")
	term.keys("?")
	term.waitFor("tab               keys of the limit")
	term.keys("Escape")

	d.change(func() {
		d.status.Conformance = "violated"
		d.status.Bypass = &api.Bypass{Since: fakeNow}
		d.limits[0].Conformance = api.Conformance{}
	})
	screen = term.waitFor("conformance VIOLATED in the last minute", "BYPASS IS ON", "VIOLATED")
	if !strings.Contains(screen, "\x1b[31m") || !strings.Contains(screen, "\x1b[7m BYPASS") {
		t.Errorf("problems are not red, or bypass is not reversed:\n%q", screen)
	}

	term.tmux("resize-window", "-x", "40", "-y", "10")
	term.waitFor("BYPASS IS ON", "per-source")
	stop()
	term.waitFor("no answer since ", "per-source")
	d.change(func() { d.status.Conformance = "conformant"; d.status.Bypass = nil })
	d.serve(t)
	term.waitFor("conformance ok")
	term.keys("q")
	term.waitFor("ended with 0")
}

func TestTop_NoColor(t *testing.T) {
	d := newFakeDaemon()
	d.status.Conformance = "violated"
	d.serve(t)
	term := newTerminal(t, 100, 30, []string{"NO_COLOR=1"}, "top", "--control", d.path)
	if screen := term.waitFor("conformance VIOLATED"); strings.Contains(screen, "\x1b[31m") {
		t.Errorf("NO_COLOR, and yet:\n%q", screen)
	}
	term.keys("C-c")
	term.waitFor("ended with 0")
}

// newTop returns a model with a first result of d, and a function that presses keys.
func newTop(t *testing.T, d *fakeDaemon) (*top, func(keys ...string)) {
	t.Helper()
	d.serve(t)
	m := &top{ctx: t.Context(), client: api.NewClient(d.path)}
	m.apply(m.fetch(m.query()))
	m.Update(tea.WindowSizeMsg{Width: 80, Height: 24})
	return m, func(keys ...string) {
		for _, key := range keys {
			press := tea.KeyPressMsg{Text: key, Code: []rune(key)[0]}
			for name, code := range map[string]rune{"enter": tea.KeyEnter, "esc": tea.KeyEsc, "tab": tea.KeyTab, "backspace": tea.KeyBackspace} {
				if key == name {
					press = tea.KeyPressMsg{Code: code}
				}
			}
			for _, cmd := m.Update(press); cmd != nil; {
				_, cmd = m.Update(cmd())
			}
		}
	}
}

func TestTop_Keys(t *testing.T) {
	m, press := newTop(t, newFakeDaemon())
	screen := func() string { return strings.Join(m.screen(), "\n") }
	for _, step := range []struct {
		keys string
		want string
		not  string
	}{
		{"", "> per-source", "> source"},
		{"G", "> database", "> per-source"},
		{"j", "> database", ""},
		{"g x", "> per-source", ""},
		{"r", "> per-source", ""},
		{"/ d a t a", "filter: data_", "watch"},
		{"enter", `filter "data"`, "watch"},
		{"esc", "watch", "esc clear"},
		{"c tab", "sources, by delayed", ""},
		{"x", "sources, by dropped", ""},
		{"tab r", "prefixes, by rate", ""},
		{"tab", "autonomous systems", ""},
		{"enter enter", "The row is not a single source.", "LIMIT  "},
		{"esc esc tab", "keys of", ""},
		{"enter j", "> source 198.51.100.1/32", "> source 192"},
		{"/ 1 9 2 backspace", "filter: 19_", ""},
		{"esc g enter", "Bytes to the downstream", "PASSES"},
		{"G", "4711", ""},
	} {
		press(strings.Fields(step.keys)...)
		if got := ansi.Strip(screen()); !strings.Contains(got, step.want) || step.not != "" && strings.Contains(got, step.not) {
			t.Fatalf("after %q, want %q and not %q:\n%s", step.keys, step.want, step.not, got)
		}
	}
}

// TestTop_FitsTerminal checks that no screen is larger than the terminal.
func TestTop_FitsTerminal(t *testing.T) {
	d := newFakeDaemon()
	d.status.Bypass = &api.Bypass{Since: fakeNow}
	for i := range 40 {
		l := d.limits[0]
		l.Name = fmt.Sprintf("limit-with-a-name-that-is-long-%d", i)
		d.limits = append(d.limits, l)
	}
	m, press := newTop(t, d)
	for _, keys := range []string{"", "G", "/ x", "esc enter", "enter", "esc tab", "?"} {
		press(strings.Fields(keys)...)
		for _, width := range []int{0, 1, 39, 80, 200} {
			for _, height := range []int{0, 1, 2, 3, 4, 5, 8, 10, 24, 60} {
				m.Update(tea.WindowSizeMsg{Width: width, Height: height})
				lines := m.screen()
				if len(lines) > height {
					t.Fatalf("%d lines on %dx%d", len(lines), width, height)
				}
				for _, line := range lines {
					if ansi.StringWidth(line) > width {
						t.Fatalf("%dx%d: %q", width, height, line)
					}
				}
			}
		}
	}
	// The selected row is visible.
	press("esc", "esc", "esc", "G")
	m.Update(tea.WindowSizeMsg{Width: 80, Height: 24})
	if got := ansi.Strip(strings.Join(m.screen(), "\n")); !strings.Contains(got, "> limit-with-a-name-that") {
		t.Errorf("the last limit is selected, and is not shown:\n%s", got)
	}
}

func TestTop_DaemonUnreachable(t *testing.T) {
	d := newFakeDaemon()
	stop := d.serve(t)
	m := &top{ctx: t.Context(), client: api.NewClient(d.path)}
	m.apply(m.fetch(m.query()))
	m.Update(tea.WindowSizeMsg{Width: 80, Height: 24})
	stop()
	m.Update(m.refresh()())
	since := m.lostAt
	m.Update(m.refresh()())
	if got := m.screen()[0]; !strings.HasPrefix(got, "no answer since ") || m.lostAt != since || len(m.limits) != 3 {
		t.Errorf("without a daemon: %q, %d limits, since %v and %v", got, len(m.limits), since, m.lostAt)
	}
	d.serve(t)
	m.Update(m.refresh()())
	if got := m.screen()[0]; !strings.Contains(got, "conformance ok") {
		t.Errorf("with a daemon again: %q", got)
	}
}
