/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Conformance monitoring: in any interval, no more leaves a bucket than rate x time plus the
 * allowed excess. It is measured like leaky.Meter does, from the departures only, independently of
 * the bucket.
 *
 * A monitor per bucket would double the table, so each limit has one for bytes and one for
 * packets. With a single bucket, it is always that one. Otherwise user space frees the monitor
 * every second, and the next key that comes along gets it.
 *
 * Packets are recorded after they are charged, and CPUs may arrive in another order. A packet that
 * may have been overtaken is skipped, as is one that finds another CPU at the monitor, so no CPU
 * waits. The recorded packets are a part of those that left, so they exceed nothing that all
 * together do not: no race can look like a violation. Overtaken packets are recognized by the
 * departure time from their bucket, which is in the order of charges. Between two recorded packets
 * each other CPU can arrive with one such packet. More of them are not a race, but a bucket that
 * has lost backlog.
 *
 * Under some limits packets leave out of order: those with calendars, and those that charge on
 * arrival packets that others delay for longer. There departures are added up by slots of time,
 * and checked in intervals of whole slots, once a slot has passed.
 *
 * The allowed excess is the burst, one unit, and
 *  - where packets are policed, max_delay: they leave that much earlier;
 *  - of a calendar, its slack: see leaky.Slots;
 *  - after a refund, as a packet was refused after all, a unit for each other CPU: packets
 *    charged in between depart after it. */
#pragma once

#include "calendar.h"
#include "key.h"

#define MONITORED_METERS METER_NEW /* of bytes and of packets */

/* The bits of an owner: of the bucket's hash, then of the policy's generation. */
enum owner_bits {
	OWNER_GENERATION_SHIFT = 48,
	OWNER_BUSY_BIT = 63, /* set while a CPU uses the monitor */
};

#define OWNER_BUSY (1ULL << OWNER_BUSY_BIT)
#define OWNER_HASH_MASK ((1ULL << OWNER_GENERATION_SHIFT) - 1)
#define OWNER_GENERATION_MASK ((1U << (OWNER_BUSY_BIT - OWNER_GENERATION_SHIFT)) - 1)

/* Possible CPUs besides the current one. */
const volatile __u32 other_cpus;

struct monitor {
	__u64 owner;	   /* see owner_of; 0 is none */
	__u64 vtime;	   /* virtual time, ticks */
	__u64 last_depart; /* departure of the last packet by its bucket, ticks */
	__u64 skipped;	   /* packets skipped since then */
	__u64 latest;	   /* departure of the last packet, ticks; by slots, the next slot to check */
	__u64 max_unit;	   /* largest unit since it was idle, ticks */
	__u64 max_excess;  /* since user space reset it, ticks */
	__u64 allowed;	   /* largest allowed excess under this policy, ticks */
	__u64 violations;
	__u64 max_refund; /* largest refund under the limit and this policy, ticks */
};

struct monitor_pair {
	struct monitor meter[MONITORED_METERS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, MAX_LIMIT_IDS);
	__type(key, __u32);
	__type(value, struct monitor_pair);
} monitors SEC(".maps");

/* The owners of the monitors once more, in memory that all packets read and few write. */
struct monitor_owners {
	__u64 owner[MAX_LIMIT_IDS][MONITORED_METERS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct monitor_owners);
} monitor_owners SEC(".maps");

static __always_inline struct monitor_owners *get_monitor_owners(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&monitor_owners, &zero);
}

/* Identifies the bucket of a hash. It includes the policy's generation, which may have changed the
 * rate. */
static __always_inline __u64 owner_of(const struct policy *p, __u64 hash)
{
	return (__u64)(p->generation & OWNER_GENERATION_MASK) << OWNER_GENERATION_SHIFT | (hash & OWNER_HASH_MASK);
}

/* Whether the bucket of a hash is monitored, or could be, 0 or 1: without a branch, as the
 * verifier would check both ways for each meter of each limit. */
static __always_inline __u64 is_monitored(const struct monitor_owners *owners, const struct policy *p,
					  const struct limit *l, int meter, __u64 hash)
{
	__u64 owner = read_once(&owners->owner[l->id % MAX_LIMIT_IDS][meter]), other = owner ^ owner_of(p, hash);
	__u64 monitored = ((owner | -owner) >> 63 ^ 1) | ((other | -other) >> 63 ^ 1);

	barrier_var(monitored);
	return monitored;
}

