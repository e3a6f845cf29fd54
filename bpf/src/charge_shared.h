/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Charging and refunding a packet under one limit that hosts share: as charge.h does it, in the time
 * of its buckets. */
#pragma once

#include "counters.h"
#include "key.h"
#include "conformance.h"

/* Returned when the table has no room for a bucket, or its time is not known: it never drains. */
#define NO_BUCKET (~0ULL)

/* Added to a limit's number to select its meter of new connections, instead of those of bytes and
 * packets. */
#define NEW_CONNS MAX_LIMITS

static __always_inline int meter_applies(__u32 number, int meter)
{
	return !(number & NEW_CONNS) == (meter != METER_NEW);
}

/* The time that is charged. In general it is the packet's departure. It is its arrival where
 * packets are policed, as they leave now, and under limits with many buckets whose packets other
 * limits may delay for longer. New connections are charged on arrival, by the clock of their bucket. */
static __always_inline __u64 charge_time(const struct policy *p, const struct scratch *s, const struct charge *c,
					 __u32 number)
{
	if (number & NEW_CONNS)
		return read_once(&c->conn_clock);
	if (cfg.mode == MODE_POLICE || p->charge_on_arrival >> number % MAX_LIMITS & 1)
		return read_once(&s->now);
	return read_once(&s->decision.depart);
}

/* When the bucket at an index, which has a value, lets the scratch's packet leave. */
__noinline __u64 shared_depart(const struct scratch *s, __u32 index, __u64 value)
{
	__u32 hot = hot_of(index);
	const struct hot_bucket *b = bpf_map_lookup_elem(&hot_buckets, &hot);
	__u64 when;

	if (!s)
		return NEVER;
	when = share_when(hot, value, s->now + s->suspended);
	if (b && cfg.mode == MODE_SHAPE)
		when = time_max(when, read_once(&b->last)); /* nothing is overtaken, even if parts have just grown */
	return when - s->suspended;
}

/* Records when the scratch's packet leaves that the bucket at an index was charged for: by it alone, and by
 * all limits. One that would wait for longer than max_delay is refused. */
__noinline int record_departure(const struct scratch *s, __u32 index, __u64 own_depart, __u64 max_delay)
{
	__u32 hot = hot_of(index);
	struct hot_bucket *b = bpf_map_lookup_elem(&hot_buckets, &hot);
	__u64 depart;

	if (!s || !b || cfg.mode != MODE_SHAPE || own_depart - s->now > max_delay)
		return 0;
	depart = time_max(own_depart, final_depart(s));
	if (depart == s->now)
		return 0;
	bucket_raise(&b->last, own_depart + s->suspended);
	bucket_raise(&b->empty_at, depart + s->suspended);
	return 0;
}

/* Charges the bucket at an index that has a tag, hot or not, at a time of its own, and returns its old
 * value; or returns NO_BUCKET if it was evicted, or the time is NEVER: a charge would wrap, and leave
 * nothing of its backlog. */
__noinline __u64 charge_shared_bucket(__u32 index, __u64 tag, __u64 cost, __u64 at)
{
	__u32 hot = hot_of(index);
	struct hot_bucket *b = bpf_map_lookup_elem(&hot_buckets, &hot);
	__u64 before, *bucket;

	if (at == NEVER)
		return NO_BUCKET;
	if (b) {
		__sync_fetch_and_add(&b->used, cost);
		return bucket_charge(&b->value, cost, at);
	}
	bucket = bucket_for(index, tag);
	if (!bucket)
		return NO_BUCKET;
	before = bucket_charge(bucket, cost, at);
	if (tag_matches(bucket, tag))
		return before;
	if (read_once(bucket) >= at + cost)
		bucket_refund(bucket, cost);
	return NO_BUCKET;
}

__noinline int refund_shared_bucket(__u32 index, __u64 tag, __u64 cost)
{
	__u32 hot = hot_of(index);
	struct hot_bucket *b = bpf_map_lookup_elem(&hot_buckets, &hot);
	__u64 *bucket;

	if (b) {
		__sync_fetch_and_sub(&b->used, cost);
		bucket_refund(&b->value, cost);
		return 0;
	}
	bucket = bucket_for(index, tag);
	if (bucket)
		bucket_refund(bucket, cost);
	return 0;
}

/* When the bucket at an index that has a tag lets the scratch's packet leave. */
__noinline __u64 peek_shared_bucket(const struct scratch *s, __u32 index, __u64 tag)
{
	__u32 hot = hot_of(index);
	const struct hot_bucket *b = bpf_map_lookup_elem(&hot_buckets, &hot);
	__u64 *bucket;

	if (!s)
		return NEVER;
	if (b)
		return shared_depart(s, index, read_once(&b->value));
	bucket = bucket_for(index, tag);
	return shared_depart(s, index, bucket ? read_once(bucket) : 0);
}

/* Sets the costs and hashes of the scratch's packet under limit number, and the indexes of its buckets
 * that are hot. */
