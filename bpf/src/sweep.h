/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The sweep timer: it checks all connections in turn, and ends those that have timed out. */
#pragma once

#include "conntrack.h"

/* Whether the handshake of a lapsed connection is overdue. Not true for long, so that it is
 * recorded a few times at most. */
static __always_inline int handshake_overdue(const struct conn *ct, __u64 state, __u64 now)
{
	__s64 silent = now - read_once(&ct->last_seen);

	return is_lapsed(state) && !(state & ESTABLISHED) && silent >= (__s64)half_open_timeout &&
	       silent < 3 * (__s64)half_open_timeout;
}

/* Whether to drop a lapsed connection early, as the table is nearly full. */
static __always_inline int early_drop(const struct sweeper *sweeper, const struct conn *ct, __u64 state, __u64 now)
{
	if (sweeper->connections <= early_drop_threshold || !is_lapsed(state) || state & ESTABLISHED ||
	    (__s64)(now - read_once(&ct->last_seen)) < (__s64)recheck_interval)
		return 0;
	return 1;
}

/* Forgets a lapsed connection, whose handshake may still be completed. */
static __always_inline void forget_conn(const struct conn *ct, const struct tuple *t, __u64 now)
{
	start_deferral(ct, now);
	if (ct->slot[0]) /* it needs slots */
		mark_forgotten(t, now);
}

/* Checks the connection at the front of the queue. Returns 1 if it is not due. */
__noinline int sweep_one(__u64 now)
{
	struct sweeper *sweeper = get_sweeper();
	struct conn *ct;
	struct sweep_entry entry;
	__u64 state;
	int drop;

	if (!sweeper || bpf_map_peek_elem(&sweep_queue, &entry) || (__s64)(entry.sweep_at - now) > 0)
		return 1;
	bpf_map_pop_elem(&sweep_queue, &entry);
	ct = bpf_map_lookup_elem(&connections, &entry.tuple);
	if (!ct || read_once(&ct->sweep_at) != entry.sweep_at)
		return 0;
	state = read_once(&ct->state);
	drop = early_drop(sweeper, ct, state, now);
	if (drop || timed_out(ct, entry.tuple.attach_id, state, now)) {
		if (!(state & CLOSED)) {
			close_conn(ct, state, EXPIRED, now);
		} else if (!(state & LOCKED) &&
			   __sync_val_compare_and_swap(&ct->state, state, state | LOCKED) == state) {
			if (drop)
				forget_conn(ct, &entry.tuple, now);
			if (!bpf_map_delete_elem(&connections, &entry.tuple)) {
				__sync_fetch_and_add(&sweeper->connections, -1);
				return 0;
			}
			ct->state = state; /* EBUSY, before Linux 6.7: the next sweep deletes it */
		}
	}
	if (handshake_overdue(ct, state, now))
		start_deferral(ct, now);
	entry.sweep_at = now + recheck_interval;
	ct->sweep_at = entry.sweep_at;
	bpf_map_push_elem(&sweep_queue, &entry, 0); /* room was just made */
	return 0;
}

static long sweep_next(__u32 i, void *now)
{
	__u64 done = sweep_one(*(__u64 *)now);

	barrier_var(done);
	return done & 1;
}

static int sweep(void *map, __u32 *key, struct sweeper *sweeper)
{
	__u64 now = now_ns();
	long n = bpf_loop(SWEEP_BATCH, sweep_next, &now, 0);

	bpf_timer_start(&sweeper->timer, n < SWEEP_BATCH ? sweep_interval : SWEEP_BUSY_INTERVAL, 0);
	return 0;
}

/* Starts the timer, or makes a running one use this program. The map and the program outlive the
 * daemon, and so does the timer. Returns 0 or an error: the kernel may be out of memory for it,
 * Linux 6.18 for a millisecond. */
static __always_inline int start_sweeper(void)
{
	struct sweeper *sweeper = get_sweeper();
	int err;

	if (!sweeper)
		return -1;
	err = bpf_timer_init(&sweeper->timer, &sweepers, 1 /* CLOCK_MONOTONIC */);
	if (err && err != -16 /* EBUSY: exists */)
		return err;
	err = bpf_timer_set_callback(&sweeper->timer, sweep);
	return err ? err : bpf_timer_start(&sweeper->timer, sweep_interval, 0);
}
