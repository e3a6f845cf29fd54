package peer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/internal/testutil"
)

// short has a timeout for calls that tests wait for: 250 ms.
var short = cluster.Params{Hosts: 4, Lease: cluster.Second, Step: cluster.Second}

func TestClient_KeepsItsConnection(t *testing.T) {
	a := newAuthority(t)
	for name, age := range map[string]time.Duration{"young": time.Hour, "old": 0} {
		b := defaultBounds
		b.age = age
		server := startServer(t, a.host("gw1"), b, "")
		r := newRelay(t, server.address)
		client, host := newClient(t, a.host("gw2"), r.address), newHost("gw2", params)
		for range 10 {
			if _, err := call(client, host); err != nil {
				t.Fatal(err)
			}
		}
		if accepted, _ := r.counts(); name == "young" && accepted != 1 || name == "old" && accepted != 10 {
			t.Errorf("10 calls use %d connections while these are %s", accepted, name)
		}
	}
}

func TestClient_FilesAreRenewed(t *testing.T) {
	a := newAuthority(t)
	b := defaultBounds
	b.age = 0
	server := startServer(t, a.host("gw1"), b, "")
	client, host := newClient(t, a.host("gw2", expired), server.address), newHost("gw2", params)
	mustFail(t, client, host, "expired certificate")
	a.host("gw2") // in the same files
	mustCall(t, client, host)

	a.host("gw1", expired)
	mustFail(t, client, host, "certificate has expired")
	server.SetFiles(a.host("gw3")) // in other ones
	mustCall(t, client, host)

	// Another authority takes the place of the first, in the same file.
	next := newAuthority(t)
	next.host("gw2")
	next.host("gw3")
	next.install(t, a, "ca.pem")
	mustFail(t, client, host, "unknown authority")
	next.install(t, a, "gw3.pem", "gw3.key")
	mustFail(t, client, host, "unknown certificate authority")
	next.install(t, a, "gw2.pem")
	mustFail(t, client, host, "private key does not match")
	next.install(t, a, "gw2.key")
	mustCall(t, client, host)
}

// TestClient_SlowServer has replies take longer than hosts wait.
func TestClient_SlowServer(t *testing.T) {
	a := newAuthority(t)
	server := startServer(t, a.host("gw1"), defaultBounds, "")
	r := newRelay(t, server.address)
	client, host := newClient(t, a.host("gw2"), r.address), newHost("gw2", short)
	testutil.WaitFor(t, "a call is answered", func() bool { _, err := call(client, host); return err == nil })
	r.set(func() { r.delay = 2 * time.Second })
	for range 8 {
		start := time.Now()
		_, err := call(client, host)
		if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took < 200*time.Millisecond || took > 10*time.Second {
			t.Errorf("after %v: %v; want a deadline", took, err)
		}
	}
	if accepted, _ := r.counts(); accepted > 10 {
		t.Errorf("8 calls use %d connections", accepted)
	}
	r.set(func() { r.delay = 0 })
	testutil.WaitFor(t, "a call is answered", func() bool {
		q := host.Request(0, nil)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		reply, err := client.Call(ctx, q)
		if err == nil && reply.N != q.N {
			t.Errorf("call %d got the reply to call %d", q.N, reply.N)
		}
		return err == nil
	})
}

// TestClient_HalfOpen has connections that deliver nothing any more.
func TestClient_HalfOpen(t *testing.T) {
	a := newAuthority(t)
	server := startServer(t, a.host("gw1"), defaultBounds, "")
	r := newRelay(t, server.address)
	client, host := newClient(t, a.host("gw2"), r.address), newHost("gw2", short)
	testutil.WaitFor(t, "a call is answered", func() bool { _, err := call(client, host); return err == nil })
	r.set(func() { r.stall = true })
	for range 3 {
		if _, err := call(client, host); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v; want a deadline", err)
		}
	}
	mustFail(t, client, host, "connect") // which says that there is no connection
	r.set(func() { r.stall = false })
	testutil.WaitFor(t, "a call is answered", func() bool { _, err := call(client, host); return err == nil })
}

// TestClient_ConnectionBreaks has the network reset connections between calls.
func TestClient_ConnectionBreaks(t *testing.T) {
	a := newAuthority(t)
	server := startServer(t, a.host("gw1"), defaultBounds, "")
	r := newRelay(t, server.address)
	client, host := newClient(t, a.host("gw2"), r.address), newHost("gw2", params)
	for range 20 {
		mustCall(t, client, host)
		r.cut()
		// One call may find out; the next one has a new connection.
		if _, err := call(client, host); err != nil {
			mustCall(t, client, host)
		}
	}
}

