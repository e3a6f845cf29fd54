package logging

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// isJournal reports whether w is the journal stream to which systemd has connected standard error
// (systemd.exec(5), JOURNAL_STREAM).
func isJournal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	if err != nil {
		return false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && os.Getenv("JOURNAL_STREAM") == fmt.Sprintf("%d:%d", st.Dev, st.Ino)
}

// Fields of every record besides those of its attributes (systemd.journal-fields(7)). The facility
// is "daemon", which syslog gets.
const journalHeader = "SYSLOG_IDENTIFIER=shaperd\nSYSLOG_FACILITY=3\n"

// fieldPrefix is the beginning of the names of fields that attributes become.
const fieldPrefix = "SHAPERD_"

// journalHandler writes each record as an entry in the native protocol of the journal: the line that
// other logs have is its MESSAGE, and each attribute is a field too. The journal adds the time.
type journalHandler struct {
	line   slog.Handler // writes to text
	shared *journalText // with the handlers that are derived from this one
	prefix string       // of the names of fields
	fields []byte       // of every record, encoded
}

// journalText is where a record is formatted.
type journalText struct {
	to io.Writer

	mu sync.Mutex
	// mu protects:
	line  []byte
	entry []byte
}

// Write appends to the line.
func (t *journalText) Write(b []byte) (int, error) {
	t.line = append(t.line, b...)
	return len(b), nil
}

// newJournalHandler returns a handler whose entries to gets, one with each Write.
func newJournalHandler(to io.Writer, format func(io.Writer) slog.Handler) *journalHandler {
	text := &journalText{to: to}
	return &journalHandler{line: format(text), shared: text, prefix: fieldPrefix}
}

func (h *journalHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return h.line.Enabled(ctx, level)
}

func (h *journalHandler) Handle(ctx context.Context, r slog.Record) error {
	t := h.shared
	t.mu.Lock()
	defer t.mu.Unlock()
	t.line = t.line[:0]
	r.Time = time.Time{}
	if err := h.line.Handle(ctx, r); err != nil {
		return err
	}
	e := append(t.entry[:0], journalHeader...)
	e = appendField(e, "PRIORITY", [...]string{"7", "6", "4", "3"}[priority(r.Level)])
	e = appendField(e, "MESSAGE", strings.TrimSuffix(string(t.line), "\n"))
	if id := messageID(r.Message); id != "" {
		e = appendField(e, "MESSAGE_ID", id)
	}
	e = append(e, h.fields...)
	r.Attrs(func(a slog.Attr) bool {
		e = appendAttr(e, h.prefix, a)
		return true
	})
	t.entry = e
	_, err := t.to.Write(e)
	return err
}

func (h *journalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	clone := *h
	clone.line, clone.fields = h.line.WithAttrs(attrs), h.fields[:len(h.fields):len(h.fields)]
	for _, a := range attrs {
		clone.fields = appendAttr(clone.fields, h.prefix, a)
	}
	return &clone
}

func (h *journalHandler) WithGroup(name string) slog.Handler {
	clone := *h
	clone.line = h.line.WithGroup(name)
	if name != "" {
		clone.prefix += fieldName(name) + "_"
	}
	return &clone
}

// appendAttr appends the fields of an attribute. An address with a port becomes two, so that one can
// search for the address alone.
func appendAttr(e []byte, prefix string, a slog.Attr) []byte {
	v := a.Value.Resolve()
	if v.Kind() == slog.KindGroup {
		if a.Key != "" {
			prefix += fieldName(a.Key) + "_"
		}
		for _, member := range v.Group() {
			e = appendAttr(e, prefix, member)
		}
		return e
	}
	if a.Equal(slog.Attr{}) {
		return e
	}
	name := prefix + fieldName(a.Key)
	if at, ok := v.Any().(netip.AddrPort); ok {
		e = appendField(e, name, at.Addr().Unmap().String())
		return appendField(e, name+"_PORT", strconv.Itoa(int(at.Port())))
	}
	return appendField(e, name, v.String())
}

// fieldName returns key in the characters that names of fields may have.
func fieldName(key string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return r - 'a' + 'A'
		case r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
			return r
		}
		return '_'
	}, key)
}

// maxValue is the length at which values are cut, so that an entry fits into a datagram. The journal
// cuts lines there too (LineMax= in journald.conf(5)).
const maxValue = 48 << 10

// appendField appends a field in the native protocol (https://systemd.io/JOURNAL_NATIVE_PROTOCOL/): a
// value with a line break has its length before it, so that no value can forge a field.
func appendField(e []byte, name, value string) []byte {
	value = value[:min(len(value), maxValue)]
	e = append(e, name...)
	if strings.Contains(value, "\n") {
		e = append(e, '\n')
		e = binary.LittleEndian.AppendUint64(e, uint64(len(value)))
	} else {
		e = append(e, '=')
	}
	e = append(e, value...)
	return append(e, '\n')
}
