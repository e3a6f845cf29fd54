/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packet metadata: addresses, ports, protocol and length, and the copy of the headers that they
 * are parsed from. */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "config.h"
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

/* No header beyond this offset is parsed. */
#define HEAD_MAX 192

/* The minimum length of an IP packet. */
#define MIN_IP 20

struct packet {
	__u32 source[4]; /* host order; IPv4 as IPv4-mapped IPv6 */
	__u32 destination[4];
	__u32 bytes;	/* of payload: the IP payload less a TCP or UDP header; 1 if empty */
	__u32 payload;	/* like bytes, but 0 if empty */
	__u32 segments; /* packets on the wire */
	__u32 asn;
	__u32 l3; /* offset of the IP header */
	__u32 l4; /* offset of the TCP or UDP header; 0 unless it is complete */
	__u32 tcp_seq;
	__u32 tcp_ack;
	__u32 dst_mac;	   /* low 32 bits; it and the next three only for TCP of the initiator */
	__u32 mark;	   /* of the skb */
	__u32 country;	   /* of the source, if it is in a key; 0 if unknown */
	__u16 source_port; /* host order; 0 if there is none */
	__u16 port;	   /* destination port */
	__u8 protocol;	   /* enum protocol */
	__u8 transport;	   /* IP protocol number */
	__u8 ipv4;
	__u8 tcp_flags;
	__u8 unknown; /* enum unknown_part */
	__u8 ttl;
	__u8 no_options; /* the TCP header has no options */
	__u8 rst_valid;	 /* an RST whose headers are valid */
	__u8 fragment;
	__u8 dscp;
	__u8 untrackable; /* may contain a SYN, or part of one, that cannot be tracked */
};

/* Attributes of a packet that are unknown: it matches the limits of all protocols, or ports. */
enum unknown_part {
	UNKNOWN_PORTS = 1 << 0,
	UNKNOWN_PROTOCOL = 1 << 1,
};

/* A copy of the beginning of the packet, which need not be linear. */
struct head {
	__u32 length;	/* of the packet */
	__u32 copied;	/* bytes in data */
	__u8 data[264]; /* any index of 8 bits, and a word there */
};

/* The location of the IP payload, and its fragment. */
struct ip_body {
	__u32 at, end; /* offsets */
	__u32 id;      /* of a fragmented datagram */
	__u32 offset;  /* of the fragment, in units of 8 bytes */
	__u8 fragment, first;
};

/* The state of the parser. It is in a map, not on the stack: the verifier tracks no values there,
 * so it can prune many paths through the parser. */
struct parser {
	struct head head;
	struct packet packet;
	struct ip_body body;
};

/* Bounds an offset into the head's data for the verifier, which in old kernels loses the result of
 * a comparison. Offsets beyond the head occur only in speculative loads, whose result is not used. */
static __always_inline __u64 head_index(__u64 at)
{
	barrier_var(at);
	return at & 0xff;
}

static __always_inline __u32 load8(const struct head *h, __u32 at)
{
	return h->data[head_index(at)];
}

static __always_inline __u32 load16(const struct head *h, __u32 at)
{
	return __builtin_bswap16(*(const __u16 *)(h->data + head_index(at)));
}

static __always_inline __u32 load32(const struct head *h, __u32 at)
{
	return __builtin_bswap32(*(const __u32 *)(h->data + head_index(at)));
}

/* Copies the headers of a common packet: Ethernet, IP, and the first 20 bytes of its payload.
 * Returns the number of bytes, or 0 for any other packet. It takes a fifth of the time of the
 * helpers below. */
static __always_inline __u32 copy_fast(struct head *h, const void *data, const void *end)
{
	__u64 *to = (__u64 *)h->data;
	const __u64 *from = data;
	const __u8 *byte = data;

	if (!cfg.ethernet || data + 56 > end)
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
	__u64 n = skb->len < HEAD_MAX ? skb->len : HEAD_MAX;

	if (n < MIN_IP || bpf_skb_load_bytes(skb, 0, h->data, n))
		return 0;
	h->length = skb->len;
	h->copied = n;
	return 1;
}

static __always_inline int copy_xdp(struct xdp_md *xdp, struct head *h)
{
	__u64 length = bpf_xdp_get_buff_len(xdp), n = length < HEAD_MAX ? length : HEAD_MAX;

	if (n < MIN_IP || bpf_xdp_load_bytes(xdp, 0, h->data, n))
		return 0;
	h->length = length;
	h->copied = n;
	return 1;
}

/* The traffic class of a packet: its DSCP, and the ECN codepoint in the lower two bits (RFC 2474, RFC 3168). */
static __always_inline __u32 traffic_class(const struct parser *p)
{
	return load16(&p->head, p->packet.l3) >> (p->packet.ipv4 ? 0 : 4) & 0xff;
}

/* Whether a packet is ECN-capable and not marked yet (RFC 3168, section 5). */
static __always_inline int is_ect(const struct parser *p)
{
	__u32 ecn = traffic_class(p) & 3;

	return ecn == 1 || ecn == 2;
}

static __always_inline void load128(const struct head *h, __u32 at, __u32 *to)
{
#pragma unroll
	for (int i = 0; i < 4; i++)
		to[i] = load32(h, at + 4 * i);
}

static __always_inline __u8 protocol_of(__u8 transport)
{
	switch (transport) {
	case IPPROTO_TCP:
		return PROTOCOL_TCP;
	case IPPROTO_UDP:
		return PROTOCOL_UDP;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		return PROTOCOL_ICMP;
	}
	return PROTOCOL_OTHER;
}
