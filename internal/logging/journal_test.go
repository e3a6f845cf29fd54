package logging

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/control/monitor"
)

// parseEntry parses an entry by the description of the native protocol.
func parseEntry(b []byte) (fields map[string][]string, err error) {
	fields = map[string][]string{}
	for len(b) > 0 {
		i := bytes.IndexAny(b, "=\n")
		if i < 0 {
			return nil, fmt.Errorf("no end of a name in %q", b)
		}
		name, value := string(b[:i]), []byte(nil)
		if b[i] == '=' {
			value, b, _ = bytes.Cut(b[i+1:], []byte("\n"))
		} else {
			n := binary.LittleEndian.Uint64(b[i+1:])
			value, b = b[i+9:i+9+int(n)], b[i+9+int(n):]
			if b[0] != '\n' {
				return nil, fmt.Errorf("no line break after %q", value)
			}
			b = b[1:]
		}
		fields[name] = append(fields[name], string(value))
	}
	return fields, nil
}

// fakeJournal is a journal whose entries a test reads.
type fakeJournal struct {
	t    *testing.T
	path string
	conn *net.UnixConn
}

func newFakeJournal(t *testing.T) *fakeJournal {
	dir, err := os.MkdirTemp("", "journal") // the path of a socket has 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	j := &fakeJournal{t: t, path: filepath.Join(dir, "socket")}
	j.listen()
	t.Cleanup(func() { j.conn.Close() })
	return j
}

func (j *fakeJournal) listen() {
	j.t.Helper()
	var err error
	if j.conn, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: j.path, Net: "unixgram"}); err != nil {
		j.t.Fatal(err)
	}
}

// next returns the next entry.
func (j *fakeJournal) next() map[string][]string {
	j.t.Helper()
	j.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	b := make([]byte, 1<<20)
	n, err := j.conn.Read(b)
	if err != nil {
		j.t.Fatal(err)
	}
	fields, err := parseEntry(b[:n])
	if err != nil {
		j.t.Fatal(err)
	}
	return fields
}

// log returns a log to a stream that leads to j. Its writer is closed with the test.
func (j *fakeJournal) log(asJSON bool) *slog.Logger {
	j.t.Helper()
	f, err := os.Create(filepath.Join(j.t.TempDir(), "stderr"))
	if err != nil {
		j.t.Fatal(err)
	}
	info, err := f.Stat()
	if err != nil {
		j.t.Fatal(err)
	}
	st := info.Sys().(*syscall.Stat_t)
	j.t.Setenv("JOURNAL_STREAM", fmt.Sprintf("%d:%d", st.Dev, st.Ino))
	log, _, w := newLog(f, slog.LevelDebug, asJSON, monitor.NewEvents(1).Handler, j.path)
	j.t.Cleanup(func() {
		w.Close()
		if info, err := f.Stat(); err != nil || info.Size() > 0 {
			j.t.Errorf("%d bytes went to the stream, %v", info.Size(), err)
		}
		f.Close()
	})
	return log
}

func TestJournal_Fields(t *testing.T) {
	j := newFakeJournal(t)
	log := j.log(false)
	source := netip.MustParseAddrPort("[::ffff:192.0.2.7]:40000")
	base := map[string][]string{"SYSLOG_IDENTIFIER": {"shaperd"}, "SYSLOG_FACILITY": {"3"}}
	for _, tt := range []struct {
		log  func()
		want map[string][]string
	}{
		{func() { log.Debug("one") }, map[string][]string{"PRIORITY": {"7"}, "MESSAGE": {"level=DEBUG msg=one"}}},
		{
			func() { log.Info("ready", "config", "/etc/x", "limits", 3) },
			map[string][]string{
				"PRIORITY": {"6"}, "MESSAGE": {"level=INFO msg=ready config=/etc/x limits=3"}, "MESSAGE_ID": {messageIDs["ready"]},
				"SHAPERD_CONFIG": {"/etc/x"}, "SHAPERD_LIMITS": {"3"},
			},
		},
		{
			func() {
				log.Warn("connection refused: wait-timeout (repeated)", "limit", "per-source", "source", source)
			},
			map[string][]string{
				"PRIORITY": {"4"}, "MESSAGE": {`level=WARN msg="connection refused: wait-timeout (repeated)" limit=per-source source=[::ffff:192.0.2.7]:40000`},
				"MESSAGE_ID": {messageIDs["connection refused"]}, "SHAPERD_LIMIT": {"per-source"}, "SHAPERD_SOURCE": {"192.0.2.7"}, "SHAPERD_SOURCE_PORT": {"40000"},
			},
		},
		{
			func() { log.Error("a", "err", errors.New("1\nPRIORITY=0\n"), slog.Attr{}) },
			map[string][]string{"PRIORITY": {"3"}, "MESSAGE": {`level=ERROR msg=a err="1\nPRIORITY=0\n"`}, "SHAPERD_ERR": {"1\nPRIORITY=0\n"}},
		},
		{
			func() {
				log.With("b-c", 1).WithGroup("g.h").With("i", 2).Info("x", slog.Group("k", "l", 3), slog.Group("", "m", 4))
			},
			map[string][]string{
				"PRIORITY": {"6"}, "MESSAGE": {"level=INFO msg=x b-c=1 g.h.i=2 g.h.k.l=3 g.h.m=4"},
				"SHAPERD_B_C": {"1"}, "SHAPERD_G_H_I": {"2"}, "SHAPERD_G_H_K_L": {"3"}, "SHAPERD_G_H_M": {"4"},
			},
		},
	} {
		tt.log()
		for name, value := range base {
			tt.want[name] = value
		}
		if d := cmp.Diff(tt.want, j.next()); d != "" {
			t.Error(d)
		}
	}
	j.log(true).Info("x", "limit", "a")
	if got := j.next(); got["MESSAGE"][0] != `{"level":"INFO","msg":"x","limit":"a"}` || got["SHAPERD_LIMIT"][0] != "a" {
		t.Errorf("as JSON: %q", got)
	}
}

