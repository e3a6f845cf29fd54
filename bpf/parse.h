/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Parses packets: Ethernet with up to two VLAN tags, IPv4, IPv6 with extension headers,
 * TCP, UDP and fragments. What Linux delivers is what counts: where the headers say one
 * thing and Linux does another, it is Linux that is followed. */
#pragma once

#include "fragments.h"
#include "packet.h"

/* A frame of Ethernet carries no less. */
#define PADDING 46

/* IPv6 extension headers that are looked through: a host need not take each more
 * than once, and destination options twice (RFC 8200, section 4.1). */
#define MAX_EXTENSIONS 7

#define EXTENSIONS                                                                                                     \
	(1ULL << IPPROTO_HOPOPTS | 1ULL << IPPROTO_ROUTING | 1ULL << IPPROTO_FRAGMENT | 1ULL << IPPROTO_AH |           \
	 1ULL << IPPROTO_DSTOPTS)

/* Where a packet ends that is length long by its header, 0 if that does not say, of room
 * bytes. Linux takes all there is of a train of segments without a length, and of IPv6
 * with a hop-by-hop header. What pads a short frame to Ethernet's least is no part of the
 * packet; more than that goes over the wire like anything else. */
static __always_inline __u32 length_of(__u32 length, __u32 none, __u32 room)
{
	return length == none || length > room || room - length > PADDING ? room : length;
}

static __always_inline int parse_ipv4(struct parser *p)
{
	const struct head *h = &p->head;
	struct packet *k = &p->packet;
	struct carried *c = &p->carried;
	__u32 l3 = k->l3, room = h->length - l3, size, total, offset;

	if (l3 + 20 > h->have)
		return 0;
	size = (load8(h, l3) & 0xf) << 2;
	total = length_of(load16(h, l3 + 2), 0, room);
	if (load8(h, l3) >> 4 != 4 || size < 20 || size > total)
		return 0;
	k->ipv4 = 1;
	k->source[2] = k->destination[2] = 0xffff;
	k->source[3] = load32(h, l3 + 12);
	k->destination[3] = load32(h, l3 + 16);
	k->transport = load8(h, l3 + 9);
	offset = load16(h, l3 + 6);
	c->fragment = (offset & 0x3fff) != 0;
	c->offset = offset & 0x1fff;
	c->first = !c->offset;
	c->id = load16(h, l3 + 4);
	c->at = l3 + size;
	c->end = l3 + total;
	return 1;
}

/* Steps over an extension header. Returns 0 when there is none, or one that is not all
 * there, or when what comes next is the rest of a datagram without its headers. */
__noinline int step_over(struct parser *p)
{
	const struct head *h;
	struct packet *k;
	struct carried *c;
	__u32 at, size;

	if (!p)
		return 0;
	h = &p->head;
	k = &p->packet;
	c = &p->carried;
	at = c->at;
	size = (load8(h, at + 1) + 1) << 3;

	switch (k->transport) {
	case IPPROTO_HOPOPTS:
	case IPPROTO_ROUTING:
	case IPPROTO_DSTOPTS:
		break;
	case IPPROTO_AH:
		size = (load8(h, at + 1) + 2) << 2;
		break;
	case IPPROTO_FRAGMENT:
		size = 8;
		break;
	default:
		return 0;
	}
	if (at + size > c->end || at + 8 > h->have)
		return 0;
	if (k->transport == IPPROTO_FRAGMENT) {
		c->fragment = (load16(h, at + 2) & 0xfff9) != 0;
		c->offset = load16(h, at + 2) >> 3;
		c->first = !c->offset;
		c->id = load32(h, at + 4);
	}
	k->transport = load8(h, at);
	c->at += size;
	return !c->fragment || c->first;
}

