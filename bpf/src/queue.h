/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Admission to an interface's queue, so that it never overflows: sch_fq, when full, drops any
 * packet that comes, whichever key filled it. A packet's departure is known when it is enqueued,
 * so it is counted until then, and needs no dequeue hook.
 *
 * A dynamic threshold decides (Choudhury and Hahne, "Dynamic queue length thresholds for
 * shared-memory packet switches", 1998): a key's share of the queue has to be less than
 * THRESHOLD_ALPHA times the square of the free share. So a single key takes at most 78 to 84 % of
 * the queue, and n of them leave 1/sqrt(THRESHOLD_ALPHA * n) of it. A key without packets is
 * admitted as long as there is any room, and one with many is refused until it has fewer: the keys
 * that fill the queue are the ones that are refused.
 *
 * The count of an interface is never too low, and too high only by the departures in the current
 * slots. The count of a key is never too low, and at most twice too high. */
#pragma once

#include "config.h"
#include "key.h"

#define QUEUES 512 /* a power of two */
#define THRESHOLD_ALPHA 32
#define LEVELS 4
#define LEVEL_SLOTS 256
#define LEVEL_SHIFT(level) (24 + 6 * (level)) /* a slot is 2^this ticks: 0.26 ms, 17 ms, 1.1 s, 69 s */

struct queue {
	__u64 packets;		 /* in all slots */
	__u64 next_slot[LEVELS]; /* the first slot that has not been cleared */
	__u64 refused;		 /* packets, for lack of room */
	__u64 pad[2];
	__u32 slot[LEVELS][LEVEL_SLOTS]; /* packets by departure; short waits are in low levels */
};

/* By the low bits of ifindex and direction: distant interfaces may share a count. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, QUEUES);
	__type(key, __u32);
	__type(value, struct queue);
} queue_counts SEC(".maps");

/* The packets of a key in a queue: by the index of its bucket, then by limit ID for keys without
 * one, and for hot buckets. There are two generations: the new one becomes the old one when all packets of that have
 * left.
 *
 *	63..56   55..32                         31..16         15..0
 *	owner    when the old ones have left    old            new, packets */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_LIMIT_IDS + HOT_LINES * HOT_TAGS);
	__type(key, __u32);
	__type(value, __u64);
} key_queued SEC(".maps");

#define QTIME_SHIFT 22 /* times here are in 2^22 ticks, 66 us, modulo 2^24: 18 minutes */
#define QTIME_MASK 0xffffffULL
#define KEY_COUNT_MAX 0xffffULL

static __always_inline __u32 queue_of(const volatile struct __sk_buff *skb)
{
	return (ifindex_of(skb) << 1 | cfg.egress) & (QUEUES - 1);
}

/* The state of clearing a range of slots. */
struct slot_clear {
	__u64 first;
	__u64 packets; /* found in them */
	__u32 queue;
	__u32 level;
};

static long clear_slot(__u32 i, struct slot_clear *range)
{
	struct queue *q = bpf_map_lookup_elem(&queue_counts, &range->queue);

	if (!q)
		return 1;
	range->packets +=
		__sync_lock_test_and_set(&q->slot[range->level % LEVELS][(range->first + i) % LEVEL_SLOTS], 0);
	return 0;
}

/* Clears the slots of a level from first to next, unless another CPU does. */
__noinline int clear_slots(__u32 queue, __u32 level, __u64 first, __u64 next)
{
	struct slot_clear range = { .first = first, .queue = queue, .level = level };
	struct queue *q = bpf_map_lookup_elem(&queue_counts, &queue);

	if (!q || __sync_val_compare_and_swap(&q->next_slot[level % LEVELS], first, next) != first)
		return 0;
	barrier_var(range.packets);
	bpf_loop(next - first < LEVEL_SLOTS ? next - first : LEVEL_SLOTS, clear_slot, &range, 0);
	__sync_fetch_and_sub(&q->packets, range.packets);
	return 0;
}

/* Looks up a queue, after clearing the slots that have passed. */
static __always_inline struct queue *advance_queue(__u32 queue, __u64 now)
{
	struct queue *q = bpf_map_lookup_elem(&queue_counts, &queue);

	if (!q)
		return 0;
#pragma unroll
	for (int level = 0; level < LEVELS; level++) {
		__u64 first = read_once(&q->next_slot[level]), next = now >> LEVEL_SHIFT(level);

		if (first < next)
			clear_slots(queue, level, first, next);
	}
	return q;
}

/* Whether the scratch's packet has to wait in an interface's queue. */
static __always_inline int must_queue(const struct scratch *s)
{
	return cfg.mode == MODE_SHAPE && cfg.queue_limit && !s->new_conn.observe &&
	       final_depart(s) > read_once(&s->now);
}

/* Returns the limit that delays the scratch's packet, and sets the meter of its key's bucket
 * there, or METERS if it has none. */
static __always_inline __u32 delaying_limit(const struct policy *p, const struct scratch *s, __u32 *meter)
{
	__u32 number = s->decision.limit % MAX_LIMITS;

	*meter = METERS;
	if (s->new_conn.depart > s->decision.depart || s->decision.reason == REASON_NEW) {
		*meter = METER_NEW;
		return s->new_conn.last_limit % MAX_LIMITS;
	}
	if (s->decision.limit == NO_LIMIT) /* a SYN retransmitted while the first one waits */
		return lowest_bit(s->limits & p->counted) % MAX_LIMITS;
	if (!(p->calendars >> number & 1))
		*meter = s->charge[number].index[METER_BYTES] == NO_INDEX ? METER_PACKETS : METER_BYTES;
	return number;
}

