/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Internet checksums (RFC 1071). */
#pragma once

#include "scratch.h"

static __always_inline __u16 csum_fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* The sum of 16-bit words of the packet head. */
static __always_inline __u32 csum_words(const struct head *h, __u32 at, __u32 words)
{
	__u32 sum = 0;

#pragma unroll
	for (__u32 i = 0; i < 20; i++)
		sum += i < words ? load16(h, at + 2 * i) : 0;
	return sum;
}

/* Whether a packet consists of valid IP and TCP headers and nothing else. The TCP checksum is
 * checked elsewhere: see csum_partial. */
__noinline int headers_valid(const struct parser *p)
{
	const struct packet *k;
	__u32 l3, length;

	if (!p)
		return 0;
	k = &p->packet;
	l3 = k->l3;
	length = k->ipv4 ? load16(&p->head, l3 + 2) : 40 + load16(&p->head, l3 + 4);
	return !k->payload && k->l4 == l3 + (k->ipv4 ? 20 : 40) && p->body.end == l3 + length &&
	       (!k->ipv4 || csum_fold(csum_words(&p->head, l3, 10)) == 0xffff);
}

/* Whether the TCP checksum is right. */
__noinline int tcp_csum_valid(const struct parser *p)
{
	const struct packet *k;
	__u32 at, n;
	__u64 sum;

	if (!p)
		return 0;
	k = &p->packet;
	at = k->l4;
	n = p->body.end - at;
	if (n > 60 || at > HEAD_MAX - 60 || at + n > p->head.copied)
		return 0;
	sum = IPPROTO_TCP + n;
#pragma unroll
	for (int i = 0; i < 4; i++) /* the words before an IPv4 address add nothing */
		sum += (__u64)k->source[i] + k->destination[i];
#pragma unroll
	for (__u32 i = 0; i < 30; i++)
		sum += 2 * i < n ? load16(&p->head, at + 2 * i) : 0;
	return csum_fold(sum) == 0xffff;
}

/* Whether the checksum is still to be completed (CHECKSUM_PARTIAL): then bpf_l4_csum_replace
 * without BPF_F_PSEUDO_HDR does not change the field. */
static __noinline int csum_partial(struct __sk_buff *skb, const struct scratch *s)
{
	__u32 at = s->parser.packet.l4 + 16;
	__u16 before, after, one = __builtin_bswap16(1);

	if (bpf_skb_load_bytes(skb, at, &before, sizeof(before)) || bpf_l4_csum_replace(skb, at, 0, one, 2) ||
	    bpf_skb_load_bytes(skb, at, &after, sizeof(after)))
		return 0;
	return before == after || (bpf_l4_csum_replace(skb, at, one, 0, 2), 0);
}

static __noinline int copy_headers_tc(struct __sk_buff *skb, struct scratch *s)
{
	return copy_tc(skb, &s->parser.head);
}

static __noinline int copy_headers_xdp(struct xdp_md *xdp, struct scratch *s)
{
	return copy_xdp(xdp, &s->parser.head);
}

/* Copies all headers of a packet, if some are missing. */
static __always_inline int copy_headers(void *ctx, int xdp, struct scratch *s)
{
	if (s->parser.body.end <= s->parser.head.copied)
		return 1;
	return xdp ? copy_headers_xdp(ctx, s) : copy_headers_tc(ctx, s);
}

/* Whether a receiver accepts a segment without payload, as far as its headers say. */
static __always_inline int segment_valid(void *ctx, int xdp, struct scratch *s)
{
	return copy_headers(ctx, xdp, s) && headers_valid(&s->parser) &&
	       (tcp_csum_valid(&s->parser) || (!xdp && csum_partial(ctx, s)));
}
