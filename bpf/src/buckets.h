/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The table of buckets: virtual times by limit and key, in lines of one cache line each. A key is
 * inserted into the emptier of two lines (Azar, Broder, Karlin and Upfal, "Balanced allocations",
 * 1999): in a table half full, about one key in 100,000 finds no room. A drained bucket counts as
 * room, as it equals a new one.
 *
 * When neither line has room, the bucket that drains first is evicted, and the line's floor
 * retains its backlog. A new key inherits the floors of its lines, but no more than the maximum
 * backlog of its own limit, as all limits share the floors. Package shaper's table does the same.
 *
 * Where all keys of a limit share one bucket, it is never evicted, and so inherits nothing.
 *
 * All CPUs use the table concurrently, without locks. A tag of 64 bits identifies a key: 16 bits
 * for the limit's meter, and 48 of a universal hash of the key with random multipliers. So no
 * attacker can find two keys that share a bucket, and of a million keys any two do so with a
 * probability of 1 in 100,000.
 *
 * Buckets of limits that hosts share have a time of their own, see share.h. */
#pragma once

#include "policy.h"
#include "shared_clock.h"
#include "tag.h"

#define LINE_BUCKETS 4

/* An index where there is no entry. */
enum bucket_index {
	NO_INDEX = ~0U,
};

#define HOT_INDEX (1U << 31) /* set in that of a hot bucket: the rest is its index in hot_buckets */

/* Returns the index in hot_buckets of the bucket with an index, or NO_HOT. */
static __always_inline __u32 hot_of(__u32 index)
{
	return index & HOT_INDEX && index != NO_INDEX ? index & ~HOT_INDEX : NO_HOT;
}

/* Returns the index of the hot bucket with a tag, or NO_INDEX. */
static __always_inline __u32 hot_index(__u64 tag)
{
	__u32 hot = find_hot(tag);

	return hot == NO_HOT ? NO_INDEX : HOT_INDEX | hot;
}

struct bucket_line {
	__u64 tag[LINE_BUCKETS]; /* 0 if empty */
	__u64 drained_at[LINE_BUCKETS];
};

/* Sized when the programs are loaded. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct bucket_line);
} buckets SEC(".maps");

/* The backlog of evicted keys, by line of buckets. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} floors SEC(".maps");

struct table_count {
	__u64 evicted_drained;
	__u64 evicted_backlogged;
	__u64 insert_failed; /* other CPUs were faster each time */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct table_count);
} table_counts SEC(".maps");

/* Returns the index of the bucket with a tag in line l, or NO_INDEX. */
static __always_inline __u32 find_tag(const struct bucket_line *l, __u32 line, __u64 tag)
{
#pragma unroll
	for (int i = 0; i < LINE_BUCKETS; i++)
		if (read_once(&l->tag[i]) == tag)
			return line * LINE_BUCKETS + i;
	return NO_INDEX;
}

static __always_inline __u32 find_bucket(__u32 line, __u64 tag)
{
	const struct bucket_line *l = bpf_map_lookup_elem(&buckets, &line);

	return l ? find_tag(l, line, tag) : NO_INDEX;
}

/* The verifier checks functions that are not static on their own, not once per path that leads to
 * a call. */

/* Raises a line's floor to t. */
__noinline int raise_floor(__u32 line, __u64 t)
{
	__u64 *floor = bpf_map_lookup_elem(&floors, &line);

	if (floor)
		bucket_raise(floor, t);
	return 0;
}

/* The two bounds of a meter's backlog in one word, as functions have at most five parameters. In
 * whole ns: how much a new key inherits, so that its limit does not refuse it. In the low bits:
 * the power of two by which a key's own backlog may exceed that, since packets may be large, and
 * leave as late as other limits let them. */
enum backlog_bounds {
	BACKLOG_SHIFT_BITS = 6,
};

/* An upper bound of the backlog of a key. */
static __always_inline __u64 max_backlog(__u64 backlog_bounds)
{
	return backlog_bounds >> BACKLOG_SHIFT_BITS << BACKLOG_SHIFT_BITS
						    << (backlog_bounds & ((1 << BACKLOG_SHIFT_BITS) - 1));
}

/* The backlog that a new key with two lines inherits, as the virtual time at which its bucket begins. */
__noinline __u64 inherited_backlog(__u64 tag, __u32 first, __u32 second, __u64 now, __u64 backlog_bounds)
{
	__u64 most = backlog_bounds >> BACKLOG_SHIFT_BITS << BACKLOG_SHIFT_BITS, floor;
	__u64 *a = bpf_map_lookup_elem(&floors, &first);
	__u64 *b = bpf_map_lookup_elem(&floors, &second);

	if (tag & TAG_PINNED)
		return 0;
	floor = a && b ? time_max(read_once(a), read_once(b)) : ~0ULL;
	if (tag & TAG_SHARED)
		return shared_start(tag, time_sub(floor, now), most);
	return time_min(floor, time_add(now, most));
}

