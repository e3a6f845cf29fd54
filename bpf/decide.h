/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Decides over a packet, as Shaper.Decide does: all limits of a set take it, or the
 * first that does not refuses it and none is charged.
 *
 * First every limit is asked, which writes nothing; then all are charged. Another
 * CPU may have charged one of them in between: what a charge finds is what counts,
 * and when that is beyond max_delay after all, everything is refunded. So a bucket
 * never admits more than its rate, whoever else is at it, and one that is full is
 * only read. */
#pragma once

#include "classify.h"
#include "packet.h"
#include "table.h"

/* As package shaper numbers them. */
enum verdict {
	VERDICT_PASS,
	VERDICT_DELAY,
	VERDICT_REFUSE,
};

enum reason {
	REASON_NONE,
	REASON_RATE,
	REASON_QUEUE_FULL,
	REASON_CONNECTIONS,
	REASON_NEW,
	REASON_WAIT_TIMEOUT,
	REASON_WAITING_FULL,
	REASON_CLIENT_GONE,
	REASON_MEMORY_FULL,
};

#define NO_LIMIT (~0U)

struct decision {
	__u64 depart; /* ticks, not before now */
	__u32 verdict;
	__u32 reason;
	__u32 limit; /* that delayed it longest, or refused it; NO_LIMIT when it passed */
	__u32 mark;  /* beyond the limit's mark_delay */
};

#define WAITS 16 /* bounds of shaper.HistogramBounds */

/* What a limit has done, on one CPU. */
struct state {
	__u64 taken[2][2];     /* at once, later: bytes, packets */
	__u64 refused[2];      /* queue full: bytes, packets */
	__u64 memory_full[2];  /* no place in the table: bytes, packets */
	__u64 marked;	       /* packets */
	__u64 wait[WAITS + 1]; /* packets by class of wait, the last one beyond all bounds */
	__u64 waited;	       /* ns */
	__u64 connections;     /* let through */
	__u64 connections_delayed;
	__u64 over_connections; /* SYNs refused */
	__u64 over_new;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MAX_STATES);
	__type(key, __u32);
	__type(value, struct state);
} states SEC(".maps");

/* What a limit is to charge for a packet, by meter. */
#define GONE (~0ULL)

struct charge {
	__u64 cost[METERS];
	__u64 hash[METERS];
	__u32 place[METERS]; /* NOWHERE where it charges nothing */
	__u32 pad;
};

/* What does not fit onto the stack. A program runs to its end before the next one
 * begins on the same CPU. */
struct scratch {
	struct parser parser;
	struct decision decision;
	struct charge charge[MAX_LIMITS];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct scratch);
} scratches SEC(".maps");

/* The number of the lowest bit of a set that is not empty (Leiserson, Prokop and
 * Randall, "Using de Bruijn sequences to index a 1 in a computer word", 1998). */
static const __u8 lowest_bit[64] = {
	0,  1,	2,  53, 3,  7,	54, 27, 4,  38, 41, 8,	34, 55, 48, 28, 62, 5,	39, 46, 44, 42,
	22, 9,	24, 35, 59, 56, 49, 18, 29, 11, 63, 52, 6,  26, 37, 40, 33, 47, 61, 45, 43, 21,
	23, 58, 17, 10, 51, 25, 36, 32, 60, 20, 57, 16, 50, 31, 19, 15, 30, 14, 13, 12,
};

static __always_inline __u32 lowest(__u64 set)
{
	return lowest_bit[((set & -set) * 0x022fdd63cc95386dULL) >> 58];
}

/* Adds a word of a key to its hash: multilinear hashing, whose upper 32 bits are
 * strongly universal (Lemire and Kaser, "Strongly universal string hashing is
 * fast", 2014). */
#define HASH(word, n)                                                                                                  \
	({                                                                                                             \
		hash[0] += p->hash[n][0] * (word);                                                                     \
		hash[1] += p->hash[n][1] * (word);                                                                     \
	})

/* Hashes what of a packet is in the key of a limit. */
static __always_inline void hash_key(const struct policy *p, const struct limit *l, const struct packet *k, __u32 place,
				     __u64 hash[2])
{
	hash[0] = hash[1] = 0;
	if (l->fields & KEY_SOURCE) {
		const __u32 *mask = l->mask[!k->ipv4];

#pragma unroll
		for (int i = 0; i < 4; i++)
			HASH((__u64)(k->source[i] & mask[i]), i);
	}
	if (l->fields & KEY_ASN)
		HASH((__u64)k->asn, 4);
	if (l->fields & (KEY_PORT | KEY_ATTACH)) {
		__u64 word = (l->fields & KEY_PORT ? k->port : 0) | (__u64)(l->fields & KEY_ATTACH ? place + 1 : 0)
									    << 16;

		HASH(word, 5);
	}
	if (l->fields & KEY_CONNECTION) {
#pragma unroll
		for (int i = 0; i < 4; i++) {
			HASH((__u64)k->source[i], 6 + i);
			HASH((__u64)k->destination[i], 10 + i);
		}
		HASH((__u64)k->source_port << 16 | k->port, 14);
		HASH((__u64)k->transport, 15);
	}
}