static __always_inline struct monitor *monitor_of(const struct limit *l, __u32 meter)
{
	__u32 i = l->id;
	struct monitor_pair *pair = bpf_map_lookup_elem(&monitors, &i);

	return pair && meter < MONITORED_METERS ? &pair->meter[meter] : 0;
}

/* Records that packets on other CPUs may leave too early by cost: a charge is about to be
 * refunded, or others are between its parts. */
static __always_inline void monitor_overtaken(const struct limit *l, __u32 meter, __u64 cost)
{
	struct monitor *mon = monitor_of(l, meter);

	if (mon)
		bucket_raise(&mon->max_refund, cost);
}

/* The same for a bucket of which only the tag is known. */
static __always_inline void monitor_refund(__u64 tag, __u64 cost)
{
	__u32 number = tag_meter(tag) - 1, i = number / METERS;
	struct monitor_pair *pair = bpf_map_lookup_elem(&monitors, &i);

	if (pair && number % METERS < MONITORED_METERS)
		bucket_raise(&pair->meter[number % METERS].max_refund, cost);
}

/* Locks a monitor for an owner that has it already, or gets it now. */
static __always_inline int monitor_lock(struct monitor *mon, const struct limit *l, __u32 meter, __u64 owner)
{
	struct monitor_owners *owners = get_monitor_owners();
	__u64 old = read_once(&mon->owner);

	if (!owners || (old && old != owner))
		return 0;
	if (__sync_val_compare_and_swap(&mon->owner, old, owner | OWNER_BUSY) != old)
		return 0;
	if (old)
		return 1;
	mon->vtime = mon->last_depart = mon->skipped = mon->latest = mon->max_unit = 0;
	*(volatile __u64 *)&owners->owner[l->id % MAX_LIMIT_IDS][meter] = owner;
	return 1;
}

/* Records the departure of the scratch's packet from a bucket, if that is monitored. */
static __always_inline void monitor_packet(const struct policy *p, struct scratch *s, __u32 number, __u32 meter)
{
	int shaped = cfg.mode == MODE_SHAPE;
	const struct limit *l = &p->limit[number];
	const struct charge *c = &s->charge[number];
	__u64 owner = owner_of(p, c->hash[meter]), out, own_depart, excess, allowed;
	struct monitor *mon = monitor_of(l, meter);

	if (!mon || !monitor_lock(mon, l, meter, owner))
		return;
	own_depart = shaped ? c->depart[meter] : s->now;
	if (own_depart < mon->last_depart && mon->skipped < other_cpus) {
		mon->skipped++;
	} else {
		out = time_max(shaped ? s->decision.depart : s->now, mon->latest);
		if (mon->vtime <= out) {
			mon->vtime = out;
			mon->max_unit = 0;
		}
		mon->last_depart = own_depart;
		mon->latest = out;
		mon->skipped = 0;
		mon->max_unit = time_max(mon->max_unit, c->cost[meter]);
		mon->vtime = time_add(mon->vtime, c->cost[meter]);
		excess = mon->vtime - out;
		allowed = l->meter[meter].burst + mon->max_unit + (shaped ? 0 : l->max_delay) +
			  other_cpus * read_once(&mon->max_refund);
		/* In this order: a concurrent reader sees no excess without what allows it. */
		*(volatile __u64 *)&mon->allowed = time_max(mon->allowed, allowed);
		*(volatile __u64 *)&mon->max_excess = time_max(mon->max_excess, excess);
		mon->violations += excess > allowed;
	}
	__sync_lock_test_and_set(&mon->owner, owner);
}

#define RING_SLOTS (CALENDAR_SLOTS / 2) /* each twice as wide as a calendar's */

struct ring {
	__u64 departed[RING_SLOTS]; /* ticks */
};

