package vm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// mark starts the framing lines that the guest's first process writes between the output of tests.
const mark = "\x01"

// A transcript is the parsed output of a guest.
type transcript struct {
	release string // of the kernel
	uptime  string // in seconds, when the first suite started
	suites  map[string]record
}

// A record is the output of a suite's tests.
type record struct {
	output []byte
	status string // exit status of the process; empty when it did not end
}

// parseTranscript parses the output of a guest, which may be truncated.
func parseTranscript(output []byte) transcript {
	t := transcript{suites: make(map[string]record)}
	var suite string
	for section := range bytes.SplitSeq(output, []byte(mark)) {
		head, body, _ := bytes.Cut(section, []byte("\n"))
		word, rest, _ := strings.Cut(string(head), " ")
		switch word {
		case "booted":
			t.release, t.uptime, _ = strings.Cut(rest, " ")
		case "begin":
			suite = rest
			t.suites[suite] = record{output: body}
		case "end":
			t.suites[suite] = record{t.suites[suite].output, rest}
		case "off":
		default: // a test's own output contains the byte
			if r, ok := t.suites[suite]; ok {
				r.output = slices.Concat(r.output, []byte(mark), section)
				t.suites[suite] = r
			}
		}
	}
	return t
}

// replay runs the tests of a record as subtests of t, and returns the number of top-level tests.
func (r record) replay(t *testing.T) int {
	all, err := outcomes(r.output)
	if err != nil {
		t.Fatal(err)
	}
	all.replay(t)
	switch r.status {
	case "0":
	case "":
		t.Error("did not end")
	default:
		t.Errorf("ended with status %s", r.status)
	}
	return len(all.tests)
}

// An outcome is the result of a test in a guest, or of a suite.
type outcome struct {
	name    string
	action  string  // pass, fail or skip; empty when it did not end
	seconds float64 // duration
	output  bytes.Buffer
	tests   []*outcome // subtests
}

// outcomes parses the output of a test binary with -test.v=test2json into a tree.
func outcomes(output []byte) (*outcome, error) {
	var stderr bytes.Buffer
	cmd := exec.Command("go", "tool", "test2json", "-t")
	cmd.Stdin, cmd.Stderr = bytes.NewReader(output), &stderr
	events, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go tool test2json: %w: %s", err, stderr.Bytes())
	}
	root := new(outcome)
	byName := map[string]*outcome{"": root}
	for d := json.NewDecoder(bytes.NewReader(events)); ; {
		var e struct {
			Action, Test, Output string
			Elapsed              float64
		}
		if err := d.Decode(&e); errors.Is(err, io.EOF) {
			return root, nil
		} else if err != nil {
			return nil, fmt.Errorf("read events of go tool test2json: %w", err)
		}
		o := byName[e.Test]
		if o == nil {
			parent, name := findParent(byName, e.Test)
			o = &outcome{name: name}
			parent.tests = append(parent.tests, o)
			byName[e.Test] = o
		}
		switch e.Action {
		case "output":
			if !isFraming(e.Output) {
				o.output.WriteString(e.Output)
			}
		case "pass", "fail", "skip":
			o.action, o.seconds = e.Action, e.Elapsed
		}
	}
}

// findParent returns the parent of the test called full, and its name within the parent.
// Subtest names may contain slashes.
func findParent(byName map[string]*outcome, full string) (parent *outcome, name string) {
	for i := len(full) - 1; i > 0; i-- {
		if full[i] == '/' && byName[full[:i]] != nil {
			return byName[full[:i]], full[i+1:]
		}
	}
	return byName[""], full
}

// isFraming reports whether a line of output only repeats the content of an outcome.
func isFraming(line string) bool {
	line = strings.TrimLeft(line, " ")
	for _, prefix := range []string{"=== RUN ", "=== PAUSE ", "=== CONT ", "=== NAME ", "--- PASS: ", "--- FAIL: ", "--- SKIP: "} {
		if strings.HasPrefix(line, prefix) {
			return true
		}
	}
	return line == "PASS\n" || line == "FAIL\n"
}

// replay runs the tests of o as subtests of t with the same results.
func (o *outcome) replay(t *testing.T) {
	_, _ = t.Output().Write(o.output.Bytes())
	for _, test := range o.tests {
		t.Run(test.name, func(t *testing.T) {
			test.replay(t)
			if failure := test.failure(); failure != "" {
				t.Error(failure)
			}
			fmt.Fprintf(t.Output(), "%.2f s in the guest\n", test.seconds)
		})
	}
}

// failure returns why a test does not count as passed, or "".
func (o *outcome) failure() string {
	switch o.action {
	case "pass":
		return ""
	case "fail":
		return "failed in the guest"
	case "skip":
		return "skipped, although a guest has everything that tests need"
	default:
		return "did not end"
	}
}
