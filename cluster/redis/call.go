package redis

import (
	"context"
	"crypto/sha1" // by which Redis names scripts
	"embed"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"shaperd.dev/shaperd/cluster"
)

//go:embed lua/*.lua
var scripts embed.FS

// ledgerScript is the ledger in Lua: one script, of files in the order of their names.
var ledgerScript = func() string {
	var script strings.Builder
	files, _ := scripts.ReadDir("lua")
	for _, f := range files {
		text, _ := scripts.ReadFile("lua/" + f.Name())
		script.Write(text)
	}
	return script.String()
}()

var ledgerSHA = func() string {
	sum := sha1.Sum([]byte(ledgerScript))
	return hex.EncodeToString(sum[:])
}()

// maxNumber bounds the numbers in replies: the script computes in floating point.
const maxNumber = 1 << 52

// keys returns the keys of the ledger, which are in one slot.
func (t *target) keys() []string {
	tag := "{" + t.Prefix + ":" + t.Group + "}:"
	return []string{tag + "state", tag + "buckets", tag + "hot", tag + "cold", tag + "marks"}
}

// Call makes a call to the ledger. ctx bounds it, with the time to connect; it should have a deadline. After
// an error, the call may have been processed or may yet be.
func (s *Store) Call(ctx context.Context, q *cluster.Request) (*cluster.Reply, error) {
	return s.callAt(ctx, "", q)
}

// callAt makes a call at a time of the ledger's clock, in microseconds, or at the server's time if that is "".
func (s *Store) callAt(ctx context.Context, now string, q *cluster.Request) (*cluster.Reply, error) {
	if err := q.Validate(); err != nil {
		return nil, fmt.Errorf("call of the ledger: %w", err)
	}
	v, err := s.run(ctx, s.target.keys(), requestArgs(now, q))
	if err != nil {
		return nil, err
	}
	r, err := parseReply(v)
	if err != nil {
		return nil, fmt.Errorf("ask the store: %w", err)
	}
	return r, nil
}

// requestArgs returns the arguments of the script for a call.
func requestArgs(now string, q *cluster.Request) []string {
	args := make([]string, 0, 25+3*len(q.Gone)+6*len(q.Items))
	number := func(ns ...int64) {
		for _, n := range ns {
			args = append(args, strconv.FormatInt(n, 10))
		}
	}
	flag := func(bs ...bool) {
		for _, b := range bs {
			if b {
				args = append(args, "1")
			} else {
				args = append(args, "")
			}
		}
	}
	args = append(args, "call", now)
	number(int64(q.Params.Hosts), int64(q.Params.Lease), int64(q.Params.Step))
	flag(q.Params.Strict)
	args = append(args, q.Host)
	number(q.Start, q.N, q.Got, int64(q.GotAge), q.Epoch)
	flag(q.Leased, q.Claim, q.More, q.Over, q.Left, q.Leave)
	number(q.Known)
	flag(q.Told)
	args = append(args, strconv.FormatUint(q.Digest, 16), q.Info)
	number(int64(len(q.Gone)))
	for _, g := range q.Gone {
		args = append(args, g.Host)
		number(g.Start, g.N)
	}
	number(int64(len(q.Items)))
	for i := range q.Items {
		it := &q.Items[i]
		args = append(args, it.Key)
		number(it.Has, it.Want, it.Weight, int64(it.Every), int64(it.Burst))
	}
	return args
}
