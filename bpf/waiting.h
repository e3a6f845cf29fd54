/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What waits in the queue of an interface, so that it never overflows: sch_fq drops what comes
 * when it is full, whoever filled it. A packet waits from now to its departure, so its
 * departure is known when it enters, and nobody has to say that it leaves.
 *
 * Who may enter is decided by a dynamic threshold (Choudhury and Hahne, "Dynamic queue length
 * thresholds for shared-memory packet switches", 1998): a key's share of the queue has to be
 * less than SHARE times the square of what share is left. So one key alone takes 78 to
 * 84 % of the queue, and n of them leave 1/sqrt(SHARE * n) of it. A key that holds
 * nothing enters as long as there is any room, and a key that has taken much waits until it
 * holds less: whoever makes the queue full is the one that is refused.
 *
 * What the interface holds is never less than what is true, and more by what left in the last
 * slots alone. What a key holds is up to twice what is true, and never less. */
#pragma once

#include "here.h"
#include "key.h"

#define QUEUES 512 /* a power of two */
#define SHARE 32
#define LEVELS 4
#define LEVEL_SLOTS 256
#define LEVEL_SHIFT(level) (24 + 6 * (level)) /* a slot is 2^this ticks: 0.26 ms, 17 ms, 1.1 s, 69 s */

struct waiting {
	__u64 packets;	      /* in all slots */
	__u64 passed[LEVELS]; /* the first slot that has not passed */
	__u64 refused;	      /* packets, for want of room */
	__u64 pad[2];
	__u32 slot[LEVELS][LEVEL_SLOTS]; /* packets, by departure: a level those that wait for less than its slots */
};

/* By the lower bits of ifindex and side: interfaces far apart may share a count. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, QUEUES);
	__type(key, __u32);
	__type(value, struct waiting);
} queued SEC(".maps");

/* What a key has waiting: by the place of its bucket in the table; then by limit, for those
 * that have no bucket. Two generations of packets: the newer one becomes the older when all
 * of that have left.
 *
 *	63..56   55..32                         31..16         15..0
 *	whose    when the older have left       older          newer, packets */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_STATES);
	__type(key, __u32);
	__type(value, __u64);
} holding SEC(".maps");

#define MOMENT_SHIFT 22 /* a moment is 2^22 ticks, 66 us; they are counted modulo 2^24, 18 minutes */
#define MOMENTS 0xffffffULL
#define MANY 0xffffULL

static __always_inline __u32 queue_of(const volatile struct __sk_buff *skb)
{
	return (interface_of(skb) << 1 | here.egress) & (QUEUES - 1);
}

/* Slots that are to be emptied. */
struct passing {
	__u64 first;
	__u64 packets; /* that were in them */
	__u32 queue;
	__u32 level;
};

static long pass_slot(__u32 i, struct passing *g)
{
	struct waiting *w = bpf_map_lookup_elem(&queued, &g->queue);

	if (!w)
		return 1;
	g->packets += __sync_lock_test_and_set(&w->slot[g->level % LEVELS][(g->first + i) % LEVEL_SLOTS], 0);
	return 0;
}

/* Empties the slots of a level from first up to next, unless another CPU does. */
__noinline int pass_slots(__u32 queue, __u32 level, __u64 first, __u64 next)
{
	struct passing g = { .first = first, .queue = queue, .level = level };
	struct waiting *w = bpf_map_lookup_elem(&queued, &queue);

	if (!w || __sync_val_compare_and_swap(&w->passed[level % LEVELS], first, next) != first)
		return 0;
	hide(g.packets);
	bpf_loop(next - first < LEVEL_SLOTS ? next - first : LEVEL_SLOTS, pass_slot, &g, 0);
	__sync_fetch_and_sub(&w->packets, g.packets);
	return 0;
}

/* What waits in a queue now. */
static __always_inline struct waiting *waiting_now(__u32 queue, __u64 now)
{
	struct waiting *w = bpf_map_lookup_elem(&queued, &queue);

	if (!w)
		return 0;
#pragma unroll
	for (int level = 0; level < LEVELS; level++) {
		__u64 first = load_word(&w->passed[level]), next = now >> LEVEL_SHIFT(level);

		if (first < next)
			pass_slots(queue, level, first, next);
	}
	return w;
}

/* When the scratch's packet leaves after all. */
static __always_inline __u64 leaves_at(const struct scratch *s)
{
	return time_max(s->decision.depart, time_max(s->opening.turn, s->opening.earliest * TICKS_PER_NANO));
}

/* Whether the scratch's packet goes to an interface's queue to wait there. */
static __always_inline int is_queued(const struct scratch *s)
{
	return here.mode == MODE_SHAPE && here.queue && !s->opening.observe && leaves_at(s) > load_word(&s->now);
}

/* The limit that has the scratch's packet wait, and the meter of which its key has a bucket
 * there; METERS where it has none. */