/* When entry i of a line drains: 0 if it is empty, ~0 if it cannot be evicted. */
static __always_inline __u64 drain_time(const struct bucket_line *l, __u32 i)
{
	__u64 tag = read_once(&l->tag[i]);

	if (tag & TAG_PINNED || tag == TAG_CLAIMED)
		return ~0ULL;
	if (tag & TAG_SHARED)
		return shared_drain_time(tag, read_once(&l->drained_at[i]));
	return tag ? read_once(&l->drained_at[i]) | 1 : 0;
}

/* Returns the entry of a line that drains first, plus LINE_BUCKETS times the number of drained
 * ones. */
__noinline __u32 line_victim(__u32 line, __u64 now)
{
	const struct bucket_line *l = bpf_map_lookup_elem(&buckets, &line);
	__u64 soonest = ~0ULL;
	__u32 victim = 0, drained = 0;

	if (!l)
		return 0;
	for (__u32 i = 0; i < LINE_BUCKETS; i++) {
		__u64 drained_at = drain_time(l, i);

		drained += drained_at <= now;
		if (drained_at < soonest) {
			soonest = drained_at;
			victim = i;
		}
	}
	return drained * LINE_BUCKETS + victim;
}

/* Removes the buckets in a line that have the tag of the one at index and come after it. Their
 * charges since they were inserted, with the virtual time until, are added to that one, but no
 * more than the maximum backlog of a key: one of the charges may be about to be refunded. */
__noinline int merge_duplicates(__u64 tag, __u32 line, __u32 index, __u64 until, __u64 backlog_bounds)
{
	__u32 own_line = index / LINE_BUCKETS;
	struct bucket_line *l = bpf_map_lookup_elem(&buckets, &line);
	struct bucket_line *to = bpf_map_lookup_elem(&buckets, &own_line);
	__u64 *floor = bpf_map_lookup_elem(&floors, &line), charged, added;

	if (!l || !to || !floor)
		return 0;
	for (__u32 i = 0; i < LINE_BUCKETS; i++) {
		if ((line == own_line && i <= index % LINE_BUCKETS) || read_once(&l->tag[i]) != tag ||
		    __sync_val_compare_and_swap(&l->tag[i], tag, TAG_CLAIMED) != tag)
			continue;
		charged = __sync_lock_test_and_set(&l->drained_at[i], 0);
		__sync_lock_test_and_set(&l->tag[i], 0);
		if (charged <= until)
			continue;
		bucket_raise(&to->drained_at[index % LINE_BUCKETS], until);
		charged = time_min(charged - until, max_backlog(backlog_bounds));
		added = __sync_fetch_and_add(&to->drained_at[index % LINE_BUCKETS], charged);
		barrier_var(added); /* unused, its result would make the addition no barrier */
		if (read_once(&to->tag[index % LINE_BUCKETS]) != tag)
			bucket_raise(floor, charged + until); /* that one was evicted, too */
	}
	return 0;
}

/* Sets the bucket at index, which is claimed, to the virtual time until, and its base is base. The
 * backlog of its predecessor, which had the tag old, goes to the floor. */
__noinline int evict(__u32 index, __u64 old, __u64 until, __u64 base, __u64 backlog_bounds)
{
	__u32 line = index / LINE_BUCKETS, zero = 0;
	struct bucket_line *l = bpf_map_lookup_elem(&buckets, &line);
	struct table_count *count = bpf_map_lookup_elem(&table_counts, &zero);
	const struct shared_clock *clock = get_shared_clock();
	__u64 *floor = bpf_map_lookup_elem(&floors, &line), *drained_at, old_time, now;

	if (!l || !count || !floor || !clock)
		return 0;
	now = clock->at;
	drained_at = &l->drained_at[index % LINE_BUCKETS];
	/* The predecessor may have been charged up to now. An empty entry may have been charged
	 * since it was emptied, by a CPU that is about to refund it, or finds its key there again. */
	old_time = __sync_lock_test_and_set(drained_at, until);
	old_time = old & TAG_SHARED ? shared_drain_time(old, old_time) : old_time | 1;
	if (!old && old_time > now) {
		bucket_raise(drained_at, base);
		__sync_fetch_and_add(drained_at, time_min(old_time - now, max_backlog(backlog_bounds)));
	} else if (old && old_time > now) {
		bucket_raise(floor, old_time);
		count->evicted_backlogged++;
	} else if (old) {
		count->evicted_drained++;
	}
	return 0;
}

/* When the entry at an index drains. */
__noinline __u64 drain_time_at(__u32 index)
{
	__u32 line = index / LINE_BUCKETS;
	const struct bucket_line *l = bpf_map_lookup_elem(&buckets, &line);

	return l ? drain_time(l, index % LINE_BUCKETS) : ~0ULL;
}

/* Returns the index of the entry for a new key: the one that drains first, in the line with more
 * room. */