/* Joins a meter's hash and a key's to one of 64 bits. */
static __always_inline __u64 join(const struct meter *m, const __u64 hash[2])
{
	return ((m->hash[0] + hash[0]) & 0xffffffff00000000ULL) | (m->hash[1] + hash[1]) >> 32;
}

static __always_inline __u64 tag_of(const struct meter *m, __u64 hash)
{
	return m->id | (hash & 0xffffffffffffULL);
}

/* Returns the place of a meter's bucket in the table. */
static __always_inline __u32 place_of(const struct policy *p, const struct meter *m, __u64 hash, __u64 now)
{
	__u32 first = (hash >> 32) * p->bucket_lines >> 32;
	__u32 second = (hash * 0x9e3779b97f4a7c15ULL >> 32) * p->bucket_lines >> 32;

	return table_place(tag_of(m, hash), first, second, now);
}

static __always_inline struct state *state_of(const struct limit *l)
{
	__u32 i = l->state;

	return bpf_map_lookup_elem(&states, &i);
}

static __always_inline void count_wait(struct state *s, __u64 ticks)
{
	/* shaper.HistogramBounds, in ns. */
	static const __u64 bounds[WAITS] = {
		100000,	  250000,    500000,	1000000,   2500000,    5000000,	   10000000,   25000000,
		50000000, 100000000, 250000000, 500000000, 1000000000, 2500000000, 5000000000, 10000000000,
	};
	__u64 wait = (ticks + TICKS_PER_NANO - 1) / TICKS_PER_NANO;
	__u64 class = 0;

#pragma unroll
	for (int i = 0; i < WAITS; i++)
		class += (bounds[i] - wait) >> 63; /* without a branch: 16 of them make 65,536 paths */
	hide(class);
	if (class <= WAITS)
		s->wait[class]++;
	s->waited += wait;
}

static __always_inline void refuse(struct decision *d, __u32 limit, __u32 reason, __u64 depart)
{
	d->verdict = VERDICT_REFUSE;
	d->reason = reason;
	d->limit = limit;
	d->depart = depart;
}

/* Counts a packet that a limit refused. */
__noinline int count_refused(const struct policy *p, const struct scratch *s)
{
	struct state *to;

	if (!p || !s)
		return 0;
	to = state_of(&p->limit[s->decision.limit % MAX_LIMITS]);
	if (!to)
		return 0;
	if (s->decision.reason == REASON_QUEUE_FULL) {
		to->refused[0] += s->parser.packet.bytes;
		to->refused[1] += s->parser.packet.segments;
	} else {
		to->memory_full[0] += s->parser.packet.bytes;
		to->memory_full[1] += s->parser.packet.segments;
	}
	return 0;
}

/* Counts a packet that all limits of set took, and those of delayed hold back. */
__noinline int count_taken(const struct policy *p, const struct scratch *s, __u64 set, __u64 delayed, __u64 now)
{
	if (!p || !s)
		return 0;
	for (int i = 0; i < MAX_LIMITS && set; i++, set &= set - 1) {
		__u32 number = lowest(set) % MAX_LIMITS;
		struct state *to = state_of(&p->limit[number]);
		__u64 *taken;

		if (!to)
			return 0;
		taken = to->taken[delayed >> number & 1];
		taken[0] += s->parser.packet.bytes;
		taken[1] += s->parser.packet.segments;
	}
	if (delayed) {
		struct state *to = state_of(&p->limit[s->decision.limit % MAX_LIMITS]);

		if (!to)
			return 0;
		to->marked += s->decision.mark;
		count_wait(to, s->decision.depart - now);
	}
	return 0;
}

/* Finds what limit number is to charge for the scratch's packet, and when it lets it
 * leave. Returns 0 when there is no place for one of its buckets. */
__noinline __u64 quote(const struct policy *p, struct scratch *s, __u32 number, __u32 place, __u64 now)
{
	__u64 hash[2], depart = now;
	const struct limit *l;
	struct charge *c;

	if (!p || !s)
		return 0;
	l = &p->limit[number % MAX_LIMITS];
	c = &s->charge[number % MAX_LIMITS];
	hash_key(p, l, &s->parser.packet, place, hash);
#pragma unroll
	for (int j = METER_BYTES; j <= METER_PACKETS; j++) {
		const struct meter *m = &l->meter[j];
		__u64 n = s->parser.packet.segments, *bucket;

		c->place[j] = NOWHERE;
		if (!m->rate.mult)
			continue;
		if (j == METER_BYTES)
			n = s->parser.packet.bytes + n * l->overhead;
		c->cost[j] = rate_cost(&m->rate, n);
		c->hash[j] = join(m, hash);
		c->place[j] = place_of(p, m, c->hash[j], now);
		bucket = bucket_at(c->place[j], tag_of(m, c->hash[j]));
		if (!bucket)
			return 0;
		depart = time_max(depart, bucket_depart(load_word(bucket), m->burst, now));
	}
	return depart;
}

