//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The programs: of tc and tcx hooks at egress and ingress, and of XDP; and the one
 * that sees the replies to what they let through, at the other tc hook. */
#include "plane.h"
#include "reset.h"

#define TC_NEXT -1 /* TCX_NEXT and TC_ACT_UNSPEC: the next program, as if there were none */
#define TC_DROP 2

/* Marks an ECN-capable packet CE (RFC 3168, section 5), as bpf_skb_ecn_set_ce does. */
static __noinline void mark_xdp(struct xdp_md *xdp, const struct scratch *s)
{
	__u32 l3 = s->parser.packet.l3, first = load16(&s->parser.head, l3), sum;
	__u16 to;

	if (s->parser.packet.ipv4) {
		if (!(first & 3) || (first & 3) == 3)
			return;
		/* The checksum is of the other words: ~(~sum + ~old + new), RFC 1624. */
		sum = (~load16(&s->parser.head, l3 + 10) & 0xffff) + (~first & 0xffff) + (first | 3);
		sum = (sum & 0xffff) + (sum >> 16);
		sum = (sum & 0xffff) + (sum >> 16);
		to = __builtin_bswap16(~sum);
		bpf_xdp_store_bytes(xdp, l3 + 10, &to, sizeof(to));
		first |= 3;
	} else {
		if (!(first & 0x30) || (first & 0x30) == 0x30)
			return;
		first |= 0x30;
	}
	to = __builtin_bswap16(first);
	bpf_xdp_store_bytes(xdp, l3, &to, sizeof(to));
}

/* Whether the answer to what was refused is an RST. */
static __always_inline int answered(const struct scratch *s)
{
	return s->opening.refused && !s->opening.silent;
}

static __always_inline int load_tc(struct __sk_buff *skb, struct scratch *s)
{
	__u64 have = skb->len;

	if (have > HEAD)
		have = HEAD;
	if (have < SHORTEST || bpf_skb_load_bytes(skb, 0, s->parser.head.data, have))
		return 0;
	s->parser.head.length = skb->len;
	s->parser.head.have = have;
	return 1;
}

SEC("tc")
int shaperd_tc(struct __sk_buff *skb)
{
	struct scratch *s = scratch();
	__u64 depart;

	if (!s || !load_tc(skb, s) || !enforce(s, skb->gso_segs ?: 1))
		return TC_NEXT;
	if (s->decision.verdict == VERDICT_REFUSE) {
		if (answered(s) && reset_tc(skb, s))
			return bpf_redirect(here.ifindex ?: skb->ifindex, here.egress ? BPF_F_INGRESS : 0);
		return TC_DROP;
	}
	if (s->decision.mark)
		bpf_skb_ecn_set_ce(skb);
	if (here.mode == MODE_SHAPE) {
		depart = (s->decision.depart + TICKS_PER_NANO - 1) / TICKS_PER_NANO;
		/* A stamp that is later already, of TCP's pacing or of SO_TXTIME, is
		 * the sender's own and not the bucket's: nobody else waits for it.
		 *
		 * The kernel is told that the stamp is of a departure: behind a detour
		 * it would take it for the time of arrival, and show it to programs
		 * that ask for that (SO_TIMESTAMP). It is not told of a packet whose
		 * VLAN tag is in front of its IP header. */
		if (depart > skb->tstamp && bpf_skb_set_tstamp(skb, depart, BPF_SKB_TSTAMP_DELIVERY_MONO))
			skb->tstamp = depart;
	}
	return TC_NEXT;
}

SEC("tc")
int shaperd_replies(struct __sk_buff *skb)
{
	struct scratch *s = scratch();

	if (s && load_tc(skb, s))
		take_note(s);
	return TC_NEXT;
}

SEC("xdp.frags")
int shaperd_xdp(struct xdp_md *xdp)
{
	struct scratch *s = scratch();
	__u64 length, have;

	if (!s)
		return XDP_PASS;
	length = bpf_xdp_get_buff_len(xdp);
	have = length < HEAD ? length : HEAD;
	if (have < SHORTEST || bpf_xdp_load_bytes(xdp, 0, s->parser.head.data, have))
		return XDP_PASS;
	s->parser.head.length = length;
	s->parser.head.have = have;
	if (!enforce(s, 1))
		return XDP_PASS;
	if (s->decision.verdict == VERDICT_REFUSE)
		return answered(s) && reset_xdp(xdp, s) ? XDP_TX : XDP_DROP;
	if (s->decision.mark)
		mark_xdp(xdp, s);
	return XDP_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
