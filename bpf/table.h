/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The table of buckets: virtual times by limit and key, in lines of one cache line
 * each. A key may stand in one of two lines and goes to the one with more room
 * (Azar, Broder, Karlin and Upfal, "Balanced allocations", 1999), which fills half
 * of all places before hardly one key in 100,000 finds no room. A drained bucket
 * is room: it equals a fresh one.
 *
 * When neither line has room the key takes the place of the one that drains first,
 * and the line's floor keeps what that one owed. A newcomer inherits the floors of
 * its lines, but no more than any key of its own limit can owe: the floors are of keys
 * of all limits. See package shaper, whose table does the same.
 *
 * The one bucket of a limit for all never gives up its place, and so inherits nothing.
 *
 * All CPUs use the table at once and none waits for another. A tag of 64 bits
 * stands for a key: 16 bits for the limit's meter, 48 of a universal hash of the
 * key with random multipliers, so nobody outside can look for two keys that share
 * a bucket, and two of a million share one with a chance of one in a hundred
 * thousand. */
#pragma once

#include "policy.h"

#define PLACES 4
#define NOWHERE (~0U)
#define CLAIMED 1ULL	   /* the tag of a place that is changing hands; no meter has the number 0 */
#define STAYS (1ULL << 63) /* of a tag that is never evicted */

struct bucket_line {
	__u64 tag[PLACES]; /* 0 is empty */
	__u64 until[PLACES];
};

/* Sized when the programs are loaded. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct bucket_line);
} buckets SEC(".maps");

/* What evicted keys owed, a line of buckets each. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} floors SEC(".maps");

struct table_count {
	__u64 evicted_drained;
	__u64 evicted_indebted;
	__u64 lost; /* found no place because other CPUs were faster */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct table_count);
} table_counts SEC(".maps");

static __always_inline __u64 load_word(const __u64 *word)
{
	return *(const volatile __u64 *)word;
}

/* Returns the place in the table of a tag, if line l holds it, or NOWHERE. */
static __always_inline __u32 find_tag(const struct bucket_line *l, __u32 line, __u64 tag)
{
#pragma unroll
	for (int i = 0; i < PLACES; i++)
		if (load_word(&l->tag[i]) == tag)
			return line * PLACES + i;
	return NOWHERE;
}

static __always_inline __u32 find_in(__u32 line, __u64 tag)
{
	const struct bucket_line *l = bpf_map_lookup_elem(&buckets, &line);

	return l ? find_tag(l, line, tag) : NOWHERE;
}

/* The functions that are not static are checked by the verifier by themselves, and
 * not once more for each way that leads to a call. */

/* Puts the newcomers to a line at least as deep into debt as t. */
__noinline int raise_floor(__u32 line, __u64 t)
{
	__u64 *floor = bpf_map_lookup_elem(&floors, &line);

	if (floor)
		bucket_merge(floor, t);
	return 0;
}

/* The two bounds of a meter's debt in one word, as functions take five: how much a newcomer
 * inherits, so that its limit does not refuse it, in whole ns; and in the lower bits by how many
 * powers of two more a key can owe, whose packets may be large and leave as late as other limits
 * let them. */
#define DEEPER_BITS 6

/* How much a key can owe, at least. */
static __always_inline __u64 deepest(__u64 most)
{
	return most >> DEEPER_BITS << DEEPER_BITS << (most & ((1 << DEEPER_BITS) - 1));
}

/* What the newcomer tag to two lines owes. */
__noinline __u64 inherited(__u64 tag, __u32 first, __u32 second, __u64 now, __u64 most)
{
	__u64 until = time_add(now, most >> DEEPER_BITS << DEEPER_BITS);
	__u64 *a = bpf_map_lookup_elem(&floors, &first);
	__u64 *b = bpf_map_lookup_elem(&floors, &second);

	if (tag & STAYS)
		return 0;
	return a && b ? time_min(time_max(load_word(a), load_word(b)), until) : until;
}

/* When the bucket at a place of a line drains: 0 where there is none, and never where
 * the place is not to be had. */