static __always_inline __u32 pick_victim(__u32 first, __u32 second, __u64 now)
{
	__u32 a_victim = line_victim(first, now), b_victim = line_victim(second, now);
	__u32 a = first * LINE_BUCKETS + a_victim % LINE_BUCKETS, b = second * LINE_BUCKETS + b_victim % LINE_BUCKETS;

	if (b_victim / LINE_BUCKETS > a_victim / LINE_BUCKETS)
		return b;
	if (b_victim / LINE_BUCKETS == 0 && a_victim / LINE_BUCKETS == 0 && drain_time_at(b) < drain_time_at(a))
		return b;
	return a;
}

/* Removes all buckets with a tag except the one at index. */
static __always_inline void merge_all_duplicates(__u64 tag, __u32 second, __u32 index, __u64 until,
						 __u64 backlog_bounds)
{
	merge_duplicates(tag, index / LINE_BUCKETS, index, until, backlog_bounds);
	if (index / LINE_BUCKETS != second)
		merge_duplicates(tag, second, index, until, backlog_bounds);
}

/* Inserts a bucket for a tag that is in neither line. Returns its index, or NO_INDEX if another
 * CPU was faster.
 *
 * The entry is claimed before it gets the tag: a CPU that finds the tag finds a bucket with the
 * inherited backlog, and without that of the predecessor. */
__noinline __u32 bucket_insert(__u64 tag, __u32 first, __u32 second, __u64 now, __u64 backlog_bounds)
{
	__u32 index = pick_victim(first, second, now), line = index / LINE_BUCKETS, i = index % LINE_BUCKETS, earlier;
	struct bucket_line *l = bpf_map_lookup_elem(&buckets, &line);
	__u64 old, until, base;

	if (!l)
		return NO_INDEX;
	old = read_once(&l->tag[i]);
	until = drain_time_at(index);
	if (until == ~0ULL || old == tag) /* just inserted by another CPU */
		return NO_INDEX;
	if (until > now)
		raise_floor(line, until);
	if (__sync_val_compare_and_swap(&l->tag[i], old, TAG_CLAIMED) != old)
		return NO_INDEX;
	until = inherited_backlog(tag, first, second, now, backlog_bounds);
	base = bucket_base(tag, now);
	evict(index, old, until, base, backlog_bounds);
	__sync_lock_test_and_set(&l->tag[i], tag);
	until = time_max(base, until);
	/* Another CPU may have inserted the tag elsewhere at the same time. The later one in the
	 * lines gives way to the earlier one, and the earlier one removes those after it: so no
	 * two remove each other. A bucket that is removed may have been charged already. */
	earlier = find_bucket(first, tag);
	if (earlier == NO_INDEX)
		earlier = find_bucket(second, tag);
	if (earlier == NO_INDEX || earlier == index) {
		merge_all_duplicates(tag, second, index, until, backlog_bounds);
		return index;
	}
	merge_duplicates(tag, line, earlier, until, backlog_bounds);
	return earlier;
}

/* Returns the index of the bucket for a tag, which is inserted if it is missing, or NO_INDEX after
 * four lost races. first and second are the tag's lines. */
__noinline __u32 bucket_get(__u64 tag, __u32 first, __u32 second, __u64 now, __u64 backlog_bounds)
{
	__u32 index = NO_INDEX, zero = 0;
	struct table_count *count;

	for (int i = 0; i < 4 && index == NO_INDEX; i++) {
		const struct bucket_line *a = bpf_map_lookup_elem(&buckets, &first);
		const struct bucket_line *b = bpf_map_lookup_elem(&buckets, &second);

		if (!a || !b)
			return NO_INDEX;
		index = find_tag(a, first, tag);
		if (index == NO_INDEX)
			index = find_tag(b, second, tag);
		if (index != NO_INDEX)
			break;
		set_shared_clock(now);
		index = bucket_insert(tag, first, second, now, backlog_bounds);
	}
	count = bpf_map_lookup_elem(&table_counts, &zero);
	if (index == NO_INDEX && count)
		count->insert_failed++;
	return index;
}

/* Returns the bucket at an index without checking its tag. */
static __always_inline __u64 *bucket_at(__u32 index)
{
	__u32 line = index / LINE_BUCKETS;
	struct bucket_line *l = bpf_map_lookup_elem(&buckets, &line);

	return l ? &l->drained_at[index % LINE_BUCKETS] : 0;
}

/* Whether a bucket of the table still has a tag. */
static __always_inline int tag_matches(const __u64 *bucket, __u64 tag)
{
	return read_once(bucket - LINE_BUCKETS) == tag;
}

/* Returns the bucket at an index, or NULL if it has another tag. */
static __always_inline __u64 *bucket_for(__u32 index, __u64 tag)
{
	__u64 *bucket = bucket_at(index);

	return bucket && tag_matches(bucket, tag) ? bucket : 0;
}