func TestClient_ServerIsKilled(t *testing.T) {
	a := newAuthority(t)
	a.host("gw1")
	address := freeAddress(t)
	server := exec.Command(os.Args[0])
	server.Env = append(os.Environ(), serverProcess+"="+filepath.Dir(a.CAFile)+" "+address)
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	}()
	r := newRelay(t, address)
	client, host := newClient(t, a.host("gw2"), r.address), newHost("gw2", params)
	testutil.WaitFor(t, "a call is answered", func() bool { _, err := call(client, host); return err == nil })

	if err := server.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	testutil.WaitFor(t, "the server stands still", func() bool { return standsStill(server.Process.Pid) })
	_, before := r.counts()
	result := make(chan error, 1)
	start := time.Now()
	go func() { _, err := call(client, host); result <- err }()
	testutil.WaitFor(t, "the call is on its way", func() bool { _, sent := r.counts(); return sent > before })
	if err := server.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// It fails when the connection ends, not when time is over.
	if err := <-result; err == nil || errors.Is(err, context.DeadlineExceeded) || time.Since(start) > patience/2 {
		t.Errorf("after %v: %v", time.Since(start), err)
	}
}

// standsStill reports whether all threads of a process have stopped: a signal takes effect some time after it was
// sent.
func standsStill(pid int) bool {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(threads) == 0 {
		return false
	}
	for _, thread := range threads {
		// The state follows the name, which is in parentheses.
		if text, err := os.ReadFile(thread); err != nil || !strings.Contains(string(text), ") T ") {
			return false
		}
	}
	return true
}

// TestClient_GoesOnAndReturns has the first of two servers stop, and start again.
func TestClient_GoesOnAndReturns(t *testing.T) {
	a := newAuthority(t)
	files := a.host("gw1")
	first, second := startServer(t, files, defaultBounds, ""), startServer(t, a.host("gw3"), defaultBounds, "")
	client := newClient(t, a.host("gw2"), first.address, second.address)
	client.choice.minimum, client.choice.leases = 0, 4
	p := cluster.Params{Hosts: 4, Lease: cluster.Second, Step: cluster.Second, Strict: true}
	host := newHost("gw2", p)
	hasCalled := func(s *testServer) func() bool {
		return func() bool {
			_, _ = call(client, host)
			shot, err := client.Snapshot(t.Context())
			return err == nil && len(shot.Hosts) == 1 && client.Server() == s.address
		}
	}
	testutil.WaitFor(t, "the first server is called", hasCalled(first))
	first.Close()
	testutil.WaitFor(t, "the second server is called", hasCalled(second))
	start := time.Now()
	first = startServer(t, files, defaultBounds, first.address)
	testutil.WaitFor(t, "the first server is called again", hasCalled(first))
	if took := time.Since(start); took < 4*time.Second {
		t.Errorf("the client returned after %v; want four leases", took)
	}
}

// failing is a ledger of which calls fail.
type failing struct{ ledger }

func (failing) Call(context.Context, *cluster.Request) (*cluster.Reply, error) {
	return nil, context.DeadlineExceeded
}

// answering is a ledger that answers, after something else.
type answering struct {
	ledger
	before func()
}

func (l answering) Call(_ context.Context, q *cluster.Request) (*cluster.Reply, error) {
	l.before()
	return &cluster.Reply{N: q.N, Start: q.Start, Epoch: 1}, nil
}

// The server that is said to have answered is not one that has been chosen meanwhile.
func TestClient_ServerThatHasAnswered(t *testing.T) {
	t.Parallel()
	c := &Client{addresses: []string{"first", "second"}, choice: newChoice(2, time.Now())}
	c.choice.choose(time.Now(), 1, false)
	c.ledgers = []ledger{failing{}, answering{before: func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.choice.minimum, c.choice.leases = 0, 0
		c.choice.pinged(time.Now(), 0, true)
	}}}
	if _, err := c.Call(t.Context(), &cluster.Request{Params: cluster.Params{Lease: cluster.Second}}); err != nil {
		t.Fatal(err)
	}
	if got := c.Server(); got != "second" {
		t.Errorf("%s is said to have answered", got)
	}
}
