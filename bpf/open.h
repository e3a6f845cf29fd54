/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Enters connections in the map. */
#pragma once

#include "conns.h"

enum opened {
	OPENED,
	OPEN_ALREADY,
	OPEN_FAILED,
};

/* Enters the connection in the place of one with the same tuple that is closed. */
static __always_inline int open_again(const struct opening *o, const struct tuple *t)
{
	struct flight *f = bpf_map_lookup_elem(&connections, t);
	__u64 word, is = o->flight.word;

	if (!f)
		return OPEN_FAILED;
	word = load_word(&f->word);
	if (!(word & CLOSED))
		return OPEN_ALREADY;
	if (word & LOCKED || __sync_val_compare_and_swap(&f->word, word, word | LOCKED) != word)
		return OPEN_FAILED;
	f->seen = o->flight.seen;
	f->via = o->flight.via;
	f->hops = o->flight.hops;
	f->heard = o->flight.heard;
	f->interface = o->flight.interface;
	f->idle = o->flight.idle;
#pragma unroll
	for (int i = 0; i < MAX_HELD; i++) {
		f->slot[i] = o->flight.slot[i];
		f->slot_place[i] = o->flight.slot_place[i];
	}
	f->next[0] = o->flight.next[0];
	f->fin[0] = o->flight.fin[0];
	if (lapsed(word) && word & ~is & SYN_OF << 1) {
		/* The responder may still have what it answered to an earlier SYN. */
		is |= SYN_OF << 1;
	} else {
		f->next[1] = o->flight.next[1];
		f->ack[0] = o->flight.ack[0];
		f->ack[1] = o->flight.ack[1];
	}
	return __sync_val_compare_and_swap(&f->word, word | LOCKED, is) == (word | LOCKED) ? OPENED : OPEN_FAILED;
}

/* Before Linux 6.5 what goes into a map may not be in what an argument points to, and
 * for the stack it is too large. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct flight);
} staging SEC(".maps");

/* Enters the connection in the map, with the slots that were taken for it. */
__noinline int open_connection(struct opening *o, __u64 flags, __u64 now, __u64 depart)
{
	struct turn turn = {};
	struct keeper *keeper = the_keeper();
	struct flight *staged;
	__u32 zero = 0;
	int err; /* Linux 6.1 leaves the upper half of it undefined */

	if (!o || !keeper)
		return OPEN_FAILED;
	o->flight.word = flight_hash(&o->tuple) | (__u32)(now << BEGAN_SHIFT) | flags;
	o->flight.seen = depart;
	o->flight.check = now + turn_interval;
	o->flight.idle = here.idle_timeout;
#pragma unroll
	for (__u32 i = 0; i < MAX_HELD; i++) {
		if (i >= o->held) {
			o->flight.slot_place[i] = NOWHERE;
			o->flight.slot[i] = 0;
		}
	}
	turn.tuple = o->tuple;
	staged = bpf_map_lookup_elem(&staging, &zero);
	if (!staged)
		return OPEN_FAILED;
	*staged = o->flight;
	err = bpf_map_update_elem(&connections, &turn.tuple, staged, BPF_NOEXIST);
	if (err)
		return err == -17 /* EEXIST */ ? open_again(o, &turn.tuple) : OPEN_FAILED;
	__sync_fetch_and_add(&keeper->connections, 1);
	turn.check = o->flight.check;
	if (!bpf_map_push_elem(&turns, &turn, 0))
		return OPENED;
	/* It would never end. This cannot be: there is a turn for each. */
	bpf_map_delete_elem(&connections, &turn.tuple);
	__sync_fetch_and_add(&keeper->connections, -1);
	return OPEN_FAILED;
}
