/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Charging and refunding a packet under one limit. */
#pragma once

#include "calendar.h"
#include "charge_shared.h"

/* When meter number j lets the next unit leave, if its bucket has the virtual time t. Only that of new connections may have
 * windows. */
static __always_inline __u64 meter_depart(const struct meter *m, __u32 j, __u64 t, __u64 now)
{
	return j == METER_NEW ? window_depart(t, m->burst, m->window, now) : bucket_depart(t, m->burst, now);
}

/* Looks up the buckets of limit number for the scratch's packet, and returns when they let it
 * leave, or 0 when the table has no room for one of them. Charges nothing. */
static __always_inline __u64 lookup_and_peek(const struct policy *p, struct scratch *s, __u32 number)
{
	const struct limit *l = &p->limit[number % MAX_LIMITS];
	struct charge *c = &s->charge[number % MAX_LIMITS];
	__u64 hash[2], depart = read_once(&s->now);

	hash_key(p, l, &s->parser.packet, hash);
#pragma unroll
	for (int j = 0; j < METERS; j++) {
		const struct meter *m = &l->meter[j];
		__u64 n = s->parser.packet.segments, *bucket;

		if (!meter_applies(number, j))
			continue;
		c->index[j] = NO_INDEX;
		if (!m->rate.mult)
			continue;
		if (j == METER_BYTES)
			n = s->parser.packet.bytes + n * l->overhead;
		c->cost[j] = rate_cost(&m->rate, n);
		c->hash[j] = mix_hash(m, hash);
		c->index[j] = bucket_index(p, s, m, c->hash[j]);
		if (c->index[j] == NO_INDEX)
			return 0;
		/* A bucket just merged into another one of the same key is found when it is
		 * charged. */
		bucket = bucket_for(c->index[j], tag_of(m, c->hash[j]));
		if (bucket)
			depart = time_max(depart, meter_depart(m, j, read_once(bucket), read_once(&s->now)));
	}
	return depart;
}

/* Charges a bucket where charge failed: it was evicted for another key, of this packet or on
 * another CPU, or another CPU has just charged it. If the charge landed after the eviction,
 * refunds it to the entry's new owner. Returns the bucket's old virtual time, or NO_BUCKET when
 * the table has no room for it. */
__noinline __u64 charge_retry(const struct policy *p, struct scratch *s, __u32 number, __u32 meter, int was_charged)
{
	const struct meter *m;
	struct charge *c;
	__u64 *bucket;

	if (!p || !s || meter >= METERS)
		return NO_BUCKET;
	m = &p->limit[number % MAX_LIMITS].meter[meter];
	c = &s->charge[number % MAX_LIMITS];
	bucket = bucket_at(c->index[meter]);
	/* The eviction may have wiped out the charge already. */
	if (bucket && was_charged && read_once(bucket) >= s->now + c->cost[meter]) {
		monitor_refund(read_once(bucket - LINE_BUCKETS), c->cost[meter]);
		bucket_refund(bucket, c->cost[meter]);
	}
	for (int i = 0; i < 4; i++) {
		c->index[meter] = bucket_get(tag_of(m, c->hash[meter]), first_line(p, c->hash[meter]),
					     second_line(p, c->hash[meter]), s->now, m->backlog_bounds);
		bucket = bucket_for(c->index[meter], tag_of(m, c->hash[meter]));
		if (bucket)
			return bucket_charge(bucket, c->cost[meter], charge_time(p, s, c, number));
	}
	c->index[meter] = NO_INDEX; /* nothing to refund */
	return NO_BUCKET;
}

/* Charges the buckets that lookup_and_peek found, and returns when the packet may leave after all.
 * A charge counts if its key still owns the bucket afterwards: a CPU that evicts a bucket looks at
 * its backlog after it has claimed it. */
static __always_inline __u64 charge(const struct policy *p, struct scratch *s, __u32 number,
				    const struct monitor_owners *owners)
{
	const struct limit *l = &p->limit[number % MAX_LIMITS];
	struct charge *c = &s->charge[number % MAX_LIMITS];
	__u64 depart = read_once(&s->now), at = charge_time(p, s, c, number);

#pragma unroll
	for (int j = 0; j < METERS; j++) {
		const struct meter *m = &l->meter[j];
		__u64 before, own_depart, *bucket;
		int was_charged;

		if (!meter_applies(number, j) || c->index[j] == NO_INDEX)
			continue;
		bucket = bucket_for(c->index[j], tag_of(m, c->hash[j]));
		was_charged = bucket && bucket_try_charge(bucket, c->cost[j], at, &before);
		if (!was_charged || !tag_matches(bucket, tag_of(m, c->hash[j])))
			before = charge_retry(p, s, number, j, was_charged);
		/* NO_BUCKET is beyond any delay: a packet that cannot be charged does not pass. */
		own_depart = meter_depart(m, j, before, read_once(&s->now));
		depart = time_max(depart, own_depart);
		if (j < MONITORED_METERS) {
			c->depart[j] = own_depart;
			s->monitored[j] |= is_monitored(owners, p, l, j, c->hash[j]) << (number % MAX_LIMITS);
		}
	}
	return depart;
}

/* Releases the bookings in a limit's calendars. */
__noinline int release_bookings(const struct policy *p, struct scratch *s, __u32 number)
{
	__u64 bit = 1ULL << number % MAX_LIMITS;

	if (!p || !s)
		return 0;
#pragma unroll
	for (int j = 0; j < RATE_METERS; j++) {
		if (s->booked[j] & bit)
			calendar_unbook(p, s, number % MAX_LIMITS * RATE_METERS + j);
		s->booked[j] &= ~bit;
	}
	return 0;
}

/* Refunds what limit number was charged. */
__noinline int refund(const struct policy *p, struct scratch *s, __u32 number)
{
	const struct limit *l;
	const struct charge *c;

	if (!p || !s)
		return 0;
	l = &p->limit[number % MAX_LIMITS];
	c = &s->charge[number % MAX_LIMITS];
	if (!(number & NEW_CONNS) && p->calendars >> number % MAX_LIMITS & 1) {
		release_bookings(p, s, number);
		count_admitted(l, s, c->delays & 1, -1);
		return 0;
	}
	if (l->shared) {
		refund_shared(p, s, number);
		goto refunded;
	}
#pragma unroll
	for (int j = 0; j < METERS; j++) {
		__u64 *bucket;

		if (!meter_applies(number, j))
			continue;
		bucket = bucket_for(c->index[j], tag_of(&l->meter[j], c->hash[j]));
		if (bucket && j < MONITORED_METERS)
			monitor_overtaken(l, j, c->cost[j]);
		if (bucket)
			bucket_refund(bucket, c->cost[j]);
	}
refunded:
	if (!(number & NEW_CONNS))
		count_admitted(l, s, c->delays & 1, -1);
	return 0;
}

/* Refunds what the limits of set were charged for the packet, and those of new_conns for a
 * connection. */
__noinline int refund_all(const struct policy *p, struct scratch *s, __u64 set, __u64 new_conns)
{
	if (!p || !s)
		return 0;
	for (int i = 0; i < cfg.max_limits && set; i++, set &= set - 1)
		refund(p, s, lowest_bit(set));
	for (int i = 0; i < cfg.max_limits && new_conns; i++, new_conns &= new_conns - 1)
		refund(p, s, lowest_bit(new_conns) | NEW_CONNS);
	return 0;
}
