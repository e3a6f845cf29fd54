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

#define NOT_FOUND (~0ULL)

static __always_inline void *table_line(void *table, __u32 line)
{
	return bpf_map_lookup_elem(table, &line);
}

/* Finds the segment of n, the last one that starts at n or before, in a table's lines.
 * Returns its ASN in the lower half and the number of its set in the upper one. */
__noinline __u64 find4(__u32 slot, __u32 line, __u32 lines, __u32 index, __u32 n)
{
	__u32 low = 0, high = lines; /* the segment's line is in [low, high) */
	void *table = bpf_map_lookup_elem(&tables, &slot);
	struct line4 *l;

	if (!table)
		return NOT_FOUND;
	if (index) {
		/* The line of the last segment that starts below each /16 or at its
		 * first address, and the one after the last that starts in it. */
		__u32 upper = n >> 16;
		struct line *i = table_line(table, index + upper / 8);

		if (!i)
			return NOT_FOUND;
		low = i->word[upper % 8];
		high = i->word[upper % 8] >> 32;
	}
	for (int i = 0; i < 24 && high - low > 1; i++) {
		__u32 mid = (low + high) / 2;

		l = table_line(table, line + mid);
		if (!l)
			return NOT_FOUND;
		if (l->start[0] <= n)
			low = mid;
		else
			high = mid;
	}
	l = table_line(table, line + low);
	if (!l)
		return NOT_FOUND;
	__u64 found = l->asn[0] | (__u64)l->set[0] << 32;
#pragma unroll
	for (int i = 1; i < SEGMENTS4; i++)
		if (l->start[i] <= n && i < l->used)
			found = l->asn[i] | (__u64)l->set[i] << 32;
	return found;
}

static __always_inline __u32 at_or_before(const __u64 start[2], __u64 upper, __u64 lower)
{
	return (start[0] < upper) | ((start[0] == upper) & (start[1] <= lower));
}

/* The same for an address of IPv6. Above the lines that hold segments stands a tree of
 * lines with the starts of four below each; line is its root. The children of the tree's
 * node i are 4i + 1 and the next three, as in a heap. */
__noinline __u64 find6(__u32 slot, __u32 line, __u32 lines, __u64 upper, __u64 lower)
{
	__u32 node = 0, first = 0; /* first is the leftmost node of the same depth */
	void *table = bpf_map_lookup_elem(&tables, &slot);
	struct line6 *l;

	if (!table)
		return NOT_FOUND;
	for (__u64 leaves = 1; leaves < 1 << 24 && leaves < lines; leaves *= 4) {
		const struct node6 *n = table_line(table, line + node);

		if (!n)
			return NOT_FOUND;
		node = 4 * node + 1 + at_or_before(n->start[1], upper, lower) +
		       at_or_before(n->start[2], upper, lower) + at_or_before(n->start[3], upper, lower);
		first = 4 * first + 1;
	}
	/* The highest address is at or behind what fills up the tree. */
	if (node > first + lines - 1)
		node = first + lines - 1;
	l = table_line(table, line + node);
	if (!l)
		return NOT_FOUND;
	if (l->used > 1 && at_or_before(l->start[1], upper, lower))
		return l->asn[1] | (__u64)l->set[1] << 32;
	return l->asn[0] | (__u64)l->set[0] << 32;
}

/* Returns the set that a search found. */
static __always_inline __u64 set_found(const struct policy *p, __u64 found)
{
	__u32 slot = p->slot, i = found >> 32;
	void *table;
	struct line *l;

	if (found == NOT_FOUND)
		return 0;
	table = bpf_map_lookup_elem(&tables, &slot);
	l = table ? table_line(table, p->sets + i / 8) : 0;
	return l ? l->word[i % 8] : 0;
}

static __always_inline void find_number(const struct policy *p, const struct segments *s, __u32 n, struct found *c)
{
	__u64 found;

	c->asn = 0;
	c->set = s->set;
	if (!s->lines)
		return;
	found = find4(p->slot, s->line, s->lines, s->index, n);
	c->asn = found;
	c->set = set_found(p, found);
}

/* Finds the class of an address, IPv4 or IPv6. */
static __always_inline void find_address(const struct policy *p, const struct segments *s4, const struct segments *s6,
					 const __u32 *address, int ipv4, struct found *c)
{
	__u64 found;

	if (ipv4) {
		find_number(p, s4, address[3], c);
		return;
	}
	c->asn = 0;
	c->set = s6->set;
	if (!s6->lines)
		return;
	found = find6(p->slot, s6->line, s6->lines, (__u64)address[0] << 32 | address[1],
		      (__u64)address[2] << 32 | address[3]);
	c->asn = found;
	c->set = set_found(p, found);
}

/* Returns the limits that a packet at place is under, and sets its ASN. What cannot be
 * told of it counts as any. */
static __always_inline __u64 classify(const struct policy *p, struct packet *k, __u32 place)
{
	struct found c;
	__u64 set;

	if (!p || !k)
		return 0;
	set = p->place[place % MAX_PLACES];
	if (!(k->unknown & UNKNOWN_PROTOCOL))
		set &= p->protocol[k->protocol % PROTOCOLS];
	find_address(p, &p->source4, &p->source6, k->source, k->ipv4, &c);
	k->asn = c.asn;
	set &= c.set;
	if (!set)
		return 0;
	find_address(p, &p->destination4, &p->destination6, k->destination, k->ipv4, &c);
	set &= c.set;
	if (k->unknown)
		return set;
	find_number(p, &p->port, k->port, &c);
	return set & c.set;
}
