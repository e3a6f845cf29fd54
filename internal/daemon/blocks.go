package daemon

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"shaperd.dev/shaperd/api"
)

// maxBlocks is the maximum number of prefixes that operators can block.
const maxBlocks = 100_000

// block blocks p for t. It never shortens an existing block: a script that blocks for ten minutes must not undo a
// permanent block. It reports whether it changes anything.
func (w *overrides) block(p netip.Prefix, t validity) bool {
	is, blocked := w.blocks[p]
	if blocked && (is.until.IsZero() || !t.until.IsZero() && !is.until.Before(t.until)) {
		return false
	}
	w.blocks[p] = t
	return true
}

// checkBlocks returns an error if too many prefixes are blocked.
func (w *overrides) checkBlocks() error {
	if n := len(w.blocks); n > maxBlocks {
		return &refusedError{fmt.Errorf("%d prefixes would be blocked, of at most %d", n, maxBlocks)}
	}
	return nil
}

// Block blocks a prefix, for d unless that is 0.
func (s *server) Block(ctx context.Context, p netip.Prefix, d time.Duration) error {
	return s.update(ctx, func(w *overrides) error {
		w.block(p, newValidity(d))
		return w.checkBlocks()
	}, "prefix blocked by operator", "prefix", p.String(), "until", endText(d, "it is unblocked"))
}

// Unblock removes a block.
func (s *server) Unblock(ctx context.Context, p netip.Prefix) error {
	return s.update(ctx, func(w *overrides) error {
		if _, ok := w.blocks[p]; !ok {
			return cmp.Or(s.errPenalized(p), w.errNotBlocked(p))
		}
		delete(w.blocks, p)
		return nil
	}, "prefix unblocked by operator", "prefix", p.String())
}

// ChangeBlocks removes the blocks of some prefixes, if there are any, and then blocks others for d, unless that is 0. With
// keepPermanent those without an end stay.
func (s *server) ChangeBlocks(ctx context.Context, block, unblock []netip.Prefix, d time.Duration, keepPermanent bool) (did api.BlockChanges, err error) {
	err = s.update(ctx, func(w *overrides) error {
		for _, p := range unblock {
			if t, ok := w.blocks[p]; ok && !(keepPermanent && t.end() == nil) {
				delete(w.blocks, p)
				did.Unblocked++
			}
		}
		t := newValidity(d)
		for _, p := range block {
			if w.block(p, t) {
				did.Blocked++
			}
		}
		did.Total = len(w.blocks)
		return w.checkBlocks()
	}, "blocks changed by operator", "block", somePrefixes(block), "unblock", somePrefixes(unblock), "until", endText(d, "they are unblocked"))
	return did, err
}

// maxNamed is how many prefixes somePrefixes names.
const maxNamed = 5

// somePrefixes names the first prefixes of a list for the log, and says how many there are more.
func somePrefixes(list []netip.Prefix) string {
	var names []string
	for _, p := range list[:min(len(list), maxNamed)] {
		names = append(names, p.String())
	}
	if more := len(list) - maxNamed; more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return cmp.Or(strings.Join(names, ", "), "none")
}

// errPenalized returns the error that p is blocked by a penalty, or nil.
func (s *server) errPenalized(p netip.Prefix) error {
	policy := s.shaper.Policy()
	for i := range policy.Penalties().All {
		name := policy.Limit(i).Name
		if block, blocked := s.proxy.PenaltyOf(name, p.Addr()); blocked && block.Source == p {
			return &notFoundError{fmt.Errorf("%v is blocked by the penalty of limit %q, not by an operator: use \"shaperd penalties end %v\"", p, name, p)}
		}
	}
	return nil
}

// errNotBlocked returns the error that p is not blocked. It names the block that covers p.
func (w *overrides) errNotBlocked(p netip.Prefix) error {
	for _, wider := range slices.SortedFunc(maps.Keys(w.blocks), netip.Prefix.Compare) {
		if wider.Bits() < p.Bits() && wider.Contains(p.Addr()) {
			return &notFoundError{fmt.Errorf("%v is covered by the block of %v: unblock that", p, wider)}
		}
	}
	return &notFoundError{fmt.Errorf("%v is not blocked", p)}
}
