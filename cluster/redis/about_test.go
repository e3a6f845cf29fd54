package redis

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

func TestStore_About(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		sv := startServer(t, binary, "--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru")
		s := New(Options{URL: "redis://" + sv.address, Prefix: "shaperd", Group: "default"})
		defer s.Close()
		a, err := s.About(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if d := time.Since(a.Clock); d < -time.Second || d > time.Minute {
			t.Errorf("its clock is %v off", d)
		}
		a.Clock = time.Time{}
		name, version, _ := strings.Cut(a.Name, " ")
		if name != "Redis" && name != "Valkey" || version == "" {
			t.Errorf("its name is %q", a.Name)
		}
		if want := (About{Name: a.Name, MaxMemory: 50 << 20, Eviction: "allkeys-lru"}); a != want {
			t.Errorf("%+v, want %+v", a, want)
		}
		sv.kill()
		if _, err := s.About(t.Context()); err == nil {
			t.Error("a server that is gone answers")
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := s.About(ctx); err == nil {
			t.Error("no error of a context that has ended")
		}
	})
}

func TestParseAbout(t *testing.T) {
	clock := []any{"1764000000", "250000"}
	a, err := parseAbout(clock, "# Server\r\nredis_version:7.2.4\r\nvalkey_version:8.0.1\r\n", "maxmemory:0\r\nmaxmemory_policy:noeviction\r\n", "evicted_keys:7\r\n")
	if want := (About{Name: "Valkey 8.0.1", Clock: time.UnixMicro(1764000000250000), Eviction: "noeviction", Evicted: 7}); err != nil || a != want {
		t.Errorf("%+v, %v; want %+v", a, err, want)
	}
	for _, wrong := range []any{nil, "x", []any{}, []any{"1"}, []any{"x", "1"}, []any{"1", nil}, int64(1), serverError("ERR")} {
		if a, err := parseAbout(wrong, nil, int64(1), []any{}); !errors.Is(err, errProtocol) {
			t.Errorf("%v: %+v, %v", wrong, a, err)
		}
	}
}