__noinline int price_shared(const struct policy *p, struct scratch *s, __u32 number)
{
	const struct limit *l;
	struct charge *c;
	__u64 hash[2];

	if (!p || !s)
		return 0;
	l = &p->limit[number % MAX_LIMITS];
	c = &s->charge[number % MAX_LIMITS];
	hash_key(p, l, &s->parser.packet, hash);
#pragma unroll
	for (int j = 0; j < METERS; j++) {
		const struct meter *m = &l->meter[j];
		__u64 n = s->parser.packet.segments;

		if (!meter_applies(number, j))
			continue;
		if (j == METER_BYTES)
			n = s->parser.packet.bytes + n * l->overhead;
		c->cost[j] = rate_cost(&m->rate, n);
		c->hash[j] = mix_hash(m, hash);
		c->index[j] = hot_index(tag_of(m, c->hash[j]));
	}
	return 0;
}

/* As lookup_and_peek. */
__noinline __u64 peek_shared(const struct policy *p, struct scratch *s, __u32 number)
{
	const struct limit *l;
	struct charge *c;
	__u64 depart;

	if (!p || !s)
		return 0;
	price_shared(p, s, number);
	l = &p->limit[number % MAX_LIMITS];
	c = &s->charge[number % MAX_LIMITS];
	depart = s->now;
#pragma unroll
	for (int j = 0; j < METERS; j++) {
		const struct meter *m = &l->meter[j];

		if (!meter_applies(number, j) || !m->rate.mult)
			continue;
		if (c->index[j] == NO_INDEX)
			c->index[j] = bucket_get(tag_of(m, c->hash[j]), first_line(p, c->hash[j]),
						 second_line(p, c->hash[j]), s->now, m->backlog_bounds);
		if (c->index[j] == NO_INDEX)
			return 0;
		depart = time_max(depart, peek_shared_bucket(s, c->index[j], tag_of(m, c->hash[j])));
	}
	return depart;
}

/* Refunds what limit number was charged. */
__noinline int refund_shared(const struct policy *p, struct scratch *s, __u32 number)
{
	const struct limit *l;
	const struct charge *c;

	if (!p || !s)
		return 0;
	l = &p->limit[number % MAX_LIMITS];
	c = &s->charge[number % MAX_LIMITS];
#pragma unroll
	for (int j = 0; j < METERS; j++) {
		if (!meter_applies(number, j) || c->index[j] == NO_INDEX)
			continue;
		if (j < MONITORED_METERS)
			monitor_overtaken(l, j, c->cost[j]);
		refund_shared_bucket(c->index[j], tag_of(&l->meter[j], c->hash[j]), c->cost[j]);
	}
	return 0;
}

/* Charges the buckets that peek_shared found, and returns when they let the packet leave, or 0 if one
 * of them could not be charged, and nothing is. */
__noinline __u64 try_charge_shared(const struct policy *p, struct scratch *s, __u32 number)
{
	const struct monitor_owners *owners = get_monitor_owners();
	const struct limit *l;
	__u64 depart, boot;
	struct charge *c;

	if (!p || !s || !owners)
		return NEVER;
	l = &p->limit[number % MAX_LIMITS];
	c = &s->charge[number % MAX_LIMITS];
	depart = s->now;
	boot = charge_time(p, s, c, number) + s->suspended;
#pragma unroll
	for (int j = 0; j < METERS; j++) {
		const struct meter *m = &l->meter[j];
		__u64 before, own_depart;

		if (!meter_applies(number, j) || c->index[j] == NO_INDEX)
			continue;
		before = charge_shared_bucket(c->index[j], tag_of(m, c->hash[j]), c->cost[j],
					      share_base(hot_of(c->index[j]), tag_meter(m->tag), m->burst, boot));
		if (before == NO_BUCKET) {
			c->index[j] = NO_INDEX;
			if (j == METER_PACKETS && c->index[METER_BYTES] != NO_INDEX)
				refund_shared_bucket(c->index[METER_BYTES],
						     tag_of(&l->meter[METER_BYTES], c->hash[METER_BYTES]),
						     c->cost[METER_BYTES]);
			return 0;
		}
		own_depart = shared_depart(s, c->index[j], before);
		depart = time_max(depart, own_depart);
		record_departure(s, c->index[j], own_depart, number & NEW_CONNS ? l->queue_timeout : l->max_delay);
		if (j < MONITORED_METERS) {
			c->depart[j] = own_depart;
			s->monitored[j] |= is_monitored(owners, p, l, j, c->hash[j]) << (number % MAX_LIMITS);
		}
	}
	return depart;
}

/* As charge. */
static __always_inline __u64 charge_shared(const struct policy *p, struct scratch *s, __u32 number)
{
	struct charge *c = &s->charge[number % MAX_LIMITS];
	__u64 depart;

	for (int i = 0; i < 2; i++) {
		depart = try_charge_shared(p, s, number);
		if (depart)
			return depart;
		peek_shared(p, s, number);
	}
#pragma unroll
	for (int j = 0; j < METERS; j++)
		if (meter_applies(number, j))
			c->index[j] = NO_INDEX; /* nothing to refund */
	return NEVER;
}
