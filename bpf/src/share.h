/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Shares of limits that several hosts share. This host may use so many parts of each bucket, under
 * a lease: see type Lease of package shaper. When the lease is over the programs go on with fewer
 * parts, without a daemon.
 *
 * A unit costs a bucket of a shared limit what it would cost without: the bucket's own time goes by
 * more slowly, by the parts of the whole. So a bucket never changes with its parts, only the pace of
 * its time does:
 *
 *	time(boot) = vtime + (boot - from) * parts / 2^SHARE_SHIFT
 *
 * The value of a bucket is when the next unit may leave, in that time. The credit of a burst is time
 * at the whole rate, too, and as large as the parts are. Parts that grow bring no credit. So that of
 * before is the most that remains: floor is the value of a bucket that has it all.
 *
 * All buckets have the same parts, and one time, except those of hot keys. They are in the table of
 * buckets; the hot ones are here, and are never evicted.
 *
 * Packets wait in a queue for a departure that the terms of their time let them have. So those of a
 * hot bucket that change apply from its last departure on: its time is that of then until then. No
 * packet waits for a phase with other parts, as the lease is renewed in general: a queue would fill up
 * with packets that leave too slowly. The exception is a hot bucket whose queue is empty, as
 * one unit may take longer than a lease.
 *
 * The clock of leases is CLOCK_BOOTTIME, which goes on while the machine is suspended; in ticks, like
 * everything here.
 *
 * While all is 0, nothing may leave. */
#pragma once

#include "config.h"
#include "policy.h"

#define SHARE_SHIFT 20 /* the whole has 2^SHARE_SHIFT parts */
#define NEVER (~0ULL)

#define HOT_LINES 4096 /* a power of two */
#define HOT_TAGS 8     /* per line */

/* The parts of a bucket, or of all that are not hot. */
struct share {
	__u64 from;  /* since when; of a hot bucket it may be yet to come */
	__u64 vtime; /* the bucket's time then */
	__u64 parts; /* until the lease ends */
};

/* What all buckets are under. */
struct lease {
	__u64 end;	/* until then buckets have their parts, */
	__u64 alone_at; /* then at most between, and then alone */
	__u64 between;
	__u64 alone;
	__u64 withheld; /* of the parts of hot buckets after end, as parts of the whole */
	__u64 hosts;	/* 1 / hosts of the connections in flight; none if it is 0 */
	struct share cold;
};

/* User space writes the copy that is not current, and then adds one to current. */
struct lease_slot {
	__u64 current;
	struct lease copy[2];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct lease_slot);
} leases SEC(".maps");

/* The floors of buckets that are not hot, by the number of their meter less one. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, MAX_LIMIT_IDS *METERS);
	__type(key, __u32);
	__type(value, __u64);
} cold_floors SEC(".maps");

/* The bursts of shared limits, in ticks, by the same numbers: the table of buckets finds those of any
 * limit in a line. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, MAX_LIMIT_IDS *METERS);
	__type(key, __u32);
	__type(value, __u64);
} shared_bursts SEC(".maps");

struct hot_share {
	struct share share;
	__u64 floor;
};

struct hot_bucket {
	__u64 value;
	__u64 current;
	struct hot_share copy[2];
	__u64 hash;	/* of its key and meter, for user space */
	__u64 used;	/* cost of all that was charged or refused */
	__u64 reported; /* as much of it as user space has reported */
	__u64 short_at; /* see demand.h; ticks of CLOCK_BOOTTIME */
	__u64 last;	/* the latest departure that it has granted to a packet that is shaped */
	__u64 empty_at; /* when all of these have left, which other limits may delay for longer */
};

/* By the index of their tag in hot_tags. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, HOT_LINES *HOT_TAGS);
	__type(key, __u32);
	__type(value, struct hot_bucket);
} hot_buckets SEC(".maps");

struct hot_line {
	__u64 tag[HOT_TAGS]; /* 0 if free */
};

