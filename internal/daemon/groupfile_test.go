package daemon

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"shaperd.dev/shaperd/cluster"
)

// A host of which it is not known whether it had left uses nothing until it has joined.
func TestGroupFile(t *testing.T) {
	f := &groupFile{path: filepath.Join(t.TempDir(), "group"), log: slog.New(slog.DiscardHandler)}
	p := cluster.Params{Hosts: 3, Lease: cluster.Second, Step: cluster.Second / 2}
	first := f.begin(t.Context(), p)
	if !first.Left || !(*groupFile)(nil).begin(t.Context(), p).Left {
		t.Error("without a file, the host has not left")
	}
	if err := f.leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	second := f.begin(t.Context(), p)
	if !second.Left || second.Start <= first.Start {
		t.Errorf("%+v, after %+v and leaving", second, first)
	}
	f.joined()
	if err := f.save(t.Context()); err != nil || f.begin(t.Context(), p).Left {
		t.Errorf("%v; or a host that has joined has left", err)
	}
	long, short := p, p
	long.Lease = 10 * cluster.Second
	for _, test := range []struct{ now, away cluster.Params }{{long, long}, {short, long}, {short, long}} {
		if got := f.begin(t.Context(), test.now).Away; got != int64(test.away.Away()) {
			t.Errorf("away for %d us, want %d", got, test.away.Away())
		}
	}
	f.joined()
	if err := f.save(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := f.begin(t.Context(), short).Away; got != int64(short.Away()) {
		t.Errorf("away for %d us after it has joined", got)
	}
	if err := os.WriteFile(f.path, []byte(`{"Start":`), 0o600); err != nil {
		t.Fatal(err)
	}
	if !f.begin(t.Context(), p).Left {
		t.Error("with a damaged file, the host has not left")
	}
	if err := os.RemoveAll(filepath.Dir(f.path)); err != nil {
		t.Fatal(err)
	}
	f.joined()
	for range 2 {
		if f.save(t.Context()) == nil || f.leave(t.Context()) == nil {
			t.Error("saved in a folder that does not exist")
		}
	}
}