/* Departures from the monitored buckets, by limit ID and meter. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_LIMIT_IDS *MONITORED_METERS);
	__type(key, __u32);
	__type(value, struct ring);
} departures SEC(".maps");

/* The state of a scan of slots that have passed. */
struct ring_scan {
	__u64 slot; /* the first */
	__u64 width;
	__u64 excess; /* of intervals that end with the slot before */
	__u64 max_excess;
	__u64 allowed;
	__u64 violations;
	__u32 ring;
	__u32 stale; /* of another bucket */
};

static long scan_slot(__u32 i, struct ring_scan *scan)
{
	struct ring *r = bpf_map_lookup_elem(&departures, &scan->ring);
	__u64 *departed;

	if (!r)
		return 1;
	departed = &r->departed[(scan->slot + i) % RING_SLOTS];
	scan->excess = scan->stale ? 0 : time_sub(scan->excess + *departed, scan->width);
	*departed = 0;
	scan->max_excess = time_max(scan->max_excess, scan->excess);
	scan->violations += scan->excess > scan->allowed;
	return 0;
}

/* The same where packets leave out of order. */
__noinline int monitor_slots(const struct policy *p, struct scratch *s, __u32 number, __u32 meter)
{
	__u64 owner, shift, slot, passed, cost, hash;
	const struct limit *l;
	const struct meter *m;
	const struct charge *c;
	struct ring_scan scan = {};
	struct monitor *mon;
	struct ring *r;

	if (!p || !s || meter >= MONITORED_METERS)
		return 0;
	number %= MAX_LIMITS;
	barrier_var(number);
	l = &p->limit[number % MAX_LIMITS];
	m = &l->meter[meter];
	c = &s->charge[number % MAX_LIMITS];
	cost = c->cost[meter];
	hash = c->hash[meter];
	owner = owner_of(p, hash);
	scan.ring = calendar_index(l, meter);
	r = bpf_map_lookup_elem(&departures, &scan.ring);
	mon = monitor_of(l, meter);
	if (!r || !mon || !monitor_lock(mon, l, meter, owner))
		return 0;
	shift = m->slot_shift + 1 & 63;
	slot = s->now >> shift;
	scan.stale = !mon->latest;
	scan.slot = mon->latest;
	scan.width = 1ULL << shift;
	scan.excess = mon->vtime;
	mon->max_unit = time_max(mon->max_unit, cost);
	scan.allowed = m->burst + mon->max_unit;
	if (p->calendars >> number % MAX_LIMITS & 1)
		scan.allowed = m->burst + ((max_span(m, time_max(mon->max_unit, m->unit)) + 1) << (m->slot_shift & 63));
	scan.allowed += other_cpus * time_max(mon->max_unit, read_once(&mon->max_refund));
	passed = time_sub(slot, mon->latest);
	barrier_var(scan.excess);
	barrier_var(scan.violations);
	barrier_var(scan.max_excess);
	bpf_loop(passed < RING_SLOTS ? passed : RING_SLOTS, scan_slot, &scan, 0);
	*(volatile __u64 *)&mon->allowed = time_max(mon->allowed, scan.allowed);
	*(volatile __u64 *)&mon->max_excess = time_max(mon->max_excess, scan.max_excess);
	mon->violations += scan.violations;
	mon->vtime = scan.excess;
	mon->latest = time_max(mon->latest, slot);
	slot = s->decision.depart >> shift;
	if (slot - mon->latest < RING_SLOTS)
		r->departed[slot % RING_SLOTS] += cost;
	__sync_lock_test_and_set(&mon->owner, owner);
	return 0;
}

/* Records the departure of the scratch's packet from those of its buckets that are monitored, for
 * one meter. */
__noinline int monitor_all(const struct policy *p, struct scratch *s, __u32 meter)
{
	__u64 set, by_slots;

	if (!p || !s || meter >= MONITORED_METERS)
		return 0;
	barrier_var(meter);
	set = s->monitored[meter % MONITORED_METERS];
	by_slots = cfg.mode == MODE_SHAPE ? p->calendars | p->charge_on_arrival : 0;
	for (int i = 0; i < cfg.max_limits && set; i++, set &= set - 1) {
		if (by_slots & set & -set)
			monitor_slots(p, s, lowest_bit(set), meter);
		else
			monitor_packet(p, s, lowest_bit(set) % MAX_LIMITS, meter % MONITORED_METERS);
	}
	return 0;
}
