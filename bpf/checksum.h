/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Checksums of the Internet (RFC 1071). */
#pragma once

#include "scratch.h"

static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* The sum of 16-bit words of a head. */
static __always_inline __u32 sum_of(const struct head *h, __u32 at, __u32 words)
{
	__u32 sum = 0;

#pragma unroll
	for (__u32 i = 0; i < 20; i++)
		sum += i < words ? load16(h, at + 2 * i) : 0;
	return sum;
}

/* Whether the headers of IP and TCP are all that there is of a packet, and nobody drops it for
 * what they say. Of TCP's checksum, see unsummed. */
__noinline int sound(const struct parser *p)
{
	const struct packet *k;
	__u32 l3, length;

	if (!p)
		return 0;
	k = &p->packet;
	l3 = k->l3;
	length = k->ipv4 ? load16(&p->head, l3 + 2) : 40 + load16(&p->head, l3 + 4);
	return !k->payload && k->l4 == l3 + (k->ipv4 ? 20 : 40) && p->carried.end == l3 + length &&
	       (!k->ipv4 || fold(sum_of(&p->head, l3, 10)) == 0xffff);
}

/* Whether the checksum of a TCP header is right. */
__noinline int summed(const struct parser *p)
{
	const struct packet *k;
	__u32 at, n;
	__u64 sum;

	if (!p)
		return 0;
	k = &p->packet;
	at = k->l4;
	n = p->carried.end - at;
	if (n > 60 || at > HEAD - 60 || at + n > p->head.have)
		return 0;
	sum = IPPROTO_TCP + n;
#pragma unroll
	for (int i = 0; i < 4; i++) /* the words before an IPv4 address count for nothing */
		sum += (__u64)k->source[i] + k->destination[i];
#pragma unroll
	for (__u32 i = 0; i < 30; i++)
		sum += 2 * i < n ? load16(&p->head, at + 2 * i) : 0;
	return fold(sum) == 0xffff;
}

/* Whether a segment has no checksum yet, as somebody makes it later who is told to: a
 * change of the packet leaves alone what stands in its place. */
static __noinline int unsummed(struct __sk_buff *skb, const struct scratch *s)
{
	__u32 at = s->parser.packet.l4 + 16;
	__u16 was, is, one = __builtin_bswap16(1);

	if (bpf_skb_load_bytes(skb, at, &was, sizeof(was)) || bpf_l4_csum_replace(skb, at, 0, one, 2) ||
	    bpf_skb_load_bytes(skb, at, &is, sizeof(is)))
		return 0;
	return was == is || (bpf_l4_csum_replace(skb, at, one, 0, 2), 0);
}

static __noinline int copy_all_tc(struct __sk_buff *skb, struct scratch *s)
{
	return copy_tc(skb, &s->parser.head);
}

static __noinline int copy_all_xdp(struct xdp_md *xdp, struct scratch *s)
{
	return copy_xdp(xdp, &s->parser.head);
}

/* Copies all headers of a packet of which not all were copied. */
static __always_inline int complete(void *ctx, int xdp, struct scratch *s)
{
	if (s->parser.carried.end <= s->parser.head.have)
		return 1;
	return xdp ? copy_all_xdp(ctx, s) : copy_all_tc(ctx, s);
}

/* Whether a segment without payload comes to where it is sent, as far as its headers say. */
static __always_inline int intact(void *ctx, int xdp, struct scratch *s)
{
	return complete(ctx, xdp, s) && sound(&s->parser) && (summed(&s->parser) || (!xdp && unsummed(ctx, s)));
}
