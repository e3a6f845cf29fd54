package daemon

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
)

// A problem that lasts is logged once, and its end; one that passes is not.
func TestSharedLog(t *testing.T) {
	var out bytes.Buffer
	l := newSharedLog(slog.New(slog.NewTextHandler(&out, nil)))
	alone := api.Problem{Title: "Alone", Text: "no ledger answers"}
	disagree := api.Problem{Title: "Hosts disagree", Text: "about a"}
	now, joined := time.Now(), true
	look := func(want string, problems ...api.Problem) {
		t.Helper()
		out.Reset()
		now = now.Add(sharedLogInterval)
		l.update(problems, joined, now)
		if got := out.String(); (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("logged %q, want %q", got, want)
		}
	}
	look("", alone)
	look("")
	look("", alone)
	look("", alone)
	look("", alone)
	look(`WARN msg="problem of shared limits" problem=alone detail="no ledger answers"`, alone)
	look("", alone, disagree)
	look("", alone, disagree)
	look(`INFO msg="problem of shared limits has ended" problem=alone`, disagree)
	look(`problem="hosts disagree" detail="about a about b"`, disagree, api.Problem{Title: "Hosts disagree", Text: "about b"})
	joined = false // and does not know whether they do
	look("")
	joined = true
	look(`has ended" problem="hosts disagree"`)
	look("")
}
