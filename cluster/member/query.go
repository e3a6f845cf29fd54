package member

import (
	"context"
	"errors"

	"shaperd.dev/shaperd/cluster"
)

// query is what an operator wants of the store.
type query struct {
	ctx  context.Context
	ask  func(context.Context, Store)
	done chan struct{} // closed when it was asked
}

// errEnded is the error of a query to a member that has ended.
var errEnded = errors.New("this host has left the group")

// Snapshot returns what the ledger knows, see [cluster.Ledger.Snapshot]. It waits for at most one call to the
// store, and delays the next one by no more than the time for which a host waits for a reply.
func (m *Member) Snapshot(ctx context.Context, keys ...string) (cluster.Snapshot, error) {
	return ask(ctx, m, func(ctx context.Context, s Store) (cluster.Snapshot, error) { return s.Snapshot(ctx, keys...) })
}

// Forget tells the ledger that a host does not exist, see [cluster.Ledger.Forget].
func (m *Member) Forget(ctx context.Context, host string) (bool, error) {
	return ask(ctx, m, func(ctx context.Context, s Store) (bool, error) { return s.Forget(ctx, host) })
}

// ask asks the store, between two calls.
func ask[T any](ctx context.Context, m *Member, f func(context.Context, Store) (T, error)) (T, error) {
	var result, none T
	var err error
	q := query{ctx: ctx, done: make(chan struct{}), ask: func(ctx context.Context, s Store) { result, err = f(ctx, s) }}
	if !m.do(ctx, func() { m.queries = append(m.queries, q) }) {
		return none, endOf(ctx)
	}
	select {
	case <-q.done:
		return result, err
	case <-m.done:
		return none, errEnded
	case <-ctx.Done():
		return none, context.Cause(ctx)
	}
}

// endOf returns why a command was not run: ctx has ended, or otherwise the member.
func endOf(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errEnded
}

// startQuery asks the first of the queries.
func (m *Member) startQuery(ctx context.Context) {
	q := m.queries[0]
	m.queries = m.queries[1:]
	m.busy, m.queried = true, true
	store := m.Store
	go func() {
		asking, cancel := context.WithTimeout(q.ctx, m.Options.Host.Params.Timeout().Duration())
		defer cancel()
		defer context.AfterFunc(ctx, cancel)()
		q.ask(asking, store)
		m.outcomes <- func() { close(q.done) }
	}()
}

// Shares returns what this host may use now of buckets, by their names. It reports false if m or ctx has
// ended.
func (m *Member) Shares(ctx context.Context, names ...string) (shares []cluster.ShareStatus, ok bool) {
	found := make([]cluster.ShareStatus, len(names))
	ok = m.do(ctx, func() {
		now := m.Clock()
		for i, name := range names {
			found[i] = m.host.Share(name, now)
		}
	})
	return found, ok
}