/* Returns the word of the scratch's key in key_queued, and sets the owner that identifies the key
 * among those that had this bucket. */
static __always_inline __u64 *key_queued_of(const struct policy *p, const struct scratch *s, __u32 number, __u32 meter,
					    __u64 *owner)
{
	const struct charge *c = &s->charge[number];
	__u32 index = p->bucket_lines * LINE_BUCKETS + p->limit[number].id;

	*owner = 0;
	if (meter < METERS && c->index[meter] != NO_INDEX) {
		index = c->index[meter];
		if (index & HOT_INDEX)
			index = p->bucket_lines * LINE_BUCKETS + MAX_LIMIT_IDS + hot_of(index);
		*owner = c->hash[meter] & 0xff;
	}
	return bpf_map_lookup_elem(&key_queued, &index);
}

/* The longest time that a packet is queued, in units of QTIME_SHIFT. */
static __always_inline __u64 longest_hold(const struct limit *l)
{
	return time_min(time_max(l->max_delay, l->queue_timeout) >> QTIME_SHIFT, QTIME_MASK / 2) + 2;
}

/* Returns the packets of a key, both generations, from its word. Sets rotate when a new generation
 * is due. */
static __always_inline __u64 key_packets(__u64 word, __u64 owner, const struct limit *l, __u64 now, int *rotate)
{
	__u64 remaining = (word >> 32) - now & QTIME_MASK;

	*rotate = 1;
	if (word >> 56 != owner)
		return 0;
	if (!remaining || remaining > longest_hold(l))
		return (word & KEY_COUNT_MAX) << 16;
	*rotate = 0;
	return word & 0xffffffff;
}

/* Whether the queue has room for the scratch's packet. If not, the limit that delays it refuses
 * it. */
__noinline int has_room(const struct policy *p, struct scratch *s)
{
	__u64 owner, packets, room, *word;
	struct queue *q;
	__u32 number, meter;
	int rotate;

	if (!p || !s)
		return 0;
	q = advance_queue(s->queue, s->now);
	number = delaying_limit(p, s, &meter);
	word = key_queued_of(p, s, number, meter, &owner);
	if (!q || !word)
		return 0;
	packets = key_packets(read_once(word), owner, &p->limit[number], s->now >> QTIME_SHIFT, &rotate);
	packets = (packets >> 16) + (packets & KEY_COUNT_MAX);
	room = time_sub(cfg.queue_limit, read_once(&q->packets));
	if (packets * cfg.queue_limit < THRESHOLD_ALPHA * room * room)
		return 1;
	__sync_fetch_and_add(&q->refused, 1);
	refuse(&s->decision, number, REASON_QUEUE_FULL, final_depart(s));
	return 0;
}

/* Counts the scratch's packet for its key. */
static __always_inline void add_key_packet(const struct policy *p, const struct scratch *s)
{
	__u64 now = s->now >> QTIME_SHIFT, last = (final_depart(s) >> QTIME_SHIFT) + 1;
	__u32 meter, number = delaying_limit(p, s, &meter);
	const struct limit *l = &p->limit[number];
	__u64 owner, *word = key_queued_of(p, s, number, meter, &owner);

	if (!word)
		return;
	last = time_min(last, now + longest_hold(l)) & QTIME_MASK;
	for (int i = 0; i < 4; i++) {
		__u64 cur = read_once(word), count, val = cur;
		int rotate;

		count = key_packets(cur, owner, l, now, &rotate);
		if (rotate) /* all older packets leave before this one */
			val = owner << 56 | last << 32 | time_min((count >> 16) + 1, KEY_COUNT_MAX) << 16;
		else if ((count & KEY_COUNT_MAX) < KEY_COUNT_MAX)
			val++;
		if (__sync_val_compare_and_swap(word, cur, val) == cur)
			return;
	}
}

/* Counts the scratch's packet in its queue until it leaves. */
__noinline int enqueue(const struct policy *p, struct scratch *s)
{
	__u64 wait, slot;
	struct queue *q;
	__u32 level, shift, *count;

	if (!p || !s)
		return 0;
	q = advance_queue(s->queue, s->now);
	if (!q)
		return 0;
	wait = final_depart(s) - s->now;
	for (level = 0; level < LEVELS - 1; level++)
		if (wait >> LEVEL_SHIFT(level) < LEVEL_SLOTS - 2) /* one less, as another CPU's clock may be behind */
			break;
	shift = LEVEL_SHIFT(level);
	slot = final_depart(s) >> shift;
	count = &q->slot[level % LEVELS][slot % LEVEL_SLOTS];
	__sync_fetch_and_add(&q->packets, 1);
	__sync_fetch_and_add(count, 1);
	if (read_once(&q->next_slot[level % LEVELS]) > slot) /* cleared already: undo */
		__sync_fetch_and_sub(&q->packets, (__u64)__sync_lock_test_and_set(count, 0));
	add_key_packet(p, s);
	return 0;
}
