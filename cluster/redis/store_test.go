package redis

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// try runs the script with no arguments but the run_id.
func try(t *testing.T, s *Store) (any, error) {
	t.Helper()
	start := time.Now()
	v, err := s.run(within(t, soon), []string{"key"}, nil)
	if took := time.Since(start); took > 4*soon {
		t.Errorf("a call that may take %v took %v", soon, took)
	}
	return v, err
}

// TestStore_AsksWhoAnswers checks that every connection begins with the question who answers, before anything else,
// and that its calls have the answer.
func TestStore_AsksWhoAnswers(t *testing.T) {
	var answers atomic.Int32
	f := startFake(t, evaluates(func(int) string {
		if answers.Add(1) == 3 {
			return "close"
		}
		return ":1\r\n"
	}))
	s := openStore(t, Options{URL: "redis://" + f.address, ClientName: "gw1"})
	for i := range 4 {
		v, err := try(t, s)
		if (err != nil) != (i == 2) {
			t.Errorf("call %d: %v, %v", i, v, err)
		}
	}
	var want strings.Builder
	for i, calls := range []int{3, 1} {
		for _, q := range []string{"INFO server", "INFO replication", "INFO cluster", "CLIENT SETNAME gw1"} {
			fmt.Fprintf(&want, "%d: %s\n", i+1, q)
		}
		for range calls {
			fmt.Fprintf(&want, "%d: EVALSHA %s 1 key run%d\n", i+1, ledgerSHA, i+1)
		}
	}
	if got := f.all() + "\n"; got != want.String() {
		t.Errorf("asked:\n%s\nwant:\n%s", got, want.String())
	}
}

// TestStore_RepeatsNothing has a server that fails a call in all ways: the script may have run, so it must not run
// again.
func TestStore_RepeatsNothing(t *testing.T) {
	for _, answer := range []string{
		"close", "-TRYAGAIN x\r\n", "-LOADING x\r\n", "-CLUSTERDOWN x\r\n", "-READONLY x\r\n", "-MASTERDOWN x\r\n", "-ASK 1 127.0.0.1:1\r\n", "-BUSY x\r\n",
		"-OOM x\r\n", "-ERR x\r\n", "-NOPERM x\r\n", "-MOVED x\r\n", "*1\r\n-x\r\n", "HTTP/1.1 400\r\n", "*99999999999\r\n",
	} {
		f := startFake(t, evaluates(func(int) string { return answer }))
		v, err := try(t, openStore(t, Options{URL: "redis://" + f.address}))
		if n := f.countAsked("EVALSHA"); err == nil || n != 1 {
			t.Errorf("%q: %v, %v, and the script was run %d times:\n%s", answer, v, err, n, f.all())
		} else if !strings.Contains(err.Error(), f.address) {
			t.Errorf("%q: an error without address: %v", answer, err)
		}
	}
}

// TestStore_WrongServer has a server that another one may take the place of: the next call is on a connection of its
// own.
func TestStore_WrongServer(t *testing.T) {
	for answer, conns := range map[string]int{
		"-READONLY x\r\n": 2, "-MASTERDOWN x\r\n": 2, "-CLUSTERDOWN x\r\n": 2, "-NOAUTH x\r\n": 2, "-NOPERM x\r\n": 2, "-TRYAGAIN x\r\n": 1, "-OOM x\r\n": 1,
	} {
		f := startFake(t, evaluates(func(int) string { return answer }))
		s := openStore(t, Options{URL: "redis://" + f.address})
		for range 2 {
			if _, err := try(t, s); err == nil {
				t.Errorf("%q: no error", answer)
			}
		}
		if int(f.conns.Load()) != conns {
			t.Errorf("%q: %d connections, want %d", answer, f.conns.Load(), conns)
		}
	}
}

// TestStore_LoadsScriptOnce has a server that forgets the script, and one that never has it.
func TestStore_LoadsScriptOnce(t *testing.T) {
	for _, forgetful := range []bool{false, true} {
		loads := 0
		f := startFake(t, func(conn int, command []string) string {
			switch {
			case command[0] == "SCRIPT":
				loads++
				return text(ledgerSHA)
			case command[0] == "EVALSHA" && (loads == 0 || forgetful):
				return "-NOSCRIPT No matching script. Please use EVAL.\r\n"
			}
			return likeRedis(conn, command)
		})
		v, err := try(t, openStore(t, Options{URL: "redis://" + f.address}))
		if (err != nil) != forgetful || loads != 1 || f.countAsked("EVALSHA") != 2 {
			t.Errorf("forgetful=%v: %v, %v, %d loads\n%s", forgetful, v, err, loads, f.all())
		}
	}
}

// TestStore_TimeoutCloses has a server that answers a call too late: its answer must not be taken for that to the
// next call.
func TestStore_TimeoutCloses(t *testing.T) {
	f := startFake(t, evaluates(func(conn int) string {
		if conn == 1 {
			return ""
		}
		return fmt.Sprintf(":%d\r\n", conn)
	}))
	s := openStore(t, Options{URL: "redis://" + f.address})
	if _, err := try(t, s); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the first call: %v", err)
	}
	select {
	case <-f.closed:
	case <-time.After(10 * time.Second):
		t.Error("the connection stays open")
	}
	if v, err := try(t, s); v != int64(2) || err != nil {
		t.Errorf("the next call: %v, %v", v, err)
	}
}

