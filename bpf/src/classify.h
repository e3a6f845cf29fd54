/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Classification: which limits match a packet. One lookup per attribute returns the limits that
 * match it; the result is their intersection, as in package shaper. */
#pragma once

#include "packet.h"
#include "policy.h"

struct match {
	__u64 set;
	__u32 asn;
};

#define NOT_FOUND (~0ULL)

static __always_inline void *table_line(void *table, __u32 line)
{
	return bpf_map_lookup_elem(table, &line);
}

/* Finds the segment of n: the last one that starts at or before n. Returns its ASN in the lower
 * half and the index of its set in the upper half. */
__noinline __u64 lookup4(__u32 table_id, __u32 line, __u32 lines, __u32 index, __u32 n)
{
	__u32 low = 0, high = lines; /* the segment's line is in [low, high) */
	void *table = bpf_map_lookup_elem(&tables, &table_id);
	struct line4 *l;

	if (!table)
		return NOT_FOUND;
	if (index) {
		/* For each /16: the line of the last segment that starts below it or at its first
		 * address, and the line after the last one that starts in it. */
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

/* Finds the segment of an IPv6 address, like lookup4. line is the root of a tree above the lines
 * of segments; each node has the starts of the four lines below it. The children of node i are 4i
 * + 1 to 4i + 4, as in a heap. */
__noinline __u64 lookup6(__u32 table_id, __u32 line, __u32 lines, __u64 upper, __u64 lower)
{
	__u32 node = 0, first = 0; /* first is the leftmost node at this depth */
	void *table = bpf_map_lookup_elem(&tables, &table_id);
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
	/* The highest address is not below the starts that pad the tree. */
	if (node > first + lines - 1)
		node = first + lines - 1;
	l = table_line(table, line + node);
	if (!l)
		return NOT_FOUND;
	if (l->used > 1 && at_or_before(l->start[1], upper, lower))
		return l->asn[1] | (__u64)l->set[1] << 32;
	return l->asn[0] | (__u64)l->set[0] << 32;
}

/* Returns the set of a lookup's result. */
static __always_inline __u64 load_set(const struct policy *p, __u64 found)
{
	__u32 table_id = p->table, i = found >> 32;
	void *table;
	struct line *l;

	if (found == NOT_FOUND)
		return 0;
	table = bpf_map_lookup_elem(&tables, &table_id);
	l = table ? table_line(table, p->sets + i / 8) : 0;
	return l ? l->word[i % 8] : 0;
}

static __always_inline void match_number(const struct policy *p, const struct segments *s, __u32 n, struct match *m)
{
	__u64 found;

	m->asn = 0;
	m->set = s->set;
	if (!s->lines)
		return;
	found = lookup4(p->table, s->line, s->lines, s->index, n);
	m->asn = found;
	m->set = load_set(p, found);
}

/* Looks up an IPv4 or IPv6 address. */
static __always_inline void match_address(const struct policy *p, const struct segments *s4, const struct segments *s6,
					  const __u32 *address, int ipv4, struct match *m)
{
	__u64 found;

	if (ipv4) {
		match_number(p, s4, address[3], m);
		return;
	}
	m->asn = 0;
	m->set = s6->set;
	if (!s6->lines)
		return;
	found = lookup6(p->table, s6->line, s6->lines, (__u64)address[0] << 32 | address[1],
			(__u64)address[2] << 32 | address[3]);
	m->asn = found;
	m->set = load_set(p, found);
}

/* Returns the limits that match a mark, by any of their values. */
__noinline __u64 match_mark(const struct policy *p, __u32 mark)
{
	struct match m;
	__u64 set;

	if (!p)
		return 0;
	set = ~p->by_mark;
	for (__u32 i = 0; i < MAX_MARK_MASKS && i < p->mark_masks; i++) {
		match_number(p, &p->mark_mask[i].values, mark & p->mark_mask[i].mask, &m);
		set |= m.set;
	}
	return set;
}

/* Returns the limits that match a packet at an attachment, and sets its ASN and country. An attribute that is
 * unknown matches any value. */
static __always_inline __u64 classify(const struct policy *p, struct packet *k, __u32 attach_id)
{
	struct match m;
	__u64 set;

	if (!p || !k)
		return 0;
	set = p->attachment[attach_id % MAX_ATTACHMENTS];
	if (!(k->unknown & UNKNOWN_PROTOCOL))
		set &= p->protocol[k->protocol % PROTOCOLS];
	match_address(p, &p->source4, &p->source6, k->source, k->ipv4, &m);
	k->asn = m.asn;
	set &= m.set;
	if (!set)
		return 0;
	match_address(p, &p->destination4, &p->destination6, k->destination, k->ipv4, &m);
	set &= m.set;
	set &= p->dscp[k->dscp % DSCPS];
	if (set & p->country_keys) {
		match_address(p, &p->country4, &p->country6, k->source, k->ipv4, &m);
		k->country = m.asn;
	}
	if (set & p->by_mark)
		set &= match_mark(p, k->mark);
	if (k->unknown)
		return set;
	match_number(p, &p->port, k->port, &m);
	return set & m.set;
}