static __always_inline __u64 drains(const struct bucket_line *l, __u32 i)
{
	__u64 tag = load_word(&l->tag[i]);

	if (tag & STAYS || tag == CLAIMED)
		return ~0ULL;
	return tag ? load_word(&l->until[i]) | 1 : 0;
}

/* Returns the place of a line that drains first, and above PLACES how many have. */
__noinline __u32 room_in(__u32 line, __u64 now)
{
	const struct bucket_line *l = bpf_map_lookup_elem(&buckets, &line);
	__u64 soonest = ~0ULL;
	__u32 place = 0, drained = 0;

	if (!l)
		return 0;
	for (__u32 i = 0; i < PLACES; i++) {
		__u64 until = drains(l, i);

		drained += until <= now;
		if (until < soonest) {
			soonest = until;
			place = i;
		}
	}
	return drained * PLACES + place;
}

/* Ends the buckets of the tag at place that a line has behind it, if any. What they were
 * charged since they began, when they owed debt, is added to that one. It is no more than
 * a key can owe: there may be a charge on it that another CPU is about to take back. */
__noinline int unite(__u64 tag, __u32 line, __u32 place, __u64 debt, __u64 most)
{
	__u32 own = place / PLACES;
	struct bucket_line *l = bpf_map_lookup_elem(&buckets, &line);
	struct bucket_line *to = bpf_map_lookup_elem(&buckets, &own);
	__u64 *floor = bpf_map_lookup_elem(&floors, &line), until, added;

	if (!l || !to || !floor)
		return 0;
	for (__u32 i = 0; i < PLACES; i++) {
		if ((line == own && i <= place % PLACES) || load_word(&l->tag[i]) != tag ||
		    __sync_val_compare_and_swap(&l->tag[i], tag, CLAIMED) != tag)
			continue;
		until = __sync_lock_test_and_set(&l->until[i], 0);
		__sync_lock_test_and_set(&l->tag[i], 0);
		if (until <= debt)
			continue;
		bucket_merge(&to->until[place % PLACES], debt);
		until = time_min(until - debt, deepest(most));
		added = __sync_fetch_and_add(&to->until[place % PLACES], until);
		hide(added); /* without a result it would be no barrier */
		if (load_word(&to->tag[place % PLACES]) != tag)
			bucket_merge(floor, until + debt); /* it has made room itself */
	}
	return 0;
}

/* Has the bucket at a place that is claimed owe debt. What the one before it owed, whose
 * tag was was, goes to the floor. */
__noinline int evict(__u32 place, __u64 was, __u64 debt, __u64 now, __u64 most)
{
	__u32 line = place / PLACES, zero = 0;
	struct bucket_line *l = bpf_map_lookup_elem(&buckets, &line);
	struct table_count *count = bpf_map_lookup_elem(&table_counts, &zero);
	__u64 *floor = bpf_map_lookup_elem(&floors, &line), *until, owed;

	if (!l || !count || !floor)
		return 0;
	until = &l->until[place % PLACES];
	/* The key may have been charged until this moment; and an empty place since it was
	 * left, by who is about to take that back, or finds its key there again. */
	owed = __sync_lock_test_and_set(until, debt) | 1;
	if (!was && owed > now) {
		bucket_merge(until, now);
		__sync_fetch_and_add(until, time_min(owed - now, deepest(most)));
	} else if (was && owed > now) {
		bucket_merge(floor, owed);
		count->evicted_indebted++;
	} else if (was) {
		count->evicted_drained++;
	}
	return 0;
}

/* Returns the place of two lines that a newcomer gets: the one that drains first in the
 * line with more room. */
static __always_inline __u32 best_place(__u32 first, __u32 second, __u64 now)
{
	const struct bucket_line *a = bpf_map_lookup_elem(&buckets, &first);
	const struct bucket_line *b = bpf_map_lookup_elem(&buckets, &second);
	__u32 room = room_in(first, now), other = room_in(second, now);

	if (!a || !b)
		return NOWHERE;
	if (other / PLACES > room / PLACES ||
	    (other / PLACES == 0 && room / PLACES == 0 && drains(b, other % PLACES) < drains(a, room % PLACES)))
		return second * PLACES + other % PLACES;
	return first * PLACES + room % PLACES;
}

