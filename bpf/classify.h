/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Which limits a packet is under: one lookup for each of its properties gives the
 * limits that the property allows, and the answer is the intersection, as in
 * package shaper. */
#pragma once

#include "packet.h"
#include "policy.h"

struct found {
	__u64 set;
	__u32 asn;
};

static __always_inline void *table_line(void *table, __u32 line)
{
	return bpf_map_lookup_elem(table, &line);
}

static __always_inline __u64 set_at(const struct policy *p, void *table, __u32 i)
{
	struct line *l = table_line(table, p->sets + i / 8);

	return l ? l->word[i % 8] : 0;
}

/* Finds the segment of n: the last one that starts at n or before. */
static __always_inline void find4(const struct policy *p, void *table, const struct segments *s, __u32 n,
				  struct found *c)
{
	__u32 low = 0, high = s->lines; /* the segment's line is in [low, high) */
	struct line4 *l;

	if (s->index) {
		/* The line of the last segment that starts below each /16 or at
		 * its first address: n is there or further on, and no further than
		 * where the next /16 begins. */
		__u32 i = n >> 16;
		struct line *index = table_line(table, s->index + i / 8);

		if (!index)
			return;
		low = index->word[i % 8];
		high = index->word[i % 8] >> 32;
	}
	for (int i = 0; i < 24 && high - low > 1; i++) {
		__u32 mid = (low + high) / 2;

		l = table_line(table, s->line + mid);
		if (!l)
			return;
		if (l->start[0] <= n)
			low = mid;
		else
			high = mid;
	}
	l = table_line(table, s->line + low);
	if (!l)
		return;
	__u32 asn = l->asn[0], set = l->set[0];
#pragma unroll
	for (int i = 1; i < SEGMENTS4; i++) {
		if (l->start[i] <= n && i < l->used) {
			asn = l->asn[i];
			set = l->set[i];
		}
	}
	c->asn = asn;
	c->set = set_at(p, table, set);
}

static __always_inline int at_or_before(const __u64 start[2], const __u64 n[2])
{
	return start[0] < n[0] || (start[0] == n[0] && start[1] <= n[1]);
}

static __always_inline void find6(const struct policy *p, void *table, const struct segments *s, const __u64 n[2],
				  struct found *c)
{
	__u32 low = 0, high = s->lines;
	struct line6 *l;

	for (int i = 0; i < 24 && high - low > 1; i++) {
		__u32 mid = (low + high) / 2;

		l = table_line(table, s->line + mid);
		if (!l)
			return;
		if (at_or_before(l->start[0], n))
			low = mid;
		else
			high = mid;
	}
	l = table_line(table, s->line + low);
	if (!l)
		return;
	__u32 i = l->used > 1 && at_or_before(l->start[1], n);

	c->asn = l->asn[i];
	c->set = set_at(p, table, l->set[i]);
}

/* Finds the class of an address, IPv4 or IPv6. */
static __always_inline void find_address(const struct policy *p, void *table, const struct segments *s4,
					 const struct segments *s6, const __u32 *address, int ipv4, struct found *c)
{
	c->asn = 0;
	if (ipv4) {
		c->set = s4->set;
		if (s4->lines && table)
			find4(p, table, s4, address[3], c);
	} else {
		__u64 n[2] = { (__u64)address[0] << 32 | address[1], (__u64)address[2] << 32 | address[3] };

		c->set = s6->set;
		if (s6->lines && table)
			find6(p, table, s6, n, c);
	}
}

/* Returns the limits that a packet at place is under, and sets its ASN. */
static __always_inline __u64 classify(const struct policy *p, struct packet *k, __u32 place)
{
	__u32 slot = p->slot;
	void *table = bpf_map_lookup_elem(&tables, &slot);
	__u64 set = p->place[place % MAX_PLACES] & p->protocol[k->protocol % PROTOCOLS];
	struct found c;

	find_address(p, table, &p->source4, &p->source6, k->source, k->ipv4, &c);
	k->asn = c.asn;
	set &= c.set;
	if (!set)
		return 0;
	find_address(p, table, &p->destination4, &p->destination6, k->destination, k->ipv4, &c);
	set &= c.set;
	c.set = p->port.set;
	if (p->port.lines && table)
		find4(p, table, &p->port, k->port, &c);
	return set & c.set;
}