static __always_inline __u32 waits_for(const struct policy *p, const struct scratch *s, __u32 *meter)
{
	__u32 number = s->decision.limit % MAX_LIMITS;

	*meter = METERS;
	if (s->opening.turn > s->decision.depart || s->decision.reason == REASON_NEW) {
		*meter = METER_NEW;
		return s->opening.last % MAX_LIMITS;
	}
	if (s->decision.limit == NO_LIMIT) /* it is a SYN that comes again while the first one waits */
		return lowest(s->asked & p->counted) % MAX_LIMITS;
	if (!(p->calendars >> number & 1))
		*meter = s->charge[number].place[METER_BYTES] == NOWHERE ? METER_PACKETS : METER_BYTES;
	return number;
}

/* What the key of the scratch's packet holds under a limit, and in whose, of all keys that
 * have had that place. */
static __always_inline __u64 *holding_of(const struct policy *p, const struct scratch *s, __u32 number, __u32 meter,
					 __u64 *whose)
{
	const struct charge *c = &s->charge[number];
	__u32 i = p->bucket_lines * PLACES + p->limit[number].state;

	*whose = 0;
	if (meter < METERS && c->place[meter] != NOWHERE) {
		i = c->place[meter];
		*whose = c->hash[meter] & 0xff;
	}
	return bpf_map_lookup_elem(&holding, &i);
}

/* The longest that a packet is held, in moments. */
static __always_inline __u64 longest_held(const struct limit *l)
{
	return time_min(time_max(l->max_delay, l->max_wait) >> MOMENT_SHIFT, MOMENTS / 2) + 2;
}

/* What a key holds at a moment, by its word: in the lower half, as there. Says in next whether
 * it is time for another generation. */
static __always_inline __u64 held_at(__u64 word, __u64 whose, const struct limit *l, __u64 moment, int *next)
{
	__u64 left = (word >> 32) - moment & MOMENTS;

	*next = 1;
	if (word >> 56 != whose)
		return 0;
	if (!left || left > longest_held(l))
		return (word & MANY) << 16;
	*next = 0;
	return word & 0xffffffff;
}

/* Whether the queue has room for the scratch's packet. If not, the limit that has it wait
 * refuses it. */
__noinline int has_room(const struct policy *p, struct scratch *s)
{
	__u64 whose, packets, room, *word;
	struct waiting *w;
	__u32 number, meter;
	int next;

	if (!p || !s)
		return 0;
	w = waiting_now(s->queue, s->now);
	number = waits_for(p, s, &meter);
	word = holding_of(p, s, number, meter, &whose);
	if (!w || !word)
		return 0;
	packets = held_at(load_word(word), whose, &p->limit[number], s->now >> MOMENT_SHIFT, &next);
	packets = (packets >> 16) + (packets & MANY);
	room = time_sub(here.queue, load_word(&w->packets));
	if (packets * here.queue < SHARE * room * room)
		return 1;
	__sync_fetch_and_add(&w->refused, 1);
	refuse(&s->decision, number, REASON_QUEUE_FULL, leaves_at(s));
	return 0;
}

/* Adds the scratch's packet to what its key holds. */
static __always_inline void hold(const struct policy *p, const struct scratch *s)
{
	__u64 moment = s->now >> MOMENT_SHIFT, last = (leaves_at(s) >> MOMENT_SHIFT) + 1;
	__u32 meter, number = waits_for(p, s, &meter);
	const struct limit *l = &p->limit[number];
	__u64 whose, *word = holding_of(p, s, number, meter, &whose);

	if (!word)
		return;
	last = time_min(last, moment + longest_held(l)) & MOMENTS;
	for (int i = 0; i < 4; i++) {
		__u64 seen = load_word(word), held, to = seen;
		int next;

		held = held_at(seen, whose, l, moment, &next);
		if (next) /* all that were there leave before this one */
			to = whose << 56 | last << 32 | time_min((held >> 16) + 1, MANY) << 16;
		else if ((held & MANY) < MANY)
			to++;
		if (__sync_val_compare_and_swap(word, seen, to) == seen)
			return;
	}
}

/* Counts the scratch's packet until it leaves. */
__noinline int enter_queue(const struct policy *p, struct scratch *s)
{
	__u64 wait, slot;
	struct waiting *w;
	__u32 level, shift, *count;

	if (!p || !s)
		return 0;
	w = waiting_now(s->queue, s->now);
	if (!w)
		return 0;
	wait = leaves_at(s) - s->now;
	for (level = 0; level < LEVELS - 1; level++)
		if (wait >> LEVEL_SHIFT(level) < LEVEL_SLOTS - 2) /* one less, as another CPU's time may be behind */
			break;
	shift = LEVEL_SHIFT(level);
	slot = leaves_at(s) >> shift;
	count = &w->slot[level % LEVELS][slot % LEVEL_SLOTS];
	__sync_fetch_and_add(&w->packets, 1);
	__sync_fetch_and_add(count, 1);
	if (load_word(&w->passed[level % LEVELS]) > slot) /* which nobody empties any more */
		__sync_fetch_and_sub(&w->packets, (__u64)__sync_lock_test_and_set(count, 0));
	hold(p, s);
	return 0;
}
