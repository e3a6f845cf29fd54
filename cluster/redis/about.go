package redis

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"time"
)

// About is what a server says about itself, for operators.
type About struct {
	Name      string    // "Redis 7.0.15"
	Clock     time.Time // when it answered
	MaxMemory uint64    // bytes, from which on it evicts keys or refuses to write; 0 is no maximum
	Eviction  string    // which keys it evicts then; "noeviction" is none
	Evicted   uint64    // keys since it started
}

// About asks the server about itself.
func (s *Store) About(ctx context.Context) (About, error) {
	if s.mistake != nil {
		return About{}, s.mistake
	}
	select {
	case <-s.free:
		defer func() { s.free <- struct{}{} }()
	case <-ctx.Done():
		return About{}, context.Cause(ctx)
	}
	if err := s.ensure(ctx); err != nil {
		return About{}, err
	}
	address := s.conn.address
	replies, err := s.conn.do(ctx, []string{"TIME"}, []string{"INFO", "server"}, []string{"INFO", "memory"}, []string{"INFO", "stats"})
	if err != nil {
		s.fail()
		return About{}, fmt.Errorf("ask the store at %s: %w", address, err)
	}
	for _, reply := range replies {
		if e, refused := reply.(serverError); refused {
			return About{}, fmt.Errorf("ask the store at %s: %w", address, refusal(e))
		}
	}
	return parseAbout(replies[0], replies[1], replies[2], replies[3])
}

// parseAbout takes the replies to TIME and INFO.
func parseAbout(clock, server, memory, stats any) (About, error) {
	a := About{Name: "Redis " + infoField(server, "redis_version"), Eviction: infoField(memory, "maxmemory_policy")}
	if version := infoField(server, "valkey_version"); version != "" {
		a.Name = "Valkey " + version
	}
	words, _ := clock.([]any)
	if len(words) != 2 {
		return a, fmt.Errorf("%w: not a time", errProtocol)
	}
	seconds, err1 := strconv.ParseInt(fmt.Sprint(words[0]), 10, 64)
	micros, err2 := strconv.ParseInt(fmt.Sprint(words[1]), 10, 64)
	a.Clock = time.Unix(seconds, micros*1000)
	// Fields that a server does not have are 0.
	a.MaxMemory, _ = strconv.ParseUint(infoField(memory, "maxmemory"), 10, 64)
	a.Evicted, _ = strconv.ParseUint(infoField(stats, "evicted_keys"), 10, 64)
	if err := cmp.Or(err1, err2); err != nil {
		return a, fmt.Errorf("%w: not a time", errProtocol)
	}
	return a, nil
}
