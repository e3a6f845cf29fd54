/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What limits have done, for metrics and logs. */
#pragma once

#include "scratch.h"

#define WAITS 16 /* bounds of shaper.HistogramBounds */

/* What a limit has done, on one CPU. */
struct state {
	__u64 taken[2][2];	/* at once, later: bytes, packets */
	__u64 refused[2];	/* queue full, or by a limit that blocks: bytes, packets */
	__u64 memory_full[2];	/* no place in the table: bytes, packets */
	__u64 marked;		/* packets */
	__u64 wait[WAITS + 1];	/* packets by class of wait, the last one beyond all bounds */
	__u64 waited;		/* ns */
	__u64 connections[2];	/* let through: at once, later */
	__u64 over_connections; /* refused: SYNs */
	__u64 over_new;
	__u64 connections_memory_full;
	__u64 adopted;		  /* taken in, as they were there before */
	__u64 in_flight;	  /* slots taken less those given back here, maybe below 0 */
	__u64 opening[WAITS + 1]; /* connections held back, by class of wait */
	__u64 opened;		  /* waited, ns */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MAX_STATES);
	__type(key, __u32);
	__type(value, struct state);
} states SEC(".maps");

static __always_inline struct state *state_of(const struct limit *l)
{
	__u32 i = l->state;

	return bpf_map_lookup_elem(&states, &i);
}

static __always_inline void count_in_flight(__u32 number, __u64 n)
{
	struct state *s = bpf_map_lookup_elem(&states, &number);

	if (s) /* a packet may come while shaperd_uncount is at it */
		__sync_fetch_and_add(&s->in_flight, n);
}

static __always_inline void count_wait(__u64 *classes, __u64 *sum, __u64 ticks)
{
	/* shaper.HistogramBounds, in ns. */
	static const __u64 bounds[WAITS] = {
		100000,	  250000,    500000,	1000000,   2500000,    5000000,	   10000000,   25000000,
		50000000, 100000000, 250000000, 500000000, 1000000000, 2500000000, 5000000000, 10000000000,
	};
	__u64 wait = (ticks + TICKS_PER_NANO - 1) / TICKS_PER_NANO;
	__u64 class = 0;

#pragma unroll
	for (int i = 0; i < WAITS; i++)
		class += (bounds[i] - wait) >> 63; /* without a branch: 16 of them make 65,536 paths */
	hide(class);
	if (class <= WAITS)
		classes[class]++;
	*sum += wait;
}

static __always_inline void refuse(struct decision *d, __u32 limit, __u32 reason, __u64 depart)
{
	d->verdict = VERDICT_REFUSE;
	d->reason = reason;
	d->limit = limit;
	d->depart = depart;
}

/* Refuses a packet when limits are left over. Then the policy is newer than the program,
 * which was loaded for fewer, and is replaced in a moment. */
static __always_inline int exceeded(struct scratch *s, __u64 left)
{
	if (left)
		refuse(&s->decision, lowest(left), REASON_MEMORY_FULL, s->now);
	return !!left;
}

/* Counts a packet that a limit refused. */
__noinline int count_refused(const struct policy *p, const struct scratch *s)
{
	struct state *to;

	if (!p || !s)
		return 0;
	to = state_of(&p->limit[s->decision.limit % MAX_LIMITS]);
	if (!to)
		return 0;
	if (s->decision.reason == REASON_CONNECTIONS) {
		to->over_connections++;
	} else if (s->decision.reason == REASON_NEW) {
		to->over_new++;
	} else if (s->decision.reason == REASON_QUEUE_FULL || s->decision.reason == REASON_BLOCKED) {
		to->refused[0] += s->parser.packet.bytes;
		to->refused[1] += s->parser.packet.segments;
	} else if (s->opening.refused) {
		to->connections_memory_full++;
	} else {
		to->memory_full[0] += s->parser.packet.bytes;
		to->memory_full[1] += s->parser.packet.segments;
	}
	return 0;
}

/* What a limit took of the scratch's packet, now or later. */
static __always_inline void count(const struct limit *l, const struct scratch *s, int later, __u64 n)
{
	struct state *to = state_of(l);

	if (!to)
		return;
	to->taken[later][0] += n * s->parser.packet.bytes;
	to->taken[later][1] += n * s->parser.packet.segments;
}

/* Counts a packet at once under the limits of set, which charge nothing for it. */
__noinline int count_free(const struct policy *p, const struct scratch *s, __u64 set)
{
	if (!p || !s)
		return 0;
	for (int i = 0; i < here.limits && set; i++, set &= set - 1)
		count(&p->limit[lowest(set) % MAX_LIMITS], s, 0, 1);
	return 0;
}

/* Marks a packet that its limit delays for longer than it says, if it may be marked,
 * and counts the delay: under the one limit that delays it longest. */
__noinline int delayed(const struct policy *p, struct scratch *s, __u64 ticks)
{
	const struct limit *l;
	struct state *to;

	if (!p || !s)
		return 0;
	l = &p->limit[s->decision.limit % MAX_LIMITS];
	s->decision.mark = !s->opening.observe && ticks > l->mark_delay && markable(&s->parser);
	to = state_of(l);
	if (!to)
		return 0;
	if (s->decision.mark)
		to->marked += s->parser.packet.segments;
	if (here.mode != MODE_POLICE)
		count_wait(to->wait, &to->waited, ticks);
	return 0;
}

/* Counts a connection that the limits of set let through, at once or later. */
__noinline int count_opened(const struct policy *p, const struct scratch *s, __u64 set)
{
	struct state *to;

	if (!p || !s)
		return 0;
	for (int i = 0; i < here.limits && set; i++, set &= set - 1) {
		__u32 number = lowest(set) % MAX_LIMITS;

		to = state_of(&p->limit[number]);
		if (!to)
			return 0;
		to->connections[s->opening.waits >> number & 1]++;
	}
	/* The one that holds it back longest knows for how long. */
	if (s->opening.waits && s->decision.reason == REASON_NEW) {
		to = state_of(&p->limit[s->decision.limit % MAX_LIMITS]);
		if (to)
			count_wait(to->opening, &to->opened, s->decision.depart - s->now);
	}
	return 0;
}
