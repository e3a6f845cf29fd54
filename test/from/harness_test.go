package from

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"shaperd.dev/shaperd/test/lab"
)

// The addresses in the pages.
var (
	clients = []netip.Addr{netip.MustParseAddr("10.1.1.10"), netip.MustParseAddr("10.1.2.10"), netip.MustParseAddr("10.1.3.10"), netip.MustParseAddr("10.1.4.10")}
	proxy   = netip.MustParseAddr("10.1.0.1")
	backend = netip.MustParseAddr("10.2.0.5")
)

const (
	tcpPort = 5432
	udpPort = 8003
	device  = "eth1" // in the pages; lab.MiddleRight here
)

func TestMain(m *testing.M) {
	err := lab.Sweep()
	if os.Geteuid() != 0 {
		err = errors.New("network namespaces need root: run these tests as root")
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "test/from: %v\n", err)
		os.Exit(1)
	}
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// A page is the two configurations in a document.
type page struct{ theirs, ours string }

var fence = regexp.MustCompile("(?s)```(\\w+)\n(.*?)```")

// readPage returns the first two blocks of code in a page: one of another language, and one of TOML.
func readPage(t *testing.T, name string) (p page) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../docs/from", name))
	if err != nil {
		t.Fatal(err)
	}
	blocks := fence.FindAllStringSubmatch(string(text), -1)
	if len(blocks) < 2 || blocks[0][1] == "toml" || blocks[1][1] != "toml" {
		t.Fatalf("%s does not begin with two configurations, ours as the second one", name)
	}
	return page{theirs: blocks[0][2], ours: blocks[1][2]}
}

// A site is a client, the host under test, and a server.
type site struct {
	*lab.Row
	t *testing.T
}

func newSite(t *testing.T) *site {
	t.Helper()
	row, err := lab.NewRow(lab.RowAddresses{
		Clients: clients, Outer: []netip.Addr{proxy}, OuterBits: 16,
		Inner: netip.MustParseAddr("10.2.0.1"), Downstream: backend, InnerBits: 24,
	})
	must(t, err)
	t.Cleanup(row.Remove)
	// Segments within a super-packet would have no gaps.
	must(t, row.Middle.SetMaxSegments(lab.MiddleRight, 1))
	return &site{row, t}
}

// forward makes the host under test a router.
func (s *site) forward() { must(s.t, s.Middle.Sysctl("net/ipv4/ip_forward", "1")) }

// startOurs runs shaperd with the configuration of a page.
func (s *site) startOurs(config string) {
	s.t.Helper()
	pins, err := lab.NewBPFFS()
	must(s.t, err)
	s.t.Cleanup(func() { must(s.t, lab.RemoveDir(pins)) })
	config = fmt.Sprintf("[daemon]\nmetrics = \"\"\ndashboard = \"\"\npin_path = %q\n", filepath.Join(pins, "pins")) + strings.ReplaceAll(config, device, lab.MiddleRight)
	d, err := lab.StartDaemon(s.t.Context(), lab.DaemonOptions{Host: s.Middle, Config: config})
	must(s.t, err)
	s.t.Cleanup(func() {
		if err := d.Stop(patience); err != nil {
			s.t.Error(err)
		}
	})
}

// startPeer runs another program, which listens at an address.
func (s *site) startPeer(config string, at netip.AddrPort, command func(path string) []string) {
	s.t.Helper()
	_, stop, err := lab.StartPeer(s.t.Context(), s.Middle, config, at, command)
	must(s.t, err)
	s.t.Cleanup(func() { must(s.t, stop()) })
}

// script runs the commands of a page, one a line, without a shell: that of a guest has a tc of its own.
func (s *site) script(text string) {
	s.t.Helper()
	for line := range strings.Lines(strings.ReplaceAll(text, device, lab.MiddleRight)) {
		words := strings.Fields(line)
		must(s.t, s.Middle.Run(words[0], words[1:]...))
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// patience is how long tests wait for what happens at once, unless the machine is busy.
const patience = 30 * time.Second

// waitFor waits until a check passes.
func waitFor(t *testing.T, what string, check func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !check(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// settle gives other programs time for what cannot be seen from outside. In a stall of the machine one nap ends, and the
// programs still have the others.
func settle() {
	for range 10 {
		time.Sleep(30 * time.Millisecond)
	}
}

// A fragileServer takes connections, each with a byte that names its client, and answers them when it is told to. It
// discards what follows the byte 'x'.
type fragileServer struct {
	mu      sync.Mutex
	order   []byte // of the connections so far
	most    int    // at once
	waiting []net.Conn
	open    int
}

// serve starts a server at the page's address.
func (s *site) serve() *fragileServer {
	s.t.Helper()
	l, err := s.Downstream.Listen(netip.AddrPortFrom(backend, tcpPort))
	must(s.t, err)
	f := &fragileServer{}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { f.handle(c) })
		}
	})
	s.t.Cleanup(func() {
		l.Close()
		f.answer(1 << 30)
		all.Wait()
	})
	return f
}

func (f *fragileServer) handle(c net.Conn) {
	defer c.Close()
	tag := make([]byte, 1)
	if _, err := io.ReadFull(c, tag); err != nil {
		return
	}
	if tag[0] == 'x' {
		_, _ = io.Copy(io.Discard, c)
		return
	}
	f.mu.Lock()
	f.order = append(f.order, tag[0])
	f.waiting = append(f.waiting, c)
	f.open++
	f.most = max(f.most, f.open)
	f.mu.Unlock()
	_, _ = c.Read(tag) // until the client closes, after the answer
	f.mu.Lock()
	f.open--
	f.mu.Unlock()
}