/* A tag is in one of two lines. User space does not use an index again before the packets have passed
 * that have found it. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, HOT_LINES);
	__type(key, __u32);
	__type(value, struct hot_line);
} hot_tags SEC(".maps");

static __always_inline __u64 read_once(const __u64 *word)
{
	return *(const volatile __u64 *)word;
}

/* Returns the index of a tag in a line, or NO_HOT. */
#define NO_HOT (~0U)

static __always_inline __u32 find_hot_in(__u32 line, __u64 tag)
{
	const struct hot_line *l = bpf_map_lookup_elem(&hot_tags, &line);
	__u32 found = NO_HOT;

	if (!l)
		return NO_HOT;
#pragma unroll
	for (int i = 0; i < HOT_TAGS; i++)
		if (read_once(&l->tag[i]) == tag)
			found = line * HOT_TAGS + i;
	return found;
}

/* Returns the index of the hot bucket with a tag, or NO_HOT. */
static __always_inline __u32 find_hot(__u64 tag)
{
	__u32 found = find_hot_in(tag * 0xd6e8feb86659fd93ULL >> 52, tag);

	return found != NO_HOT ? found : find_hot_in(tag * 0x9e3779b97f4a7c15ULL >> 52, tag);
}

/* A bucket's time that passes in d. */
static __always_inline __u64 share_scale(__u64 d, __u64 parts)
{
	return (d >> SHARE_SHIFT) * parts + ((d & ((1 << SHARE_SHIFT) - 1)) * parts >> SHARE_SHIFT);
}

/* How long it takes until time d of a bucket has passed, rounded up; at most FOREVER. parts is not
 * 0. */
static __always_inline __u64 share_unscale(__u64 d, __u64 parts)
{
	__u64 whole = d / parts, rest = d % parts;

	if (whole >= FOREVER >> SHARE_SHIFT)
		return FOREVER;
	return (whole << SHARE_SHIFT) + ((rest << SHARE_SHIFT) + parts - 1) / parts;
}

/* The share of a bucket, with its lease: parts is what it has until end, then at most between. */
struct terms {
	struct share share;
	__u64 end;
	__u64 alone_at;
	__u64 between;
	__u64 alone;
	__u64 withheld;
};

static __always_inline void load_share(struct share *to, const struct share *from)
{
	to->from = read_once(&from->from);
	to->vtime = read_once(&from->vtime);
	to->parts = read_once(&from->parts);
}

/* There is no room for it on the stack. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct terms);
} terms_in_hand SEC(".maps");

/* Loads the lease, and the share of buckets that are not hot. Returns whether that was not changed
 * meanwhile. */
static __always_inline int load_lease(struct terms *t)
{
	__u32 zero = 0;
	const struct lease_slot *slot = bpf_map_lookup_elem(&leases, &zero);
	const struct lease *l;
	__u64 current;

	if (!slot)
		return 0;
	current = read_once(&slot->current);
	l = &slot->copy[current & 1];
	load_share(&t->share, &l->cold);
	t->end = read_once(&l->end);
	t->alone_at = read_once(&l->alone_at);
	t->between = read_once(&l->between);
	t->alone = read_once(&l->alone);
	t->withheld = read_once(&l->withheld);
	return read_once(&slot->current) == current;
}

/* Loads the share of a hot bucket, in the same way. */
static __always_inline int load_hot(struct share *to, __u32 index)
{
	const struct hot_bucket *b = bpf_map_lookup_elem(&hot_buckets, &index);
	__u64 current;

	if (!b)
		return 0;
	current = read_once(&b->current);
	load_share(to, &b->copy[current & 1].share);
	return read_once(&b->current) == current;
}

/* Loads the terms of a bucket, hot or NO_HOT. User space writes shares of hot buckets before the
 * lease: so that is read first, and none is older. */
static __always_inline struct terms *load_terms(__u32 hot)
{
	__u32 zero = 0;
	struct terms *t = bpf_map_lookup_elem(&terms_in_hand, &zero);

	if (!t)
		return 0;
	for (int i = 0; i < 4; i++) {
		if (!load_lease(t))
			continue;
		if (hot == NO_HOT)
			return t;
		if (!load_hot(&t->share, hot))
			continue;
		t->between = time_min(t->between, share_scale(t->share.parts, (1 << SHARE_SHIFT) - t->withheld));
		return t;
	}
	return 0;
}

