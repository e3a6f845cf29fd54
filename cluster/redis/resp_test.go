package redis

import (
	"bufio"
	"bytes"
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func decode(text string) (any, error) {
	return readReply(bufio.NewReaderSize(strings.NewReader(text), 2*maxLine))
}

func TestReadReply(t *testing.T) {
	for text, want := range map[string]any{
		"+OK\r\n":                  "OK",
		":-42\r\n":                 int64(-42),
		":9223372036854775807\r\n": int64(1<<63 - 1),
		"$0\r\n\r\n":               "",
		"$4\r\na\r\nb\r\n":         "a\r\nb",
		"$-1\r\n":                  nil,
		"*-1\r\n":                  nil,
		"*0\r\n":                   []any{},
		"*3\r\n:1\r\n*2\r\n$1\r\na\r\n+b\r\n$-1\r\n": []any{int64(1), []any{"a", "b"}, nil},
		"-NOSCRIPT No matching script.\r\n":          serverError("NOSCRIPT No matching script."),
	} {
		got, err := decode(text)
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%q: %v\n%s", text, err, diff)
		}
	}
}

// hostile are replies with which a server, or who is in its place, might harm the daemon. The directory
// testdata/clients shows what well-known clients do with them.
var hostile = map[string]string{
	"array of -2":       "*-2\r\n",
	"string of -2":      "$-2\r\n",
	"string of 1 TiB":   "$1099511627776\r\n",
	"string of 2^62":    "$4611686018427387904\r\n",
	"string of 2^63":    "$9223372036854775808\r\n",
	"array of 2^30":     "*1073741824\r\n",
	"array of 2^62":     "*4611686018427387904\r\n",
	"array in array":    strings.Repeat("*1\r\n", 10_000_000),
	"long line":         "+" + strings.Repeat("x", 1<<20),
	"long error":        "-" + strings.Repeat("x", 1<<20),
	"many long strings": "*1000\r\n" + strings.Repeat("$1048576\r\n"+strings.Repeat("x", 1<<20)+"\r\n", 20),
	"error in an array": "*1\r\n-ERR\r\n",
	"map":               "%1\r\n+a\r\n+b\r\n",
	"attribute":         "|1\r\n+a\r\n+b\r\n:1\r\n",
	"push":              ">1\r\n+a\r\n:1\r\n",
	"chunks":            "$?\r\n;4\r\nabcd\r\n;0\r\n",
	"HTTP":              "HTTP/1.1 400 Bad Request\r\n\r\n",
	"no number":         ":one\r\n",
	"empty number":      ":\r\n",
	"number with space": ": 1\r\n",
	"hexadecimal":       "$0x1\r\na\r\n",
	"empty line":        "\r\n",
	"line feed only":    ":1\n",
	"wrong string end":  "$1\r\nabc\r\n",
	"end in a string":   "$10\r\nabc",
	"end in an array":   "*2\r\n:1\r\n",
	"nothing at all":    "",
	"TLS alert":         "\x15\x03\x03\x00\x02\x02\x28",
}

func TestReadReply_Hostile(t *testing.T) {
	for name, text := range hostile {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		v, err := decode(text)
		runtime.ReadMemStats(&after)
		if err == nil {
			t.Errorf("%s: %.100v", name, v)
		} else if len(err.Error()) > 200 {
			t.Errorf("%s: an error of %d bytes", name, len(err.Error()))
		}
		if used := after.TotalAlloc - before.TotalAlloc; used > 3*maxReply {
			t.Errorf("%s: allocated %d MB", name, used>>20)
		}
	}
}

func TestServerError(t *testing.T) {
	e := serverError("READONLY You can't\x1b[31m " + strings.Repeat("x", 1000))
	if e.code() != "READONLY" || serverError("OOM").code() != "OOM" {
		t.Errorf("codes %q and %q", e.code(), serverError("OOM").code())
	}
	if text := e.Error(); len(text) > 300 || strings.Contains(text, "\x1b") {
		t.Errorf("%d bytes: %.60s", len(text), text)
	}
}

// encode is the reply that has a value.
func encode(b []byte, v any) []byte {
	switch v := v.(type) {
	case int64:
		b = appendHeader(b, ':', int(v))
	case string:
		b = append(appendHeader(b, '$', len(v)), v...)
		b = append(b, "\r\n"...)
	case nil:
		b = append(b, "*-1\r\n"...)
	case serverError:
		b = append(append(append(b, '-'), v...), "\r\n"...)
	case []any:
		b = appendHeader(b, '*', len(v))
		for _, e := range v {
			b = encode(b, e)
		}
	}
	return b
}

// FuzzReadReply reads random replies, and takes them for what the script returns. What was read is
// the same after it was written and read again.
func FuzzReadReply(f *testing.F) {
	for _, text := range hostile {
		if len(text) < 1000 {
			f.Add([]byte(text))
		}
	}
	f.Add(encode(nil, []any{
		int64(7), int64(1), int64(0), int64(99), int64(0), int64(4), int64(1e6), int64(5e5), int64(0), int64(3), int64(1), int64(1), int64(0),
		int64(1), int64(12), int64(0), int64(0),
		[]any{"db", int64(12), int64(1)},
		[]any{"db", int64(5), int64(3)},
		[]any{"gw", int64(1)},
	}))
	f.Add(encode(nil, []any{
		int64(4), int64(1e6), int64(5e5), int64(0), int64(99), int64(5), int64(1), int64(1),
		[]any{[]any{"gw", int64(-3), int64(1), int64(4), "ff", "info"}},
		[]any{"old", int64(1)},
		[]any{[]any{"db", []any{[]any{"gw", int64(1), int64(2), int64(3)}}}},
	}))
	f.Fuzz(func(t *testing.T, text []byte) {
		v, err := readReply(bufio.NewReaderSize(bytes.NewReader(text), 2*maxLine))
		if err != nil {
			return
		}
		again, err := readReply(bufio.NewReaderSize(bytes.NewReader(encode(nil, v)), 2*maxLine))
		if diff := cmp.Diff(v, again); err != nil || diff != "" {
			t.Fatalf("written and read again: %v\n%s", err, diff)
		}
		if r, err := parseReply(v); err == nil {
			for _, g := range r.Grants {
				if g.Parts < 0 || g.Parts > 1<<20 {
					t.Errorf("a grant of %d parts", g.Parts)
				}
			}
		} else if !errors.Is(err, errProtocol) {
			t.Errorf("error %v", err)
		}
		_, _ = parseSnapshot(v)
		_, _ = parseMaster(v)
		_ = infoField(v, "run_id")
		if e, is := v.(serverError); is {
			_ = movedTo(e, "10.0.0.1:6379")
		}
	})
}
