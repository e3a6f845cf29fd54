/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The answer to a refused SYN: the packet itself, turned round into an RST, as a
 * host sends it that has nobody listening (RFC 9293, section 3.5.2). */
#pragma once

#include "plane.h"

#define TCP_HEADER 20

/* What has to be done to a packet beside writing its head anew. */
struct reset {
	__u32 length;  /* of the packet that is left */
	__u32 l4;      /* offset of the TCP header */
	__u32 removed; /* TCP's length before */
	__u32 diff;    /* what was added to the sum of its words */
	__u32 sum;     /* checksum, as it goes into the header */
};

static __always_inline void store8(struct head *h, __u32 at, __u8 n)
{
	h->data[bounded(at)] = n;
}

static __always_inline void store16(struct head *h, __u32 at, __u16 n)
{
	*(__u16 *)(h->data + bounded(at)) = __builtin_bswap16(n);
}

static __always_inline void store32(struct head *h, __u32 at, __u32 n)
{
	*(__u32 *)(h->data + bounded(at)) = __builtin_bswap32(n);
}

static __always_inline void swap32(struct head *h, __u32 a, __u32 b)
{
	__u32 n = load32(h, a);

	store32(h, a, load32(h, b));
	store32(h, b, n);
}

/* Makes an RST of the SYN whose head is in the scratch, with all its options. Returns 0
 * when it is one that is better dropped: with payload, or with options of IP. */
__noinline int make_reset(struct scratch *s, struct reset *r)
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
	if (!begins(k) || k->payload || l4 != l3 + ip || l4 > HEAD - 64)
		return 0;
	size = load8(h, l4 + 12) >> 4 << 2;
	if (size < TCP_HEADER || size > 60 || l4 + size > h->have)
		return 0;
	r->length = l4 + TCP_HEADER;
	r->l4 = l4;
	r->removed = size;

	/* All words but the checksum. */
	store16(h, l4 + 16, 0);
	sum = 0;
#pragma unroll
	for (__u32 i = 0; i < 30; i++)
		sum += 2 * i < size ? load16(h, l4 + 2 * i) : 0;
	r->diff = (__u16)~fold(sum);

	n = load32(h, l4);
	store32(h, l4, n << 16 | n >> 16); /* ports */
	store32(h, l4 + 8, k->tcp_seq + 1);
	store32(h, l4 + 4, 0);
	store8(h, l4 + 12, TCP_HEADER / 4 << 4);
	store8(h, l4 + 13, TCP_RST | TCP_ACK);
	store16(h, l4 + 14, 0); /* window */
	store16(h, l4 + 18, 0); /* urgent pointer */
	sum = sum_of(h, l4, TCP_HEADER / 2);
	r->diff = fold((__u64)r->diff + sum);

	if (k->ipv4) {
		swap32(h, l3 + 12, l3 + 16);
		store8(h, l3 + 1, 0);
		store16(h, l3 + 2, 20 + TCP_HEADER);
		store16(h, l3 + 6, 0x4000); /* not to be fragmented */
		store8(h, l3 + 8, 64);
		store16(h, l3 + 10, 0);
		store16(h, l3 + 10, ~fold(sum_of(h, l3, 10)));
		sum += sum_of(h, l3 + 12, 4);
	} else {
#pragma unroll
		for (__u32 i = 0; i < 4; i++)
			swap32(h, l3 + 8 + 4 * i, l3 + 24 + 4 * i);
		store32(h, l3, 0x60000000);
		store16(h, l3 + 4, TCP_HEADER);
		store8(h, l3 + 7, 64);
		sum += sum_of(h, l3 + 8, 16);
	}
	r->sum = (__u16)~fold(sum + IPPROTO_TCP + TCP_HEADER);

	if (here.ethernet) {
		n = load32(h, 0);
		size = load16(h, 4);
		store32(h, 0, load32(h, 6));
		store16(h, 4, load16(h, 10));
		store32(h, 6, n);
		store16(h, 10, size);
	}
	return 1;
}

/* Turns a packet at tc round. Its checksum may be one that a network card is still to
 * make; only the kernel knows, so it is changed by what the packet changes by. */
static __noinline int reset_tc(struct __sk_buff *skb, struct scratch *s)
{
	struct reset r = {};
	__u32 sum;

	if (!copy_tc(skb, &s->parser.head) || !make_reset(s, &r))
		return 0;
	sum = r.l4;
	hide(sum);
	if (sum > HEAD - TCP_HEADER)
		return 0;
	sum += 16;
	if (skb->len > r.length && bpf_skb_change_tail(skb, r.length, 0))
		return 0;
	if (bpf_l4_csum_replace(skb, sum, __builtin_bswap16(r.removed), __builtin_bswap16(TCP_HEADER),
				BPF_F_PSEUDO_HDR | 2) ||
	    bpf_l4_csum_replace(skb, sum, 0, __builtin_bswap16(r.diff), 0))
		return 0;
	if (bpf_skb_store_bytes(skb, 0, s->parser.head.data, sum, 0) ||
	    bpf_skb_store_bytes(skb, sum + 2, s->parser.head.data + sum + 2, 2, 0))
		return 0;
	skb->tstamp = 0;
	return 1;
}

static __noinline int reset_xdp(struct xdp_md *xdp, struct scratch *s)
{
	struct reset r = {};
	__u32 length = s->parser.head.length, least;
	__u64 size;

	if (!copy_xdp(xdp, &s->parser.head) || !make_reset(s, &r))
		return 0;
	store16(&s->parser.head, r.l4 + 16, r.sum);
	/* A frame is no shorter than this on the wire. */
	least = length < 60 ? length : 60;
	least = r.length > least ? r.length : least;
	if (least < length && bpf_xdp_adjust_tail(xdp, (int)least - (int)length))
		return 0;
	size = r.length;
	hide(size);
	if (size < TCP_HEADER || size > HEAD)
		return 0;
	return !bpf_xdp_store_bytes(xdp, 0, s->parser.head.data, size);
}