/* Ends all buckets of a tag in its lines but the one at place, in favour of that. */
static __always_inline void unite_all(__u64 tag, __u32 second, __u32 place, __u64 debt, __u64 most)
{
	unite(tag, place / PLACES, place, debt, most);
	if (place / PLACES != second)
		unite(tag, second, place, debt, most);
}

/* Makes a place for tag, which is in neither line, and returns it; NOWHERE when
 * another CPU was faster. most are the bounds of its debt.
 *
 * The place is claimed before the tag stands there: who finds the tag finds a bucket
 * that owes what the key inherits, and nothing of what the one before it owed. */
__noinline __u32 table_insert(__u64 tag, __u32 first, __u32 second, __u64 now, __u64 most)
{
	__u32 place = best_place(first, second, now), line = place / PLACES, i = place % PLACES, earlier;
	struct bucket_line *l = bpf_map_lookup_elem(&buckets, &line);
	__u64 was, debt;

	if (!l)
		return NOWHERE;
	was = load_word(&l->tag[i]);
	debt = drains(l, i);
	if (debt == ~0ULL || was == tag) /* that of another CPU, which has just been put there */
		return NOWHERE;
	if (debt > now)
		raise_floor(line, debt);
	if (__sync_val_compare_and_swap(&l->tag[i], was, CLAIMED) != was)
		return NOWHERE;
	debt = inherited(tag, first, second, now, most);
	evict(place, was, debt, now, most);
	__sync_lock_test_and_set(&l->tag[i], tag);
	debt = time_max(now, debt);
	/* Another CPU may have put the same tag elsewhere at the same time. Who is behind
	 * sees who was there before, and makes way; one that came behind is ended. So no two
	 * end each other. One that was put behind it may have been charged already. */
	earlier = find_in(first, tag);
	if (earlier == NOWHERE)
		earlier = find_in(second, tag);
	if (earlier == NOWHERE || earlier == place) {
		unite_all(tag, second, place, debt, most);
		return place;
	}
	unite(tag, line, earlier, debt, most);
	return earlier;
}

/* Returns the place of a tag, new if it had none; NOWHERE when other CPUs were
 * faster four times over. first and second are its lines, most the bounds of its debt. */
__noinline __u32 table_place(__u64 tag, __u32 first, __u32 second, __u64 now, __u64 most)
{
	__u32 place = NOWHERE, zero = 0;
	struct table_count *count;

	for (int i = 0; i < 4 && place == NOWHERE; i++) {
		const struct bucket_line *a = bpf_map_lookup_elem(&buckets, &first);
		const struct bucket_line *b = bpf_map_lookup_elem(&buckets, &second);

		if (!a || !b)
			return NOWHERE;
		place = find_tag(a, first, tag);
		if (place == NOWHERE)
			place = find_tag(b, second, tag);
		if (place == NOWHERE)
			place = table_insert(tag, first, second, now, most);
	}
	count = bpf_map_lookup_elem(&table_counts, &zero);
	if (place == NOWHERE && count)
		count->lost++;
	return place;
}

/* Returns the bucket at a place, whoever has it. */
static __always_inline __u64 *any_bucket(__u32 place)
{
	__u32 line = place / PLACES;
	struct bucket_line *l = bpf_map_lookup_elem(&buckets, &line);

	return l ? &l->until[place % PLACES] : 0;
}

/* Whether a bucket that the table gave is still that of tag. */
static __always_inline int is_of(const __u64 *bucket, __u64 tag)
{
	return load_word(bucket - PLACES) == tag;
}

/* Returns the bucket at a place, if it is still that of tag. */
static __always_inline __u64 *bucket_at(__u32 place, __u64 tag)
{
	__u64 *bucket = any_bucket(place);

	return bucket && is_of(bucket, tag) ? bucket : 0;
}