// answer answers the oldest connections that wait for it.
func (f *fragileServer) answer(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n = min(n, len(f.waiting))
	for _, c := range f.waiting[:n] {
		_, _ = c.Write([]byte{1})
	}
	f.waiting = f.waiting[n:]
}

// arrived returns the clients of the connections so far, in their order.
func (f *fragileServer) arrived() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return string(f.order)
}

// awaitEnd waits until all connections have ended, at the program in front of it too.
func (f *fragileServer) awaitEnd(t *testing.T) {
	t.Helper()
	waitFor(t, "the end of all connections", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.open == 0
	})
	settle()
}

// maximum returns how many connections it had at once at most.
func (f *fragileServer) maximum() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.most
}

// calls are connections of one client.
type calls struct {
	mu                sync.Mutex
	answered, refused int
	sent              int // connections that have sent their tag
	all               sync.WaitGroup
}

// open opens n connections from an address, which end with the test at the latest.
func (s *site) open(from, to netip.Addr, n int, tag byte) *calls {
	all := &calls{}
	for range n {
		all.all.Go(func() {
			answered := s.call(from, to, tag, func() {
				all.mu.Lock()
				defer all.mu.Unlock()
				all.sent++
			})
			all.mu.Lock()
			defer all.mu.Unlock()
			if answered {
				all.answered++
			} else {
				all.refused++
			}
		})
	}
	s.t.Cleanup(all.all.Wait)
	return all
}

// call opens a connection, and waits for up to a minute until it is answered or closed.
func (s *site) call(from, to netip.Addr, tag byte, sent func()) (answered bool) {
	c, err := s.Client.Dial(context.Background(), from, netip.AddrPortFrom(to, tcpPort), patience)
	if err != nil {
		return false
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := c.Write([]byte{tag}); err != nil {
		return false
	}
	sent()
	_, err = io.ReadFull(c, make([]byte, 1))
	return err == nil
}

func (c *calls) ended() (answered, refused int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.answered, c.refused
}

// await waits until so many connections have been refused.
func (c *calls) await(t *testing.T, refused int) {
	t.Helper()
	waitFor(t, fmt.Sprint(refused, " refused connections"), func() bool { _, n := c.ended(); return n >= refused })
}

// awaitSent waits until so many connections have sent their tag.
func (c *calls) awaitSent(t *testing.T, n int) {
	t.Helper()
	waitFor(t, fmt.Sprint(n, " connections that have sent"), func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.sent >= n
	})
}

// An upload is what arrives at the server of a client that sends and pauses several times, and then sends for a while. The
// time between is no multiple of a second: what idle time earns depends on the phase where a program counts by the second.
type upload []lab.Event

const (
	uploads     = 4
	uploadEvery = 1300 * time.Millisecond
)

// upload sends through one connection as fast as it can.
func (s *site) upload(from, to netip.Addr) upload {
	s.t.Helper()
	c, err := s.Client.Dial(s.t.Context(), from, netip.AddrPortFrom(to, tcpPort), patience)
	must(s.t, err)
	defer c.Close()
	capture, err := s.Downstream.Capture(lab.DownstreamLink, lab.Filter{Port: tcpPort, Incoming: true}, 1<<17)
	must(s.t, err)
	defer capture.Close()
	data := bytes.Repeat([]byte{'x'}, 32<<10)
	must(s.t, c.SetWriteBuffer(64<<10)) // little is on its way when it pauses
	start := time.Now()
	for i := range uploads {
		time.Sleep(time.Until(start.Add(time.Duration(i) * uploadEvery)))
		span := 200 * time.Millisecond
		if i == uploads-1 {
			span = 1800 * time.Millisecond
		}
		must(s.t, c.SetDeadline(time.Now().Add(span)))
		for err == nil {
			_, err = c.Write(data)
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			s.t.Fatal(err)
		}
		err = nil
	}
	list, err := capture.Finish()
	must(s.t, err)
	return lab.Bytes(list)
}

// check checks the rate while the client sends, and how many bytes arrive beyond rate times time.
func (u upload) check(t *testing.T, rate float64, beyond [2]float64) {
	t.Helper()
	// Exactly a second, as nginx has a burst in each. A busy machine wakes shaperd late, which costs a part of the rate.
	mean := float64(lab.Total(lab.Between(u, 4600*time.Millisecond, 5600*time.Millisecond)))
	sigma := lab.Sigma(u, rate)
	if mean < 0.25*rate || mean > 1.15*rate {
		t.Errorf("%.0f bytes a second on average, want %.0f", mean, rate)
	}
	if sigma < beyond[0] || sigma > beyond[1] {
		t.Errorf("%.0f bytes beyond rate times time, want %.0f", sigma, beyond)
	}
	t.Logf("%.0f bytes a second, %.0f beyond rate times time", mean, sigma)
}

// replaceOnce replaces a text that must be there once.
func replaceOnce(t *testing.T, s, from, to string) string {
	t.Helper()
	if strings.Count(s, from) != 1 {
		t.Fatalf("%q is not there once", from)
	}
	return strings.Replace(s, from, to, 1)
}
