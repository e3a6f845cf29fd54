/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Whether the promise is kept: in any interval no more leaves a bucket than rate x time
 * and what is allowed. It is measured as leaky.Meter does: from when packets leave,
 * without a look at the bucket.
 *
 * A meter for each bucket would double the table, so one bucket of each limit is watched
 * at a time, for bytes and for packets. Where the limit has one bucket it is always that
 * one. Else user space sets the watch free every second, and the next key that comes
 * along gets it.
 *
 * Packets are noted after they were charged, and CPUs may come in another order then. A
 * packet that may have been overtaken so is left out, as is one that meets another CPU
 * at the watch: nobody waits. What is noted is a part of what left, which exceeds nothing
 * that all of it does not exceed: so no race can look like a violation. What has been
 * overtaken is known by when its bucket lets it leave, which is in the order of charges.
 * Since the last one that was noted each other CPU can come with one such packet; more of
 * them are no race, but a bucket that has lost what it owed.
 *
 * Under some limits packets leave in another order than they come in: those with calendars,
 * and those that charge on arrival what others hold for longer. There what leaves is added
 * up by slots of time, and looked at when a slot has passed, in intervals of whole slots.
 *
 * What is allowed is the burst, one unit, and
 *  - where packets are policed, max_delay: so much earlier they leave;
 *  - of a calendar, its slack: see leaky.Slots;
 *  - where a charge was taken back, as the packet was refused after all, a unit for
 *    each other CPU: those that came in between have the places behind it. */
#pragma once

#include "calendar.h"
#include "key.h"

#define WATCHED METER_NEW /* of bytes and of packets */

/* Set while a CPU is at a watch. */
#define WATCH_BUSY (1ULL << 63)

/* Possible CPUs beside the one that a program runs on. */
const volatile __u32 other_cpus;

struct watch {
	__u64 owner;   /* whose bucket it is, see owner_of; 0 is nobody's */
	__u64 left;    /* virtual time, ticks */
	__u64 last;    /* when the bucket let the last one leave, ticks */
	__u64 behind;  /* packets left out since then */
	__u64 latest;  /* when the last one left, ticks; by slots, the one that is looked at next */
	__u64 largest; /* unit since it was idle, ticks */
	__u64 worst;   /* excess, ticks, since user space set it to 0 */
	__u64 allowed; /* the most that one was under this policy, ticks */
	__u64 violations;
	__u64 refunded; /* the largest charge under the limit and this policy that was taken back */
};

struct watch_pair {
	struct watch meter[WATCHED];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, MAX_STATES);
	__type(key, __u32);
	__type(value, struct watch_pair);
} watches SEC(".maps");

/* The owners of the watches once more, in memory that is read by all packets and hardly
 * ever written. */
struct watch_owners {
	__u64 owner[MAX_STATES][WATCHED];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct watch_owners);
} watched SEC(".maps");

static __always_inline struct watch_owners *watch_owners(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&watched, &zero);
}

/* What stands for the bucket of a hash. A policy may have changed its rate: one of
 * another policy is another bucket. */
static __always_inline __u64 owner_of(const struct policy *p, __u64 hash)
{
	return (__u64)(p->generation & 0x7fff) << 48 | (hash & 0xffffffffffffULL);
}

/* 1 if the bucket of a hash is watched, or could be, else 0: without a branch, as the
 * verifier would follow both ways for each meter of each limit. */
static __always_inline __u64 is_watched(const struct watch_owners *w, const struct policy *p, const struct limit *l,
					int meter, __u64 hash)
{
	__u64 owner = load_word(&w->owner[l->state % MAX_STATES][meter]), other = owner ^ owner_of(p, hash);
	__u64 is = ((owner | -owner) >> 63 ^ 1) | ((other | -other) >> 63 ^ 1);

	hide(is);
	return is;
}

static __always_inline struct watch *watch_of(const struct limit *l, __u32 meter)
{
	__u32 i = l->state;
	struct watch_pair *w = bpf_map_lookup_elem(&watches, &i);

	return w && meter < WATCHED ? &w->meter[meter] : 0;
}

/* Takes note that other CPUs may have a place that is better by cost than they should: a
 * charge is about to be taken back, or has others between its parts. */
static __always_inline void watch_overtaken(const struct limit *l, __u32 meter, __u64 cost)
{
	struct watch *w = watch_of(l, meter);

	if (w)
		bucket_merge(&w->refunded, cost);
}

/* The same where all that is known of the bucket is its tag. */
static __always_inline void watch_refund_of(__u64 tag, __u64 cost)
{
	__u32 number = ((tag & ~STAYS) >> 48) - 1, i = number / METERS;
	struct watch_pair *w = bpf_map_lookup_elem(&watches, &i);

	if (w && number % METERS < WATCHED)
		bucket_merge(&w->meter[number % METERS].refunded, cost);
}

/* Takes a watch for owner, whose it is or becomes. */
static __always_inline int watch_take(struct watch *w, const struct limit *l, __u32 meter, __u64 owner)
{
	struct watch_owners *shown = watch_owners();
	__u64 was = load_word(&w->owner);

	if (!shown || (was && was != owner))
		return 0;
	if (__sync_val_compare_and_swap(&w->owner, was, owner | WATCH_BUSY) != was)
		return 0;
	if (was)
		return 1;
	w->left = w->last = w->behind = w->latest = w->largest = 0;
	*(volatile __u64 *)&shown->owner[l->state % MAX_STATES][meter] = owner;
	return 1;
}

