/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The timer that looks at all connections in turn, and ends those that were silent for too
 * long. */
#pragma once

#include "conns.h"

/* Whether a connection without slots waits for the end of its handshake for too long, and not
 * for so long that this was noted several times. */
static __always_inline int overlong(const struct flight *f, __u64 word, __u64 now)
{
	__s64 silent = now - load_word(&f->seen);

	return lapsed(word) && !(word & ESTABLISHED) && silent >= (__s64)half_open && silent < 3 * (__s64)half_open;
}

/* Whether a connection is to make room in a table that is crowded. */
static __always_inline int makes_room(const struct keeper *k, const struct flight *f, __u64 word, __u64 now)
{
	if (k->connections <= crowd || !lapsed(word) || word & ESTABLISHED ||
	    (__s64)(now - load_word(&f->seen)) < (__s64)turn_interval)
		return 0;
	return 1;
}

/* Forgets a connection without slots, whose handshake may still be completed. */
static __always_inline void forget_flight(const struct flight *f, const struct tuple *t, __u64 now)
{
	suspect(f, now);
	if (f->slot[0]) /* it needs some */
		forget(t, now);
}

/* Looks at the connection that is first in the queue, if it is its turn. Returns
 * whether it is not. */
__noinline int sweep_one(__u64 now)
{
	struct keeper *k = the_keeper();
	struct flight *f;
	struct turn turn;
	__u64 word;
	int crowds;

	if (!k || bpf_map_peek_elem(&turns, &turn) || (__s64)(turn.check - now) > 0)
		return 1;
	bpf_map_pop_elem(&turns, &turn);
	f = bpf_map_lookup_elem(&connections, &turn.tuple);
	if (!f || load_word(&f->check) != turn.check)
		return 0;
	word = load_word(&f->word);
	crowds = makes_room(k, f, word, now);
	if (crowds || overdue(f, turn.tuple.place, word, now)) {
		if (!(word & CLOSED)) {
			close_flight(f, word, EXPIRED, now);
		} else if (!(word & LOCKED) && __sync_val_compare_and_swap(&f->word, word, word | LOCKED) == word) {
			if (crowds)
				forget_flight(f, &turn.tuple, now);
			if (!bpf_map_delete_elem(&connections, &turn.tuple)) {
				__sync_fetch_and_add(&k->connections, -1);
				return 0;
			}
			f->word = word; /* EBUSY, before Linux 6.7: it is deleted the next time */
		}
	}
	if (overlong(f, word, now))
		suspect(f, now);
	turn.check = now + turn_interval;
	f->check = turn.check;
	bpf_map_push_elem(&turns, &turn, 0); /* where it has just been */
	return 0;
}

static long sweep_next(__u32 i, void *now)
{
	__u64 done = sweep_one(*(__u64 *)now);

	hide(done);
	return done & 1;
}

static int sweep(void *map, __u32 *key, struct keeper *k)
{
	__u64 now = clock_ns();
	long n = bpf_loop(SWEEP_MOST, sweep_next, &now, 0);

	bpf_timer_start(&k->timer, n < SWEEP_MOST ? sweep_interval : SWEEP_SOON, 0);
	return 0;
}

/* Starts the timer, or has the one that runs go on by this program. The map and the program
 * live on without the daemon, and so does the timer. Returns 0, or an error: the kernel may have
 * no memory for it just now, Linux 6.18 for a millisecond. */
static __always_inline int start_sweeper(void)
{
	struct keeper *k = the_keeper();
	int err;

	if (!k)
		return -1;
	err = bpf_timer_init(&k->timer, &keepers, 1 /* CLOCK_MONOTONIC */);
	if (err && err != -16 /* EBUSY: it is there */)
		return err;
	err = bpf_timer_set_callback(&k->timer, sweep);
	return err ? err : bpf_timer_start(&k->timer, sweep_interval, 0);
}
