/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What is needed of the limits that hosts share, for the daemon, which asks for parts. A hot bucket
 * counts what it was charged and what it refused, and remembers when it was last short: when it
 * refused a packet, or delayed it for SHORT_AFTER. Of the other buckets those are recorded that are
 * short. */
#pragma once

#include "charge_shared.h"

#define SHORT_AFTER (5ULL * 1000 * 1000 * TICKS_PER_NANO)
#define SHORT_KEYS 8192

/* The key of a bucket, whose fields may be in use or not. */
struct short_key {
	__u64 at;	  /* when it was short, ticks of CLOCK_BOOTTIME */
	__u32 address[4]; /* source or destination */
	__u32 asn;
	__u32 limit; /* ID */
	__u16 port;
	__u8 attach_id;
	__u8 new_conns; /* of new connections */
	__u32 country;
};

/* By tag. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SHORT_KEYS);
	__type(key, __u64);
	__type(value, struct short_key);
} short_keys SEC(".maps");

/* Records that the bucket of a meter is short. */
static __always_inline void note_short(const struct policy *p, const struct scratch *s, __u32 number, int j)
{
	const struct limit *l = &p->limit[number % MAX_LIMITS];
	const struct charge *c = &s->charge[number % MAX_LIMITS];
	__u64 tag = tag_of(&l->meter[j], c->hash[j]);
	__u32 hot = hot_of(c->index[j]);
	struct hot_bucket *b = bpf_map_lookup_elem(&hot_buckets, &hot);
	const struct packet *k = &s->parser.packet;
	const __u32 *address = key_address(l, k);
	struct short_key *known, key = {};

	if (b) {
		*(volatile __u64 *)&b->short_at = s->now + s->suspended;
		if (s->decision.verdict == VERDICT_REFUSE)
			__sync_fetch_and_add(&b->used, c->cost[j]);
		return;
	}
	known = bpf_map_lookup_elem(&short_keys, &tag);
	if (known) {
		*(volatile __u64 *)&known->at = s->now + s->suspended;
		return;
	}
	key.at = s->now + s->suspended;
#pragma unroll
	for (int i = 0; i < 4; i++)
		key.address[i] = address[i];
	key.asn = k->asn;
	key.country = k->country;
	key.limit = l->id;
	key.port = k->port;
	key.attach_id = cfg.attach_id;
	key.new_conns = j == METER_NEW;
	bpf_map_update_elem(&short_keys, &tag, &key, BPF_ANY);
}

/* The meter of the limit that has refused or delayed the scratch's packet whose bucket is short, or METERS if
 * none is. Where a queue has no room, it is the one for which the packet would have waited there; a SYN that is
 * retransmitted waits for the first one. */
static __always_inline int short_meter(const struct policy *p, const struct scratch *s, __u32 number)
{
	int rate = p->limit[number].meter[METER_BYTES].rate.mult ? METER_BYTES : METER_PACKETS;
	const struct new_conn *nc = &s->new_conn;
	const struct decision *d = &s->decision;

	if (d->reason == REASON_NEW)
		return METER_NEW;
	if (d->reason == REASON_RATE)
		return rate;
	if (d->reason != REASON_QUEUE_FULL || d->depart == nc->earliest * TICKS_PER_NANO)
		return METERS;
	return d->depart == nc->depart && number == nc->last_limit ? METER_NEW : rate;
}

/* Records that the buckets are short of the limit that has refused or delayed the scratch's packet,
 * and that hosts share. */
__noinline int note_demand(const struct policy *p, const struct scratch *s)
{
	const struct decision *d;
	__u32 number;
	int meter;

	if (!p || !s)
		return 0;
	d = &s->decision;
	number = d->limit % MAX_LIMITS;
	if (d->verdict != VERDICT_REFUSE && d->depart - s->now < SHORT_AFTER)
		return 0;
	meter = short_meter(p, s, number);
	if (meter < METERS)
		note_short(p, s, number, meter);
	return 0;
}

/* Whether the limit that has refused or delayed the scratch's packet is one that hosts share. */
static __always_inline int decided_by_shared(const struct policy *p, const struct scratch *s)
{
	return s->decision.limit < MAX_LIMITS && p->shared >> s->decision.limit % MAX_LIMITS & 1;
}