// TestStore_Canceled ends a call before its time.
func TestStore_Canceled(t *testing.T) {
	asked := make(chan struct{})
	f := startFake(t, evaluates(func(int) string { close(asked); return "" }))
	s := openStore(t, Options{URL: "redis://" + f.address})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	if _, err := s.run(ctx, nil, nil); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestStore_OneRequestAtATime has a second call wait for the first one.
func TestStore_OneRequestAtATime(t *testing.T) {
	asked, answer := make(chan struct{}, 2), make(chan string)
	f := startFake(t, evaluates(func(int) string { asked <- struct{}{}; return <-answer }))
	s := openStore(t, Options{URL: "redis://" + f.address})
	done := make(chan any)
	call := func() {
		v, err := s.run(within(t, 20*time.Second), nil, nil)
		done <- []any{v, err}
	}
	go call()
	<-asked
	if v, err := try(t, s); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("while another call is on its way: %v, %v", v, err)
	}
	go call()
	answer <- ":1\r\n"
	first := <-done
	<-asked
	answer <- ":2\r\n"
	second := <-done
	if got := fmt.Sprint(first, second); got != "[1 <nil>] [2 <nil>]" {
		t.Error(got)
	}
}

// TestStore_ReplyToNothing has a server that answers twice.
func TestStore_ReplyToNothing(t *testing.T) {
	f := startFake(t, evaluates(func(conn int) string { return fmt.Sprintf(":%d\r\n:-7\r\n", conn) }))
	s := openStore(t, Options{URL: "redis://" + f.address})
	for range 4 {
		if v, _ := try(t, s); v == int64(-7) {
			t.Error("took an answer to another call")
		}
	}
}

// TestStore_SilentAtConnect has a server that accepts connections and says nothing.
func TestStore_SilentAtConnect(t *testing.T) {
	f := startFake(t, func(int, []string) string { return "" })
	s := openStore(t, Options{URL: "redis://" + f.address})
	for range 2 {
		if _, err := try(t, s); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), f.address) {
			t.Error(err)
		}
	}
	if f.conns.Load() != 2 {
		t.Errorf("%d connections", f.conns.Load())
	}
}

// TestStore_Identity has servers that do not say who they are, or are not masters.
func TestStore_Identity(t *testing.T) {
	for what, say := range map[string]func(string) string{
		"no run_id": func(q string) string {
			if q == "server" {
				return text("redis_version:7\r\nrun_id:\r\n")
			}
			return ""
		},
		"replica": func(q string) string {
			if q == "replication" {
				return text("role:slave\r\n")
			}
			return ""
		},
		"refused": func(string) string { return "-NOPERM no permissions to run the 'info' command\r\n" },
		"number":  func(string) string { return ":1\r\n" },
	} {
		f := startFake(t, func(conn int, command []string) string {
			if command[0] == "INFO" {
				if a := say(command[1]); a != "" {
					return a
				}
			}
			return likeRedis(conn, command)
		})
		if _, err := try(t, openStore(t, Options{URL: "redis://" + f.address})); err == nil || f.countAsked("EVALSHA") > 0 {
			t.Errorf("%s: %v\n%s", what, err, f.all())
		}
	}
}

// TestStore_Moved has a node of a cluster that names another one, and two that name each other.
func TestStore_Moved(t *testing.T) {
	right := startFake(t, evaluates(func(int) string { return ":7\r\n" }))
	wrong := startFake(t, evaluates(func(int) string { return "-MOVED 42 " + right.address + "\r\n" }))
	s := openStore(t, Options{URL: "redis+cluster://" + wrong.address})
	for range 3 {
		if v, err := try(t, s); v != int64(7) || err != nil {
			t.Errorf("%v, %v", v, err)
		}
	}
	if wrong.countAsked("EVALSHA") != 1 || right.conns.Load() != 1 {
		t.Errorf("asked the first node:\n%s\nthe other:\n%s", wrong.all(), right.all())
	}

	var b *fake
	a := startFake(t, evaluates(func(int) string { return "-MOVED 42 " + b.address + "\r\n" }))
	b = startFake(t, evaluates(func(int) string { return "-MOVED 42 " + a.address + "\r\n" }))
	if _, err := try(t, openStore(t, Options{URL: "redis+cluster://" + a.address})); err == nil || a.countAsked("EVALSHA")+b.countAsked("EVALSHA") > 3 {
		t.Errorf("%v\n%s\n%s", err, a.all(), b.all())
	}
}

// TestStore_ClusterSeeds has a cluster of which the first node in the list is away.
func TestStore_ClusterSeeds(t *testing.T) {
	f := startFake(t, likeRedis)
	s := openStore(t, Options{URL: "redis+cluster://127.0.0.1:1," + f.address})
	if _, err := try(t, s); err == nil {
		t.Error("a call to a node that is away")
	}
	if v, err := try(t, s); v != int64(1) || err != nil {
		t.Errorf("%v, %v", v, err)
	}
}

func TestMovedTo(t *testing.T) {
	for text, want := range map[string]string{
		"MOVED 3999 127.0.0.1:6381": "127.0.0.1:6381",
		"MOVED 3999 ::1:6381":       "[::1]:6381",
		"MOVED 3999 [::1]:6381":     "[::1]:6381",
		"MOVED 3999 node-b:6381":    "node-b:6381",
		"MOVED 3999 :6381":          "10.0.0.7:6381",
		"MOVED 3999":                "",
		"MOVED 3999 x":              "",
		"MOVED":                     "",
	} {
		if got := movedTo(serverError(text), "10.0.0.7:6379"); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