// TestJournal_LongEntry checks that an entry is cut where it would not fit into a datagram.
func TestJournal_LongEntry(t *testing.T) {
	j := newFakeJournal(t)
	log := j.log(false)
	long := strings.Repeat("x", 400<<10)
	log.Error("reload failed", "err", long, "config", long)
	log.Info("next")
	got := j.next()
	if !strings.HasPrefix(got["MESSAGE"][0], `level=ERROR msg="reload failed" err=xxx`) || got["SHAPERD_ERR"][0] != long[:maxValue] || got["SHAPERD_CONFIG"][0] != long[:maxValue] {
		t.Errorf("%d and %d bytes arrived", len(got["MESSAGE"][0]), len(got["SHAPERD_ERR"][0]))
	}
	if got := j.next(); got["MESSAGE"][0] != "level=INFO msg=next" {
		t.Errorf("then %.200q", got)
	}
}

// TestJournal_FullQueue checks that a journal that reads nothing holds up nobody, that waiting for it
// takes no time of a processor, and that records arrive when it reads again.
func TestJournal_FullQueue(t *testing.T) {
	j := newFakeJournal(t)
	other, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(other)
	n := 0
	for unix.Sendto(other, []byte("A=b\n"), 0, &unix.SockaddrUnix{Name: j.path}) == nil {
		n++
	}
	log := j.log(false)
	log.Info("waits")
	var before, after unix.Rusage
	begun := time.Now()
	unix.Getrusage(unix.RUSAGE_SELF, &before)
	time.Sleep(time.Second)
	unix.Getrusage(unix.RUSAGE_SELF, &after)
	took := time.Since(begun)
	if used := time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()); used > took/4 {
		t.Errorf("%v of CPU time in %v of waiting", used, took)
	}
	for range n {
		if got := j.next(); got["A"][0] != "b" {
			t.Fatalf("%q", got)
		}
	}
	if got := j.next(); got["MESSAGE"][0] != "level=INFO msg=waits" {
		t.Errorf("%q", got)
	}
}

func TestJournal_SocketMadeAgain(t *testing.T) {
	j := newFakeJournal(t)
	log := j.log(false)
	log.Info("one")
	j.next()
	j.conn.Close()
	if err := os.Remove(j.path); err != nil {
		t.Fatal(err)
	}
	log.Info("lost") // unless it is late
	time.Sleep(10 * time.Millisecond)
	j.listen()
	log.Info("two")
	if got := j.next(); got["MESSAGE"][0] != "level=INFO msg=two" && got["MESSAGE"][0] != "level=INFO msg=lost" {
		t.Errorf("%q", got)
	}
}

// FuzzJournalFields checks that input of a source can neither forge a field nor break an entry.
func FuzzJournalFields(f *testing.F) {
	for _, s := range []string{"", "a", "\n", "a\nPRIORITY=0\n", "\nPRIORITY\n\x00\x00", "=", "\xff\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		s = s[:min(len(s), maxValue)]
		var entry bytes.Buffer
		log := slog.New(newJournalHandler(&entry, func(w io.Writer) slog.Handler { return slog.NewTextHandler(w, nil) }))
		log.With("a", s).Warn("refused", "limit", "l", "source", s)
		got, err := parseEntry(entry.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		delete(got, "MESSAGE")
		want := map[string][]string{
			"SYSLOG_IDENTIFIER": {"shaperd"}, "SYSLOG_FACILITY": {"3"}, "PRIORITY": {"4"}, "MESSAGE_ID": {messageIDs["refused"]},
			"SHAPERD_A": {s}, "SHAPERD_LIMIT": {"l"}, "SHAPERD_SOURCE": {s},
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
	})
}
