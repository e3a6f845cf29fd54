package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// A program in a terminal of the size asked for gets the keys, and answers to its questions. What it
// wrote is read back from the file.
func TestRecord(t *testing.T) {
	dir := t.TempDir()
	cast, picture := filepath.Join(dir, "a.cast"), filepath.Join(dir, "a.svg")
	// The last question of the program is for the position of the cursor.
	script := `test -t 0 && test -t 1 && stty size; read line; printf 'got <%s> ▁▂▃\n' "$line"
stty raw -echo; printf '\033[6n'; answer=$(dd bs=1 count=6 2>/dev/null | tr -d '\033'); stty sane; printf 'at %s\n' "$answer"`
	var echo strings.Builder
	if err := run(t.Context(), &echo, []string{"record", "-size", "40x7", "-keys", "50ms k, 100ms enter", "-out", cast, "--", "sh", "-c", script}); err != nil {
		t.Fatal(err)
	}
	if err := run(t.Context(), io.Discard, []string{"render", "-step", "1ms", "-out", picture, cast}); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(picture)
	if err != nil {
		t.Fatal(err)
	}
	frames := parseSVG(t, string(text)).frames
	if got, want := frames[len(frames)-1], (screenText{"7 40", "k", "got <k>|▁▂▃", "at [4;1R"}); !slices.Equal(got, want) {
		t.Errorf("the last frame is %q, want %q", got, want)
	}
	if !strings.Contains(echo.String(), "got <k> ▁▂▃") {
		t.Errorf("the output was not shown: %q", echo.String())
	}
}

func TestRecord_Failure(t *testing.T) {
	cast := filepath.Join(t.TempDir(), "a.cast")
	err := run(t.Context(), io.Discard, []string{"record", "-out", cast, "--", "sh", "-c", "echo text; exit 3"})
	if err == nil || err.Error() != "sh: exit status 3" {
		t.Errorf("error %v", err)
	}
	if text, _ := os.ReadFile(cast); !strings.Contains(string(text), `"text\r\n"`) {
		t.Errorf("the recording is %q", text)
	}
}

// A recording that is interrupted ends its program, and is written.
func TestRecord_Interrupted(t *testing.T) {
	cast := filepath.Join(t.TempDir(), "a.cast")
	ctx, interrupt := context.WithCancel(t.Context())
	echo := writerFunc(func(text []byte) (int, error) {
		if strings.Contains(string(text), "ready") {
			interrupt()
		}
		return len(text), nil
	})
	if err := run(ctx, echo, []string{"record", "-out", cast, "--", "sh", "-c", "trap 'echo ended; exit 7' TERM; echo ready; while :; do sleep 0.1; done"}); err != nil {
		t.Error(err)
	}
	text, err := os.ReadFile(cast)
	if err != nil || !strings.Contains(string(text), `ready\r\n`) || !strings.Contains(string(text), `ended\r\n`) {
		t.Errorf("the recording is %q, %v", text, err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(text []byte) (int, error) { return f(text) }

func TestParseKeys(t *testing.T) {
	got, err := parseKeys("2s enter, 3500ms down,4s q")
	want := []keyPress{{2 * time.Second, "\r"}, {3500 * time.Millisecond, "\x1b[B"}, {4 * time.Second, "q"}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
	for _, bad := range []string{"enter", "2 enter", "2s", ","} {
		if got, err := parseKeys(bad); err == nil {
			t.Errorf("%q: no error, but %v", bad, got)
		}
	}
}

func TestReadRecording_Errors(t *testing.T) {
	const head = `{"version":2,"width":80,"height":24}` + "\n"
	for text, want := range map[string]string{
		"":                                     "read the header: EOF",
		`{"version":1,"width":80,"height":24}`: "unsupported header",
		head + `[1, "o"`:                       "read event 1",
		head + `["1", "o", "x"]`:               "is not a time",
		head + `[2,"o","a"]` + `[1,"o","b"]`:   "the event at 1s is after one at 2s",
	} {
		if _, err := readRecording(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %s", text, err, want)
		}
	}
	r, err := readRecording(strings.NewReader(head + `[1,"i","typed"]` + `[2,"o","shown"]`))
	if err != nil || len(r.output) != 1 || r.output[0] != (output{2 * time.Second, "shown"}) {
		t.Errorf("%v, %v", r, err)
	}
}

func TestCompleteRunes(t *testing.T) {
	for text, want := range map[string]string{"": "", "abc": "abc", "ab▁": "ab▁", "ab\xe2": "ab", "ab\xe2\x96": "ab", "\xf0\x9f\x98": "", "a\xff": "a\xff"} {
		if got := string(completeRunes([]byte(text))); got != want {
			t.Errorf("%q is complete until %q, want %q", text, got, want)
		}
	}
}