/* Lets no phase end before the share of t begins. */
static __always_inline void order_terms(struct terms *t)
{
	t->end = time_max(t->end, t->share.from);
	t->alone_at = time_max(t->alone_at, t->end);
}

static __always_inline __u64 parts_at(const struct terms *t, __u64 boot)
{
	if (boot < t->end)
		return t->share.parts;
	return boot < t->alone_at ? time_min(t->share.parts, t->between) : t->alone;
}

static __always_inline __u64 floor_of(__u32 hot, __u32 meter)
{
	const struct hot_bucket *b;
	const __u64 *floor;

	if (hot == NO_HOT) {
		meter--;
		floor = bpf_map_lookup_elem(&cold_floors, &meter);
		return floor ? read_once(floor) : NEVER;
	}
	b = bpf_map_lookup_elem(&hot_buckets, &hot);
	return b ? read_once(&b->copy[read_once(&b->current) & 1].floor) : NEVER;
}

/* Moves the share of t to an instant, or to its beginning if that is later. Raises floor, of a bucket with a
 * burst, where parts grow. */
static __always_inline void advance_terms(struct terms *t, __u64 boot, __u64 burst, __u64 *floor)
{
	struct share *sh = &t->share;
	__u64 began = sh->from;

	order_terms(t);
	boot = time_max(boot, began);
	if (boot >= t->end && t->end < t->alone_at) {
		sh->vtime += share_scale(t->end - sh->from, sh->parts);
		sh->from = t->end;
		sh->parts = time_min(sh->parts, t->between);
	}
	if (boot >= t->alone_at) {
		sh->vtime += share_scale(t->alone_at - sh->from, sh->parts);
		if (began < t->alone_at && sh->parts < t->alone)
			*floor = time_max(*floor, time_sub(sh->vtime, share_scale(burst, sh->parts)));
		sh->from = t->alone_at;
		sh->parts = t->alone;
	}
	sh->vtime += share_scale(boot - sh->from, sh->parts);
}

/* The least value of a bucket at an instant: its time less the credit of burst that it may have. meter
 * is the number of its meter. */
__noinline __u64 share_base(__u32 hot, __u32 meter, __u64 burst, __u64 boot)
{
	__u64 floor = floor_of(hot, meter);
	struct terms *t = load_terms(hot);

	if (!t)
		return NEVER;
	advance_terms(t, boot, burst, &floor);
	return time_max(floor, time_sub(t->share.vtime, share_scale(burst, t->share.parts)));
}

/* The first instant, not before boot, at which a unit may leave a bucket of a value; NEVER if it may
 * not. */
__noinline __u64 share_when(__u32 hot, __u64 value, __u64 boot)
{
	const struct hot_bucket *b = bpf_map_lookup_elem(&hot_buckets, &hot);
	struct terms *t = load_terms(hot);
	int alone = b && read_once(&b->last) <= boot;
	__u64 present;

	if (!t)
		return NEVER;
	present = parts_at(t, boot);
	order_terms(t);
	for (int i = 0; i < 3; i++) {
		__u64 until = i == 0 ? t->end : i == 1 ? t->alone_at : NEVER, when;

		when = t->share.from;
		if (t->share.parts)
			when = time_add(when, share_unscale(time_sub(value, t->share.vtime), t->share.parts));
		when = time_max(when, boot);
		if (t->share.parts && when < until)
			return alone || t->share.parts == present ? when : NEVER;
		t->share.vtime += share_scale(until - t->share.from, t->share.parts);
		t->share.from = until;
		t->share.parts = i == 0 ? time_min(t->share.parts, t->between) : t->alone;
	}
	return NEVER;
}

/* This host's part of a limit on connections in flight. */
static __always_inline __u32 share_of_connections(__u32 max)
{
	__u32 zero = 0, hosts;
	const struct lease_slot *slot = bpf_map_lookup_elem(&leases, &zero);

	hosts = slot ? read_once(&slot->copy[read_once(&slot->current) & 1].hosts) : 0;
	return hosts ? max / hosts : 0;
}