static __always_inline int parse_ipv6(struct parser *p)
{
	const struct head *h = &p->head;
	struct packet *k = &p->packet;
	struct carried *c = &p->carried;
	__u32 l3 = k->l3, room = h->length - l3, total;

	if (l3 + 40 > h->have || load8(h, l3) >> 4 != 6)
		return 0;
	total = length_of(40 + load16(h, l3 + 4), 40, room);
	load128(h, l3 + 8, k->source);
	load128(h, l3 + 24, k->destination);
	k->transport = load8(h, l3 + 6);
	c->at = l3 + 40;
	c->end = l3 + total;
	for (int i = 0; i < MAX_EXTENSIONS && step_over(p); i++)
		;
	/* One of those was not to be seen, or is one too many. */
	if (k->transport < 64 && EXTENSIONS >> k->transport & 1)
		k->unknown = UNKNOWN_PORTS | UNKNOWN_PROTOCOL;
	return 1;
}

/* Finds the header of TCP or UDP. One that the end of its packet cuts off nobody takes. */
static __always_inline void parse_transport(struct parser *p)
{
	const struct head *h = &p->head;
	struct packet *k = &p->packet;
	const struct carried *c = &p->carried;
	__u32 at = c->at, least = 8, size = 8, more = c->fragment || c->end > h->have;

	k->protocol = protocol_of(k->transport);
	k->hidden = k->unknown;
	if (k->unknown || (k->protocol != PROTOCOL_TCP && k->protocol != PROTOCOL_UDP))
		return;
	if (at + 8 > h->have || at + 8 > c->end) {
		k->unknown = more ? UNKNOWN_PORTS : 0;
		k->hidden = more && k->protocol == PROTOCOL_TCP;
		return;
	}
	if (k->protocol == PROTOCOL_TCP) {
		least = 20;
		size = load8(h, at + 12) >> 4 << 2;
	}
	if (at + least > h->have || at + size > c->end || size < least) {
		/* The ports are there, if it is more than that. */
		k->hidden = more && k->protocol == PROTOCOL_TCP;
		if (!more)
			return;
		size = 0;
	}
	k->bytes -= size;
	k->source_port = load16(h, at);
	k->port = load16(h, at + 2);
	if (!size)
		return;
	k->l4 = at;
	if (k->protocol == PROTOCOL_TCP) {
		k->tcp_seq = load32(h, at + 4);
		k->tcp_ack = load32(h, at + 8);
		k->tcp_flags = load8(h, at + 13);
	}
}

/* Parses a packet that begins with an Ethernet header, or with an IP one. Returns
 * whether it is IP; nothing else is shaped. */
static __always_inline int parse(struct parser *p, int ethernet)
{
	const struct head *h;
	struct packet *k;
	__u32 type = 0, l3 = 0;
	int ok;

	if (!p)
		return 0;
	h = &p->head;
	k = &p->packet;
	__builtin_memset(k, 0, sizeof(*k));
	p->carried.fragment = 0;
	if (ethernet) {
		l3 = 14;
		type = load16(h, 12);
#pragma unroll
		for (int i = 0; i < 2; i++) {
			if (type != ETHERTYPE_VLAN && type != ETHERTYPE_QINQ)
				break;
			type = load16(h, l3 + 2);
			l3 += 4;
		}
	} else if (load8(h, 0) >> 4 == 4) {
		type = ETHERTYPE_IPV4;
	} else if (load8(h, 0) >> 4 == 6) {
		type = ETHERTYPE_IPV6;
	}
	if (l3 > h->have)
		return 0;
	k->l3 = l3;
	if (type == ETHERTYPE_IPV4)
		ok = parse_ipv4(p);
	else if (type == ETHERTYPE_IPV6)
		ok = parse_ipv6(p);
	else
		return 0;
	if (!ok)
		return 0;
	k->bytes = p->carried.end - p->carried.at;
	if (!p->carried.fragment || p->carried.first)
		parse_transport(p);
	k->fragment = p->carried.fragment;
	k->payload = k->bytes + k->fragment; /* of a fragmented one it is more than is here */
	if (p->carried.fragment)
		fragment(p);
	/* As in the proxy, an empty packet counts as one byte. */
	k->bytes = k->bytes ?: 1;
	return 1;
}
