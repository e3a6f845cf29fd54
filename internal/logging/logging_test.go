package logging

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	"unicode"
	"unicode/utf8"

	"shaperd.dev/shaperd/control/monitor"
)

func TestNew_JournalStream(t *testing.T) {
	for _, format := range []string{"text", "json"} {
		for _, journal := range []bool{true, false} {
			t.Run(fmt.Sprint(format, journal), func(t *testing.T) {
				path := filepath.Join(t.TempDir(), "stderr")
				f, err := os.Create(path)
				if err != nil {
					t.Fatal(err)
				}
				defer f.Close()
				info, _ := f.Stat()
				st := info.Sys().(*syscall.Stat_t)
				inode := st.Ino
				if !journal {
					inode++
				}
				t.Setenv("JOURNAL_STREAM", fmt.Sprintf("%d:%d", st.Dev, inode))
				log, _, w := newLog(f, slog.LevelDebug, format == "json", monitor.NewEvents(1).Handler, "/nowhere/socket")
				log = log.With("a", 1).WithGroup("g")
				log.Debug("one", "time", 2)
				log.Info("two")
				log.Warn("three")
				log.Error("four")
				w.Close()
				got, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				begin := "time="
				if format == "json" {
					begin = `{"time":`
				}
				want := []string{begin, begin, begin, begin}
				if journal {
					want = []string{"<7>level=DEBUG msg=one a=1 g.time=2\n", "<6>level=INFO msg=two a=1\n", "<4>level=WARN msg=three a=1\n", "<3>level=ERROR msg=four a=1\n"}
					if format == "json" {
						want = []string{`<7>{"level":"DEBUG","msg":"one","a":1,"g":{"time":2}}`, `<6>{"level":"INFO"`, `<4>{"level":"WARN"`, `<3>{"level":"ERROR"`}
					}
				}
				lines := strings.SplitAfter(string(got), "\n")
				if len(lines) != len(want)+1 {
					t.Fatalf("%d lines:\n%s", len(lines)-1, got)
				}
				for i, begin := range want {
					if !strings.HasPrefix(lines[i], begin) {
						t.Errorf("line %d is %q, and does not begin with %q", i, lines[i], begin)
					}
				}
			})
		}
	}
}

// blockedWriter blocks until release is closed, and fails while failing is locked.
type blockedWriter struct {
	bytes.Buffer
	release chan struct{}
	failing sync.Mutex // locked while writes fail
}

func (s *blockedWriter) Write(p []byte) (int, error) {
	<-s.release
	if !s.failing.TryLock() {
		return 0, errors.New("broken")
	}
	defer s.failing.Unlock()
	return s.Buffer.Write(p)
}

// newBlockedLog returns a log that writes to a blockedWriter.
func newBlockedLog(t *testing.T) (*blockedWriter, *slog.Logger, *Writer) {
	to := &blockedWriter{release: make(chan struct{})}
	log, _, w := New(to, slog.LevelInfo, false, monitor.NewEvents(10).Handler)
	return to, log, w
}

func TestWriter_BlockedOutput(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		fits       int // about
	}{
		{"many lines", "short", maxRecords},
		{"long lines", strings.Repeat("x", 10<<10), maxBytes / (10 << 10)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				to, log, w := newBlockedLog(t)
				log.Info("first")
				synctest.Wait() // it is being written
				n := 3 * tt.fits
				for i := range n {
					log.Info(tt.text, "i", i)
				}
				lost := int(w.Dropped())
				if fit := n - lost; fit > tt.fits || fit < tt.fits*9/10 {
					t.Errorf("of %d lines %d were lost, room is for %d", n, lost, tt.fits)
				}
				close(to.release)
				synctest.Wait()
				log.Info("last")
				w.Close()
				got := to.String()
				if lines := strings.Count(got, "\n"); lines != 1+n-lost+1+1 {
					t.Errorf("%d lines, %d were lost of %d", lines, lost, n+2)
				}
				if want := fmt.Sprintf("writer blocked or failed\" since_start=%d\n", lost); strings.Count(got, "writer blocked or failed") != 1 || !strings.Contains(got, want) {
					t.Errorf("no line ends with %q", want)
				}
				if !strings.HasSuffix(got, "msg=last\n") {
					t.Error("the last line is missing")
				}
			})
		})
	}
}