/* Charges the bucket of tag at a place, and returns it as it was before, or GONE when
 * another key has taken the place. */
__noinline __u64 charge_place(__u32 place, __u64 tag, __u64 cost, __u64 now)
{
	__u64 *bucket = bucket_at(place, tag);

	return bucket ? bucket_charge(bucket, cost, now) : GONE;
}

/* Charges what was quoted, and returns when the packet may leave after all. */
__noinline __u64 charge(const struct policy *p, struct scratch *s, __u32 number, __u64 now)
{
	const struct limit *l;
	struct charge *c;
	__u64 depart = now;

	if (!p || !s)
		return 0;
	l = &p->limit[number % MAX_LIMITS];
	c = &s->charge[number % MAX_LIMITS];
#pragma unroll
	for (int j = METER_BYTES; j <= METER_PACKETS; j++) {
		const struct meter *m = &l->meter[j];
		__u64 tag = tag_of(m, c->hash[j]), before;

		if (c->place[j] == NOWHERE)
			continue;
		before = charge_place(c->place[j], tag, c->cost[j], now);
		if (before == GONE) {
			/* It had drained, and made room for a key of this very packet
			 * or on another CPU. */
			c->place[j] = place_of(p, m, c->hash[j], now);
			before = charge_place(c->place[j], tag, c->cost[j], now);
		}
		if (before != GONE)
			depart = time_max(depart, bucket_depart(before, m->burst, now));
	}
	return depart;
}

/* Takes back what was charged. */
__noinline int refund(const struct policy *p, const struct scratch *s, __u32 number)
{
	const struct limit *l;
	const struct charge *c;

	if (!p || !s)
		return 0;
	l = &p->limit[number % MAX_LIMITS];
	c = &s->charge[number % MAX_LIMITS];
#pragma unroll
	for (int j = METER_BYTES; j <= METER_PACKETS; j++) {
		__u64 *bucket = bucket_at(c->place[j], tag_of(&l->meter[j], c->hash[j]));

		if (bucket)
			bucket_refund(bucket, c->cost[j]);
	}
	return 0;
}

/* Decides over the scratch's packet at now, under the limits of set; see package
 * shaper for what becomes of it. */
__noinline int decide(const struct policy *p, struct scratch *s, __u64 set, __u32 place, __u64 now)
{
	__u64 paced, delayed = 0, left;
	struct decision *d;

	if (!p || !s)
		return 0;
	paced = set & p->paced;
	d = &s->decision;
	d->depart = now;
	d->verdict = VERDICT_PASS;
	d->reason = REASON_NONE;
	d->limit = NO_LIMIT;
	d->mark = 0;

	left = paced;
	for (int i = 0; i < MAX_LIMITS && left; i++, left &= left - 1) {
		__u32 number = lowest(left) % MAX_LIMITS;
		__u64 depart = quote(p, s, number, place, now);

		if (!depart) {
			refuse(d, number, REASON_MEMORY_FULL, now);
			goto refused;
		}
		if (depart - now > p->limit[number].max_delay) {
			refuse(d, number, REASON_QUEUE_FULL, depart);
			goto refused;
		}
	}

	left = paced;
	for (int i = 0; i < MAX_LIMITS && left; i++, left &= left - 1) {
		__u32 number = lowest(left) % MAX_LIMITS;
		__u64 depart = charge(p, s, number, now);

		delayed |= (__u64)(depart > now) << number;
		if (depart > d->depart) {
			d->depart = depart;
			d->limit = number;
		}
		if (depart - now > p->limit[number].max_delay)
			refuse(d, number, REASON_QUEUE_FULL, depart);
	}
	if (d->verdict == VERDICT_REFUSE) {
		left = paced;
		for (int i = 0; i < MAX_LIMITS && left; i++, left &= left - 1)
			refund(p, s, lowest(left));
		goto refused;
	}

	if (d->depart > now) {
		d->verdict = VERDICT_DELAY;
		d->reason = REASON_RATE;
		d->mark = d->depart - now > p->limit[d->limit % MAX_LIMITS].mark_delay;
	}
	return count_taken(p, s, set, delayed, now);
refused:
	return count_refused(p, s);
}