/* Notes that the scratch's packet leaves a bucket, if that is the one that is watched. */
static __always_inline void watch(const struct policy *p, struct scratch *s, __u32 number, __u32 meter)
{
	int shaped = here.mode == MODE_SHAPE;
	const struct limit *l = &p->limit[number];
	const struct charge *c = &s->charge[number];
	__u64 owner = owner_of(p, c->hash[meter]), out, own, excess, allowed;
	struct watch *w = watch_of(l, meter);

	if (!w || !watch_take(w, l, meter, owner))
		return;
	own = shaped ? c->own[meter] : s->now;
	if (own < w->last && w->behind < other_cpus) {
		w->behind++;
	} else {
		out = time_max(shaped ? s->decision.depart : s->now, w->latest);
		if (w->left <= out) {
			w->left = out;
			w->largest = 0;
		}
		w->last = own;
		w->latest = out;
		w->behind = 0;
		w->largest = time_max(w->largest, c->cost[meter]);
		w->left = time_add(w->left, c->cost[meter]);
		excess = w->left - out;
		allowed = l->meter[meter].burst + w->largest + (shaped ? 0 : l->max_delay) +
			  other_cpus * load_word(&w->refunded);
		/* In this order: who reads them meanwhile sees no excess without it. */
		*(volatile __u64 *)&w->allowed = time_max(w->allowed, allowed);
		*(volatile __u64 *)&w->worst = time_max(w->worst, excess);
		w->violations += excess > allowed;
	}
	__sync_lock_test_and_set(&w->owner, owner);
}

#define RING (CALENDAR_SLOTS / 2) /* slots, twice as wide as those of calendars */

struct ring {
	__u64 left[RING]; /* ticks */
};

/* What leaves the bucket that is watched of a limit, by limit and meter. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_STATES *WATCHED);
	__type(key, __u32);
	__type(value, struct ring);
} departures SEC(".maps");

/* A look at slots that have passed. */
struct look {
	__u64 slot; /* the first */
	__u64 width;
	__u64 excess; /* in intervals that end with the last one */
	__u64 worst;
	__u64 allowed;
	__u64 violations;
	__u32 ring;
	__u32 others; /* it is of another bucket what is in them */
};

static long look_at(__u32 i, struct look *k)
{
	struct ring *r = bpf_map_lookup_elem(&departures, &k->ring);
	__u64 *left;

	if (!r)
		return 1;
	left = &r->left[(k->slot + i) % RING];
	k->excess = k->others ? 0 : time_sub(k->excess + *left, k->width);
	*left = 0;
	k->worst = time_max(k->worst, k->excess);
	k->violations += k->excess > k->allowed;
	return 0;
}

/* The same where packets leave in another order than they come in. */
__noinline int watch_slots(const struct policy *p, struct scratch *s, __u32 number, __u32 meter)
{
	__u64 owner, shift, slot, passed, cost, hash;
	const struct limit *l;
	const struct meter *m;
	const struct charge *c;
	struct look k = {};
	struct watch *w;
	struct ring *r;

	if (!p || !s || meter >= WATCHED)
		return 0;
	number %= MAX_LIMITS;
	hide(number);
	l = &p->limit[number % MAX_LIMITS];
	m = &l->meter[meter];
	c = &s->charge[number % MAX_LIMITS];
	cost = c->cost[meter];
	hash = c->hash[meter];
	owner = owner_of(p, hash);
	k.ring = calendar_index(l, meter);
	r = bpf_map_lookup_elem(&departures, &k.ring);
	w = watch_of(l, meter);
	if (!r || !w || !watch_take(w, l, meter, owner))
		return 0;
	shift = m->shift + 1 & 63;
	slot = s->now >> shift;
	k.others = !w->latest;
	k.slot = w->latest;
	k.width = 1ULL << shift;
	k.excess = w->left;
	w->largest = time_max(w->largest, cost);
	k.allowed = m->burst + w->largest;
	if (p->calendars >> number % MAX_LIMITS & 1)
		k.allowed = m->burst + ((span_of(m, time_max(w->largest, m->unit)) + 1) << (m->shift & 63));
	k.allowed += other_cpus * time_max(w->largest, load_word(&w->refunded));
	passed = time_sub(slot, w->latest);
	hide(k.excess);
	hide(k.violations);
	hide(k.worst);
	bpf_loop(passed < RING ? passed : RING, look_at, &k, 0);
	*(volatile __u64 *)&w->allowed = time_max(w->allowed, k.allowed);
	*(volatile __u64 *)&w->worst = time_max(w->worst, k.worst);
	w->violations += k.violations;
	w->left = k.excess;
	w->latest = time_max(w->latest, slot);
	slot = s->decision.depart >> shift;
	if (slot - w->latest < RING)
		r->left[slot % RING] += cost;
	__sync_lock_test_and_set(&w->owner, owner);
	return 0;
}

/* Notes that the scratch's packet leaves those of its buckets that are watched, of bytes
 * or of packets. */
__noinline int watch_all(const struct policy *p, struct scratch *s, __u32 meter)
{
	__u64 set, by_slots;

	if (!p || !s || meter >= WATCHED)
		return 0;
	hide(meter);
	set = s->watched[meter % WATCHED];
	by_slots = here.mode == MODE_SHAPE ? p->calendars | p->crossed : 0;
	for (int i = 0; i < here.limits && set; i++, set &= set - 1) {
		if (by_slots & set & -set)
			watch_slots(p, s, lowest(set), meter);
		else
			watch(p, s, lowest(set) % MAX_LIMITS, meter % WATCHED);
	}
	return 0;
}