func TestWriter_FailingOutput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		to, log, w := newBlockedLog(t)
		close(to.release)
		to.failing.Lock()
		for range 7 {
			log.Info("lost")
			synctest.Wait()
		}
		to.failing.Unlock()
		log.Info("recovered")
		synctest.Wait()
		w.Close()
		if got := to.String(); w.Dropped() != 7 || !strings.Contains(got, `msg=recovered`) || !strings.Contains(got, "since_start=7") {
			t.Errorf("%d lines were lost, 7 are expected:\n%s", w.Dropped(), got)
		}
	})
}

func TestWriter_CloseTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		to, log, w := newBlockedLog(t)
		log.Info("never written")
		start := time.Now()
		w.Close()
		if took := time.Since(start); took != time.Second {
			t.Errorf("closing a blocked writer took %v", took)
		}
		log.Info("too late")
		if w.Dropped() != 1 {
			t.Error("a line after the end was not counted")
		}
		close(to.release)
	})
}

// FuzzLogEscapes checks that input of a source can neither forge a log record nor reach a terminal
// unescaped.
func FuzzLogEscapes(f *testing.F) {
	for _, s := range []string{
		"plain", "", "two\nlines", "cr\rlf\r\n", "\x1b[2J", "nul\x00", "\xff\xfe", `quote"d`, `back\slash`, "a=b", "\u202e", "\u2028",
		"<3>", "level=ERROR msg=x", "\u009b2J", "\x7f",
	} {
		f.Add(s)
	}
	events := monitor.NewEvents(1)
	var out bytes.Buffer
	text := slog.New(events.Handler(slog.NewTextHandler(&out, nil)))
	asJSON := slog.New(slog.NewJSONHandler(&out, nil))
	f.Fuzz(func(t *testing.T, s string) {
		for _, value := range []any{s, errors.New(s), fmt.Errorf("read header: %w", errors.New(s))} {
			out.Reset()
			text.Warn("refused", "value", value)
			line := oneLine(t, out.String())
			for _, r := range line {
				if r != 0x7f && !unicode.IsPrint(r) { // DEL is harmless
					t.Errorf("%q: %q is in the log", s, r)
				}
			}
			_, got, _ := strings.Cut(line, " value=")
			if strings.HasPrefix(got, `"`) {
				var err error
				if got, err = strconv.Unquote(got); err != nil {
					t.Errorf("%q: %v", line, err)
				}
			}
			if want := fmt.Sprint(value); got != want {
				t.Errorf("%q is logged as %q", want, got)
			}
			if ev := events.Since(0); len(ev) != 1 || strings.ContainsFunc(ev[0].Attrs["value"], func(r rune) bool { return !unicode.IsPrint(r) }) {
				t.Errorf("%q is kept as %+v", s, ev)
			}

			out.Reset()
			asJSON.Warn("refused", "value", value)
			line = oneLine(t, out.String())
			if i := strings.IndexFunc(line, func(r rune) bool { return r < ' ' }); i >= 0 {
				t.Errorf("%q: %q is in the log", s, line[i])
			}
			var record map[string]string
			if err := json.Unmarshal([]byte(line), &record); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			if want := string([]rune(fmt.Sprint(value))); record["value"] != want { // invalid UTF-8 is replaced
				t.Errorf("%q is logged as %q", want, record["value"])
			}
		}
	})
}

// oneLine returns the only line of out.
func oneLine(t *testing.T, out string) string {
	t.Helper()
	line, ok := strings.CutSuffix(out, "\n")
	if !ok || strings.Contains(line, "\n") || !utf8.ValidString(line) {
		t.Errorf("not one line of UTF-8: %q", out)
	}
	return line
}
