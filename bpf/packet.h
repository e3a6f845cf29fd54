/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What a packet is: addresses, ports, protocol and length, from Ethernet with up
 * to two VLAN tags, IPv4, IPv6 with extension headers, TCP, UDP and fragments. */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "here.h"
#include "policy.h"

#define ETHERTYPE_IPV4 0x0800
#define ETHERTYPE_IPV6 0x86dd
#define ETHERTYPE_VLAN 0x8100
#define ETHERTYPE_QINQ 0x88a8

#define IPPROTO_HOPOPTS 0
#define IPPROTO_ICMP 1
#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define IPPROTO_ROUTING 43
#define IPPROTO_FRAGMENT 44
#define IPPROTO_AH 51
#define IPPROTO_ICMPV6 58
#define IPPROTO_DSTOPTS 60

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

/* Headers further in than this are not seen. */
#define HEAD 192

/* Nothing shorter is IP. */
#define SHORTEST 20

/* IPv6 extension headers that are looked through: a host need not take each more
 * than once, and destination options twice (RFC 8200, section 4.1). */
#define MAX_EXTENSIONS 7

struct packet {
	__u32 source[4]; /* host order; IPv4 as IPv4-mapped IPv6 */
	__u32 destination[4];
	__u32 bytes;	/* of payload: what IP carries, less a TCP or UDP header; 1 if empty */
	__u32 payload;	/* the same, but 0 if empty */
	__u32 segments; /* packets on the wire */
	__u32 asn;
	__u32 l3; /* offset of the IP header */
	__u32 l4; /* offset of the TCP or UDP header; 0 unless it is all there */
	__u32 tcp_seq;
	__u32 tcp_ack;
	__u16 source_port; /* host order; 0 where there is none */
	__u16 port;	   /* of the destination */
	__u8 protocol;	   /* enum protocol */
	__u8 transport;	   /* as IP numbers it */
	__u8 ipv4;
	__u8 tcp_flags;
};

/* The beginning of a packet, copied, so that it need not be linear. */
struct head {
	__u32 length;	/* of the packet */
	__u32 have;	/* bytes of data */
	__u8 data[264]; /* all that a byte can index, and a word there */
};

/* What IP says of what it carries. */
struct carried {
	__u32 at, end; /* offsets */
	__u32 id;      /* of a fragmented datagram */
	__u8 fragment, first;
};

/* All that parsing needs. It is in a map, not on the stack: what the verifier knows of
 * a map is little, so that many ways through the parser look the same to it. */
struct parser {
	struct head head;
	struct packet packet;
	struct carried carried;
};

/* The first fragment of a datagram leaves its ports for the others, which have
 * none of their own. */
struct fragment {
	__u32 source[4];
	__u32 destination[4];
	__u32 id;
	__u32 transport;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct fragment);
	__type(value, __u32);
} fragments SEC(".maps");

/* Bounds an offset into the head's data for the verifier, which in old kernels loses
 * sight of a comparison. What is beyond the head is not asked for, but for a look
 * ahead whose result is then not used. */
static __always_inline __u64 bounded(__u64 at)
{
	hide(at);
	return at & 0xff;
}

static __always_inline __u32 load8(const struct head *h, __u32 at)
{
	return h->data[bounded(at)];
}

static __always_inline __u32 load16(const struct head *h, __u32 at)
{
	return __builtin_bswap16(*(const __u16 *)(h->data + bounded(at)));
}

static __always_inline __u32 load32(const struct head *h, __u32 at)
{
	return __builtin_bswap32(*(const __u32 *)(h->data + bounded(at)));
}

/* Copies the headers of a packet that has no more of them than most have: Ethernet,
 * IP, and the first 20 bytes of what it carries. Returns how much was copied, or 0 for
 * any other packet. It takes a fifth of the time of a helper that copies any. */
static __always_inline __u32 copy_plain(struct head *h, const void *data, const void *end)
{
	__u64 *to = (__u64 *)h->data;
	const __u64 *from = data;
	const __u8 *byte = data;

	if (!here.ethernet || data + 56 > end)
		return 0;
#pragma unroll
	for (int i = 0; i < 7; i++)
		to[i] = from[i];
	if (byte[12] == ETHERTYPE_IPV4 >> 8 && byte[13] == (ETHERTYPE_IPV4 & 0xff) && byte[14] == 0x45)
		return 56;
	if (byte[12] != ETHERTYPE_IPV6 >> 8 || byte[13] != (ETHERTYPE_IPV6 & 0xff) || data + 80 > end)
		return 0;
	if (byte[20] != IPPROTO_TCP && byte[20] != IPPROTO_UDP && byte[20] != IPPROTO_ICMPV6)
		return 0;
#pragma unroll
	for (int i = 7; i < 10; i++)
		to[i] = from[i];
	return 80;
}

/* Copies the beginning of any packet. */
static __always_inline int copy_tc(struct __sk_buff *skb, struct head *h)
{
	__u64 have = skb->len < HEAD ? skb->len : HEAD;

	if (have < SHORTEST || bpf_skb_load_bytes(skb, 0, h->data, have))
		return 0;
	h->length = skb->len;
	h->have = have;
	return 1;
}

