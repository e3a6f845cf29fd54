package bpf

import (
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// hasTCX reports whether the kernel is Linux 6.6 or later.
func hasTCX(t *testing.T) bool {
	t.Helper()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	var major, minor int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	return major > 6 || major == 6 && minor >= 6
}

// hooks returns the hooks that the kernel supports.
func hooks(t *testing.T) []shaper.Hook {
	if hasTCX(t) {
		return []shaper.Hook{shaper.HookTCX, shaper.HookClsact, shaper.HookXDP}
	}
	return []shaper.Hook{shaper.HookClsact, shaper.HookXDP}
}

// tenAnHour returns a limit that lets ten datagrams of each source pass, and the next one after 6 minutes.
func tenAnHour(attachment string) shaper.Limit {
	return shaper.Limit{
		Name: "ten", Match: shaper.Match{Attach: []string{attachment}},
		Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64,
		Packets: shaper.Frequency{N: 10, Per: time.Hour}, BurstPackets: 9,
	}
}

// testPlane is a plane with separate pins.
type testPlane struct {
	*Plane
	t         *testing.T
	shaper    *shaper.Shaper
	clock     *pacer.Clock
	pins      string
	keys      int
	listeners []netip.AddrPort
	logged    testutil.Buffer
}

func openPlane(t *testing.T) *testPlane {
	t.Helper()
	p := &testPlane{t: t, keys: 1024, pins: filepath.Join(pins, strings.NewReplacer("/", "-", ".", "-").Replace(t.Name()))}
	p.open()
	t.Cleanup(func() {
		if p.Plane != nil {
			_ = p.Close()
		}
	})
	return p
}

func (p *testPlane) open() {
	p.t.Helper()
	p.shaper, p.clock = shaper.New(1024), pacer.NewClock()
	log := slog.New(slog.NewTextHandler(io.MultiWriter(p.t.Output(), &p.logged), nil))
	plane, err := Open(Options{Shaper: p.shaper, Clock: p.clock, PinPath: p.pins, Keys: p.keys, Log: log})
	if err != nil {
		p.t.Fatal(err)
	}
	p.Plane = plane
}

func (p *testPlane) apply(limits []shaper.Limit, attachments ...shaper.Attachment) {
	p.t.Helper()
	if err := p.tryApply(limits, attachments...); err != nil {
		p.t.Fatal(err)
	}
}

func (p *testPlane) tryApply(limits []shaper.Limit, attachments ...shaper.Attachment) error {
	var names []shaper.Attachment
	for _, a := range attachments {
		names = append(names, shaper.Attachment{Name: a.Name})
	}
	policy, err := p.shaper.Compile(limits, nil, names, nil, false)
	if err != nil {
		return err
	}
	c, err := p.Prepare(attachments, p.listeners, policy)
	if err != nil {
		return err
	}
	return c.Commit()
}

// crash leaves the plane as a killed daemon would.
func (p *testPlane) crash() {
	p.Release()
}

func within(t *testing.T, limit time.Duration, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("not within %v", limit)
		}
		time.Sleep(100 * time.Millisecond)
	}
}
