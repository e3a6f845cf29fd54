/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The reply to a refused SYN: the packet itself, turned into an RST like that of a host without a
 * listener (RFC 9293, section 3.5.2). */
#pragma once

#include "enforce.h"

#define TCP_HEADER 20

/* Fix-ups needed in addition to rewriting the head. */
struct rst_fixup {
	__u32 length;	  /* new length of the packet */
	__u32 l4;	  /* offset of the TCP header */
	__u32 old_length; /* previous TCP length */
	__u32 csum_diff;  /* change of the sum of the TCP header's words */
	__u32 csum;	  /* full checksum of the TCP header */
};

static __always_inline void store8(struct head *h, __u32 at, __u8 n)
{
	h->data[head_index(at)] = n;
}

static __always_inline void store16(struct head *h, __u32 at, __u16 n)
{
	*(__u16 *)(h->data + head_index(at)) = __builtin_bswap16(n);
}

static __always_inline void store32(struct head *h, __u32 at, __u32 n)
{
	*(__u32 *)(h->data + head_index(at)) = __builtin_bswap32(n);
}

static __always_inline void swap32(struct head *h, __u32 a, __u32 b)
{
	__u32 n = load32(h, a);

	store32(h, a, load32(h, b));
	store32(h, b, n);
}

/* Turns the SYN whose head is in the scratch, with all its options, into an RST. Returns 0 for a
 * SYN that is better dropped: with payload or IP options. */
__noinline int make_rst(struct scratch *s, struct rst_fixup *r)
{
	const struct packet *k;
	struct head *h;
	__u32 l3, l4, size, ip, n;
	__u64 sum;

	if (!s || !r)
		return 0;
	k = &s->parser.packet;
	h = &s->parser.head;
	l3 = k->l3;
	l4 = k->l4;
	ip = k->ipv4 ? 20 : 40;
	if (!is_initial_syn(k) || k->payload || l4 != l3 + ip || l4 > HEAD_MAX - 64)
		return 0;
	size = load8(h, l4 + 12) >> 4 << 2;
	if (size < TCP_HEADER || size > 60 || l4 + size > h->copied)
		return 0;
	r->length = l4 + TCP_HEADER;
	r->l4 = l4;
	r->old_length = size;

	/* All words but the checksum. */
	store16(h, l4 + 16, 0);
	sum = 0;
#pragma unroll
	for (__u32 i = 0; i < 30; i++)
		sum += 2 * i < size ? load16(h, l4 + 2 * i) : 0;
	r->csum_diff = (__u16)~csum_fold(sum);

	n = load32(h, l4);
	store32(h, l4, n << 16 | n >> 16); /* ports */
	store32(h, l4 + 8, k->tcp_seq + 1);
	store32(h, l4 + 4, 0);
	store8(h, l4 + 12, TCP_HEADER / 4 << 4);
	store8(h, l4 + 13, TCP_RST | TCP_ACK);
	store16(h, l4 + 14, 0); /* window */
	store16(h, l4 + 18, 0); /* urgent pointer */
	sum = csum_words(h, l4, TCP_HEADER / 2);
	r->csum_diff = csum_fold((__u64)r->csum_diff + sum);

	if (k->ipv4) {
		swap32(h, l3 + 12, l3 + 16);
		store8(h, l3 + 1, 0);
		store16(h, l3 + 2, 20 + TCP_HEADER);
		store16(h, l3 + 6, 0x4000); /* DF */
		store8(h, l3 + 8, 64);
		store16(h, l3 + 10, 0);
		store16(h, l3 + 10, ~csum_fold(csum_words(h, l3, 10)));
		sum += csum_words(h, l3 + 12, 4);
	} else {
#pragma unroll
		for (__u32 i = 0; i < 4; i++)
			swap32(h, l3 + 8 + 4 * i, l3 + 24 + 4 * i);
		store32(h, l3, 0x60000000);
		store16(h, l3 + 4, TCP_HEADER);
		store8(h, l3 + 7, 64);
		sum += csum_words(h, l3 + 8, 16);
	}
	r->csum = (__u16)~csum_fold(sum + IPPROTO_TCP + TCP_HEADER);

	if (cfg.ethernet) {
		n = load32(h, 0);
		size = load16(h, 4);
		store32(h, 0, load32(h, 6));
		store16(h, 4, load16(h, 10));
		store32(h, 6, n);
		store16(h, 10, size);
	}
	return 1;
}

/* Turns a packet at tc into an RST. Only the kernel knows whether the NIC is still to complete the
 * checksum, so it is updated incrementally. */
static __noinline int rst_tc(struct __sk_buff *skb, struct scratch *s)
{
	struct rst_fixup r = {};
	__u32 csum;

	if (!copy_tc(skb, &s->parser.head) || !make_rst(s, &r))
		return 0;
	csum = r.l4;
	barrier_var(csum);
	if (csum > HEAD_MAX - TCP_HEADER)
		return 0;
	csum += 16;
	if (skb->len > r.length && bpf_skb_change_tail(skb, r.length, 0))
		return 0;
	if (bpf_l4_csum_replace(skb, csum, __builtin_bswap16(r.old_length), __builtin_bswap16(TCP_HEADER),
				BPF_F_PSEUDO_HDR | 2) ||
	    bpf_l4_csum_replace(skb, csum, 0, __builtin_bswap16(r.csum_diff), 0))
		return 0;
	if (bpf_skb_store_bytes(skb, 0, s->parser.head.data, csum, 0) ||
	    bpf_skb_store_bytes(skb, csum + 2, s->parser.head.data + csum + 2, 2, 0))
		return 0;
	skb->tstamp = 0;
	return 1;
}

static __noinline int rst_xdp(struct xdp_md *xdp, struct scratch *s)
{
	struct rst_fixup r = {};
	__u32 length = s->parser.head.length, min_length;
	__u64 size;

	if (!copy_xdp(xdp, &s->parser.head) || !make_rst(s, &r))
		return 0;
	store16(&s->parser.head, r.l4 + 16, r.csum);
	/* The minimum length of an Ethernet frame. */
	min_length = length < 60 ? length : 60;
	min_length = r.length > min_length ? r.length : min_length;
	if (min_length < length && bpf_xdp_adjust_tail(xdp, (int)min_length - (int)length))
		return 0;
	size = r.length;
	barrier_var(size);
	if (size < TCP_HEADER || size > HEAD_MAX)
		return 0;
	return !bpf_xdp_store_bytes(xdp, 0, s->parser.head.data, size);
}