static __always_inline int copy_xdp(struct xdp_md *xdp, struct head *h)
{
	__u64 length = bpf_xdp_get_buff_len(xdp), have = length < HEAD ? length : HEAD;

	if (have < SHORTEST || bpf_xdp_load_bytes(xdp, 0, h->data, have))
		return 0;
	h->length = length;
	h->have = have;
	return 1;
}

/* Whether a parsed packet's sender heeds marks of congestion, and it has none yet
 * (RFC 3168, section 5). */
static __always_inline int markable(const struct parser *p)
{
	__u32 ecn = load16(&p->head, p->packet.l3) >> (p->packet.ipv4 ? 0 : 4) & 3;

	return ecn == 1 || ecn == 2;
}

static __always_inline void load128(const struct head *h, __u32 at, __u32 *to)
{
#pragma unroll
	for (int i = 0; i < 4; i++)
		to[i] = load32(h, at + 4 * i);
}

static __always_inline void fragment_ports(struct packet *k, __u32 id, int first)
{
	struct fragment key = { .id = id, .transport = k->transport };
	__u32 ports = (__u32)k->source_port << 16 | k->port, *seen;

	__builtin_memcpy(key.source, k->source, sizeof(key.source));
	__builtin_memcpy(key.destination, k->destination, sizeof(key.destination));
	if (first) {
		bpf_map_update_elem(&fragments, &key, &ports, BPF_ANY);
		return;
	}
	seen = bpf_map_lookup_elem(&fragments, &key);
	if (seen) {
		k->source_port = *seen >> 16;
		k->port = *seen;
	}
}

/* Whether a length of 0 stands for one beyond 16 bits, of a train of segments. */
static __always_inline int jumbo(__u32 length, __u32 room)
{
	return length == 0 && room > 0xffff;
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
	total = load16(h, l3 + 2);
	if (total > room || jumbo(total, room))
		total = room;
	if (load8(h, l3) >> 4 != 4 || size < 20 || size > total)
		return 0;
	k->ipv4 = 1;
	k->source[2] = k->destination[2] = 0xffff;
	k->source[3] = load32(h, l3 + 12);
	k->destination[3] = load32(h, l3 + 16);
	k->transport = load8(h, l3 + 9);
	offset = load16(h, l3 + 6);
	c->fragment = (offset & 0x3fff) != 0;
	c->first = (offset & 0x1fff) == 0;
	c->id = load16(h, l3 + 4);
	c->at = l3 + size;
	c->end = l3 + total;
	return 1;
}

/* Steps over an extension header. Returns 0 when what comes next is none, or is the
 * rest of a datagram without its headers. */
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
		c->first = (load16(h, at + 2) & 0xfff8) == 0;
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
	total = 40 + load16(h, l3 + 4);
	if (total > room || jumbo(total - 40, room))
		total = room;
	load128(h, l3 + 8, k->source);
	load128(h, l3 + 24, k->destination);
	k->transport = load8(h, l3 + 6);
	c->at = l3 + 40;
	c->end = l3 + total;
	for (int i = 0; i < MAX_EXTENSIONS && step_over(p); i++)
		;
	return 1;
}

static __always_inline void parse_transport(struct parser *p)
{
	const struct head *h = &p->head;
	struct packet *k = &p->packet;
	const struct carried *c = &p->carried;
	__u32 at = c->at, size;

	k->bytes = c->end - at;
	switch (k->transport) {
	case IPPROTO_TCP:
		k->protocol = PROTOCOL_TCP;
		size = load8(h, at + 12) >> 4 << 2;
		break;
	case IPPROTO_UDP:
		k->protocol = PROTOCOL_UDP;
		size = 8;
		break;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		k->protocol = PROTOCOL_ICMP;
		return;
	default:
		return;
	}
	if (c->fragment && !c->first) {
		fragment_ports(k, c->id, 0);
		return;
	}
	if (k->protocol == PROTOCOL_TCP && (size < 20 || at + 20 > h->have))
		return;
	if (at + 8 > h->have || at + size > c->end)
		return;
	k->bytes -= size;
	k->l4 = at;
	k->source_port = load16(h, at);
	k->port = load16(h, at + 2);
	if (k->protocol == PROTOCOL_TCP) {
		k->tcp_seq = load32(h, at + 4);
		k->tcp_ack = load32(h, at + 8);
		k->tcp_flags = load8(h, at + 13);
	}
	if (c->fragment)
		fragment_ports(k, c->id, 1);
}

/* Parses a packet that begins with an Ethernet header, or with an IP one. Returns
 * whether it is IP; nothing else is shaped. A packet whose transport header is cut
 * off, or beyond the head, has port 0. */
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
	parse_transport(p);
	/* As in the proxy, an empty packet counts as one byte. */
	k->payload = k->bytes;
	k->bytes = k->bytes ?: 1;
	return 1;
}
