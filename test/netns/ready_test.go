package netns

import (
	"errors"
	"fmt"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/test/lab"
)

// TestReady_Attachment checks that /ready fails while an attachment has lost its interface, and that
// /healthz does not: a restart would not help.
func TestReady_Attachment(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	add := func() {
		t.Helper()
		must(t, errors.Join(lab.Join(n.shaper.Host, "late0", n.downstream.Host, "new"), n.shaper.Up("late0")))
	}
	add()
	n.shaper.shaperd(t, attachConfig(newPinPath(t), attach("late0", "police"), flood{rate: 1, depth: 1}.lines()))
	want := func(path, want string) {
		t.Helper()
		waitFor(t, patience, func() error {
			return n.shaper.Do(func() error {
				code, body, err := testutil.Get(lab.MetricsAddr, path)
				if got := fmt.Sprintf("%d %s", code, body); err == nil && got != want+"\n" {
					err = fmt.Errorf("%s is %q, want %q", path, got, want)
				}
				return err
			})
		})
	}
	want("/ready", "200 ready")
	must(t, n.shaper.Links.LinkDel(n.shaper.mustLink(t, "late0")))
	want("/ready", "503 not attached: wall")
	want("/healthz", "200 ok")
	add()
	want("/ready", "200 ready")
}
