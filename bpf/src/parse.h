/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The parser: Ethernet with up to two VLAN tags, IPv4, IPv6 with extension headers, TCP, UDP and
 * fragments. Where headers are inconsistent it follows Linux: what Linux delivers is what counts. */
#pragma once

#include "fragments.h"
#include "packet.h"

/* The minimum payload of an Ethernet frame. */
#define ETH_MIN_PAYLOAD 46

/* IPv6 extension headers to skip. A host need not accept each more than once, and destination
 * options twice (RFC 8200, section 4.1). */
#define MAX_EXTENSIONS 7

#define EXTENSION_HEADERS                                                                                              \
	(1ULL << IPPROTO_HOPOPTS | 1ULL << IPPROTO_ROUTING | 1ULL << IPPROTO_FRAGMENT | 1ULL << IPPROTO_AH |           \
	 1ULL << IPPROTO_DSTOPTS)

/* The length of a packet: length by its header, which is unset where there is none, of room bytes.
 * Linux accepts all bytes of a GSO packet without a length, and of IPv6 with a hop-by-hop header.
 * Padding of a short Ethernet frame is not part of the packet; more than that is traffic like any
 * other. */
static __always_inline __u32 packet_length(__u32 length, __u32 unset, __u32 room)
{
	return length == unset || length > room || room - length > ETH_MIN_PAYLOAD ? room : length;
}

static __always_inline int parse_ipv4(struct parser *p)
{
	const struct head *h = &p->head;
	struct packet *k = &p->packet;
	struct ip_body *b = &p->body;
	__u32 l3 = k->l3, room = h->length - l3, size, total, offset;

	if (l3 + 20 > h->copied)
		return 0;
	size = (load8(h, l3) & 0xf) << 2;
	total = packet_length(load16(h, l3 + 2), 0, room);
	if (load8(h, l3) >> 4 != 4 || size < 20 || size > total)
		return 0;
	k->ipv4 = 1;
	k->source[2] = k->destination[2] = 0xffff;
	k->source[3] = load32(h, l3 + 12);
	k->destination[3] = load32(h, l3 + 16);
	k->transport = load8(h, l3 + 9);
	offset = load16(h, l3 + 6);
	b->fragment = (offset & 0x3fff) != 0;
	b->offset = offset & 0x1fff;
	b->first = !b->offset;
	b->id = load16(h, l3 + 4);
	b->at = l3 + size;
	b->end = l3 + total;
	return 1;
}

/* Skips an extension header. Returns 0 when there is none, when it is incomplete, or when a
 * fragment without the following headers comes next. */
__noinline int skip_extension(struct parser *p)
{
	const struct head *h;
	struct packet *k;
	struct ip_body *b;
	__u32 at, size;

	if (!p)
		return 0;
	h = &p->head;
	k = &p->packet;
	b = &p->body;
	at = b->at;
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
	if (at + size > b->end || at + 8 > h->copied)
		return 0;
	if (k->transport == IPPROTO_FRAGMENT) {
		b->fragment = (load16(h, at + 2) & 0xfff9) != 0;
		b->offset = load16(h, at + 2) >> 3;
		b->first = !b->offset;
		b->id = load32(h, at + 4);
	}
	k->transport = load8(h, at);
	b->at += size;
	return !b->fragment || b->first;
}

static __always_inline int parse_ipv6(struct parser *p)
{
	const struct head *h = &p->head;
	struct packet *k = &p->packet;
	struct ip_body *b = &p->body;
	__u32 l3 = k->l3, room = h->length - l3, total;

	if (l3 + 40 > h->copied || load8(h, l3) >> 4 != 6)
		return 0;
	total = packet_length(40 + load16(h, l3 + 4), 40, room);
	load128(h, l3 + 8, k->source);
	load128(h, l3 + 24, k->destination);
	k->transport = load8(h, l3 + 6);
	b->at = l3 + 40;
	b->end = l3 + total;
	for (int i = 0; i < MAX_EXTENSIONS && skip_extension(p); i++)
		;
	/* The next extension header is beyond the head, or is one too many. */
	if (k->transport < 64 && EXTENSION_HEADERS >> k->transport & 1)
		k->unknown = UNKNOWN_PORTS | UNKNOWN_PROTOCOL;
	return 1;
}

/* Parses the TCP or UDP header. No receiver accepts a packet that is too short for it. */
static __always_inline void parse_transport(struct parser *p)
{
	const struct head *h = &p->head;
	struct packet *k = &p->packet;
	const struct ip_body *b = &p->body;
	__u32 at = b->at, min_size = 8, size = 8, more = b->fragment || b->end > h->copied;

	k->protocol = protocol_of(k->transport);
	k->untrackable = k->unknown;
	if (k->unknown || (k->protocol != PROTOCOL_TCP && k->protocol != PROTOCOL_UDP))
		return;
	if (at + 8 > h->copied || at + 8 > b->end) {
		k->unknown = more ? UNKNOWN_PORTS : 0;
		k->untrackable = more && k->protocol == PROTOCOL_TCP;
		return;
	}
	if (k->protocol == PROTOCOL_TCP) {
		min_size = 20;
		size = load8(h, at + 12) >> 4 << 2;
	}
	if (at + min_size > h->copied || at + size > b->end || size < min_size) {
		/* The ports are present even if the rest of the header is in another fragment, or
		 * beyond the head. */
		k->untrackable = more && k->protocol == PROTOCOL_TCP;
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

/* Parses a packet that begins with an Ethernet or an IP header. Returns whether it is IP; nothing
 * else is shaped. */
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
	p->body.fragment = 0;
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
	if (l3 > h->copied)
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
	k->dscp = traffic_class(p) >> 2;
	k->bytes = p->body.end - p->body.at;
	if (!p->body.fragment || p->body.first)
		parse_transport(p);
	k->fragment = p->body.fragment;
	k->payload = k->bytes + k->fragment; /* of a fragmented one, more than is here */
	if (p->body.fragment)
		track_fragment(p);
	/* As in the proxy, an empty packet counts as one byte. */
	k->bytes = k->bytes ?: 1;
	return 1;
}
