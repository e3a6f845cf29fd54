/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The table of buckets: virtual times by limit and key, in lines of one cache line
 * each. A key may stand in one of two lines and goes to the one with more room
 * (Azar, Broder, Karlin and Upfal, "Balanced allocations", 1999), which fills half
 * of all places before hardly one key in 100,000 finds no room. A drained bucket
 * is room: it equals a fresh one.
 *
 * When neither line has room the key takes the place of the one that drains first,
 * and the line's floor keeps what that one owed. A newcomer inherits the floors of
 * its lines: see package shaper, whose table does the same.
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

/* Puts the bucket at a place at least as deep into debt as newcomers to its lines.
 * Returns what those owe. */
__noinline __u64 inherit(__u32 place, __u32 first, __u32 second)
{
	__u32 line = place / PLACES;
	struct bucket_line *l = bpf_map_lookup_elem(&buckets, &line);
	__u64 *a = bpf_map_lookup_elem(&floors, &first);
	__u64 *b = bpf_map_lookup_elem(&floors, &second);
	__u64 debt;

	if (!l || !a || !b)
		return 0;
	debt = time_max(load_word(a), load_word(b));
	bucket_merge(&l->until[place % PLACES], debt);
	return debt;
}

/* When the bucket at a place of a line drains; 0 where there is none. */
static __always_inline __u64 drains(const struct bucket_line *l, __u32 i)
{
	return load_word(&l->tag[i]) ? load_word(&l->until[i]) | 1 : 0;
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
 * charged since they began, when they owed debt, is added to that one. */
__noinline int unite(__u64 tag, __u32 line, __u32 place, __u64 debt)
{
	__u32 own = place / PLACES;
	struct bucket_line *l = bpf_map_lookup_elem(&buckets, &line);
	struct bucket_line *to = bpf_map_lookup_elem(&buckets, &own);
	__u64 *floor = bpf_map_lookup_elem(&floors, &line), until;

	if (!l || !to || !floor)
		return 0;
	for (__u32 i = 0; i < PLACES; i++) {
		if ((line == own && i <= place % PLACES) || load_word(&l->tag[i]) != tag ||
		    __sync_val_compare_and_swap(&l->tag[i], tag, 0) != tag)
			continue;
		until = load_word(&l->until[i]);
		if (until <= debt)
			continue;
		bucket_merge(&to->until[place % PLACES], debt);
		__sync_fetch_and_add(&to->until[place % PLACES], until - debt);
		if (load_word(&to->tag[place % PLACES]) != tag)
			bucket_merge(floor, until); /* it has made room itself */
	}
	return 0;
}

/* Makes a place for tag, which is in neither line, and returns it; NOWHERE when
 * another CPU was faster. */
__noinline __u32 table_insert(__u64 tag, __u32 first, __u32 second, __u64 now)
{
	struct bucket_line *a = bpf_map_lookup_elem(&buckets, &first), *l = a;
	struct bucket_line *b = bpf_map_lookup_elem(&buckets, &second);
	__u32 zero = 0, line = first, i, earlier, room = room_in(first, now), other = room_in(second, now);
	struct table_count *count = bpf_map_lookup_elem(&table_counts, &zero);
	__u64 was, until;

	if (!a || !b || !count)
		return NOWHERE;
	if (other / PLACES > room / PLACES ||
	    (other / PLACES == 0 && room / PLACES == 0 && drains(b, other % PLACES) < drains(a, room % PLACES))) {
		l = b;
		line = second;
		room = other;
	}
	i = room % PLACES;
	was = load_word(&l->tag[i]);
	until = drains(l, i);
	if (until > now)
		raise_floor(line, until);
	if (__sync_val_compare_and_swap(&l->tag[i], was, tag) != was)
		return NOWHERE;
	/* The key may have been charged until this moment. */
	until = was ? load_word(&l->until[i]) | 1 : 0;
	if (until > now) {
		raise_floor(line, until);
		count->evicted_indebted++;
	} else if (was) {
		count->evicted_drained++;
	}
	until = time_max(now, inherit(line * PLACES + i, first, second));
	/* Another CPU may have put the same tag elsewhere at the same time. Who is behind
	 * sees who was there before, and makes way; one that came behind is ended. So no two
	 * end each other. */
	earlier = find_tag(a, first, tag);
	if (earlier == NOWHERE)
		earlier = find_tag(b, second, tag);
	if (earlier == NOWHERE || earlier == line * PLACES + i) {
		/* One that was put behind it may have been charged already. */
		unite(tag, line, line * PLACES + i, until);
		if (line != second)
			unite(tag, second, line * PLACES + i, until);
		return line * PLACES + i;
	}
	unite(tag, line, earlier, until);
	return earlier;
}

/* Returns the place of a tag, new if it had none; NOWHERE when other CPUs were
 * faster four times over. first and second are its lines. */
__noinline __u32 table_place(__u64 tag, __u32 first, __u32 second, __u64 now)
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
			place = table_insert(tag, first, second, now);
	}
	count = bpf_map_lookup_elem(&table_counts, &zero);
	if (place == NOWHERE && count)
		count->lost++;
	return place;
}

/* Returns the bucket at a place, whosever it is. */
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
