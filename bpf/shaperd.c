//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The programs: of tc and tcx hooks at egress and ingress, and of XDP; and the one
 * that sees the replies to what they let through, at the other tc hook. */
#include "plane.h"
#include "reset.h"
#include "seen.h"
#include "sweep.h"

#define TC_NEXT -1 /* TCX_NEXT and TC_ACT_UNSPEC: the next program, as if there were none */
#define TC_DROP 2

/* Of a packet's priority (include/uapi/linux/pkt_sched.h). */
#define TC_PRIO_INTERACTIVE 6
#define TC_PRIO_CONTROL 7
#define TC_PRIO_MAX 15

/* The queue has a band that heeds no stamp, for packets of TC_PRIO_CONTROL: before Linux 6.7. */
const volatile __u32 control_band;

/* Two words of an IP header that is marked. */
struct marked {
	__u16 first, sum; /* network order; sum of IPv4 alone */
};

/* What a mark of congestion makes of a packet that can be marked, CE of RFC 3168. */
static __always_inline struct marked marked(const struct parser *p)
{
	__u32 l3 = p->packet.l3, first = load16(&p->head, l3), with = first | (p->packet.ipv4 ? 3 : 0x30), sum;

	/* The checksum is of the other words: ~(~sum + ~old + new), RFC 1624. */
	sum = (~load16(&p->head, l3 + 10) & 0xffff) + (~first & 0xffff) + with;
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (struct marked){
		.first = __builtin_bswap16(with),
		.sum = __builtin_bswap16(~sum),
	};
}

/* bpf_skb_ecn_set_ce would take a VLAN tag in front of the IP header for that header,
 * and leave alone what somebody captures. */
static __noinline void mark_tc(struct __sk_buff *skb, const struct scratch *s)
{
	struct marked to = marked(&s->parser);

	bpf_skb_store_bytes(skb, s->parser.packet.l3, &to.first, sizeof(to.first), BPF_F_RECOMPUTE_CSUM);
	if (s->parser.packet.ipv4)
		bpf_skb_store_bytes(skb, s->parser.packet.l3 + 10, &to.sum, sizeof(to.sum), BPF_F_RECOMPUTE_CSUM);
}

static __noinline void mark_xdp(struct xdp_md *xdp, const struct scratch *s)
{
	struct marked to = marked(&s->parser);

	bpf_xdp_store_bytes(xdp, s->parser.packet.l3, &to.first, sizeof(to.first));
	if (s->parser.packet.ipv4)
		bpf_xdp_store_bytes(xdp, s->parser.packet.l3 + 10, &to.sum, sizeof(to.sum));
}

/* Whether the answer to what was refused is an RST. */
static __always_inline int answered(const struct scratch *s)
{
	return s->opening.refused && !s->opening.silent;
}

static __always_inline int load_tc(struct __sk_buff *skb, struct head *h)
{
	h->length = skb->len;
	h->have = copy_plain(h, (void *)(long)skb->data, (void *)(long)skb->data_end);
	return h->have || copy_tc(skb, h);
}

static __always_inline int load_xdp(struct xdp_md *xdp, struct head *h)
{
	h->length = bpf_xdp_get_buff_len(xdp);
	h->have = copy_plain(h, (void *)(long)xdp->data, (void *)(long)xdp->data_end);
	return h->have || copy_xdp(xdp, h);
}

/* What becomes of a packet at tc. */
static __always_inline int limit_tc(struct __sk_buff *skb)
{
	struct scratch *s = scratch();
	__u64 depart;

	if (!s)
		return TC_NEXT;
	s->queue = queue_of(skb);
	if (!load_tc(skb, &s->parser.head) || !enforce(skb, 0, s, skb->gso_segs, skb->gso_size))
		return TC_NEXT;
	if (s->decision.verdict == VERDICT_REFUSE) {
		if (answered(s) && reset_tc(skb, s))
			return bpf_redirect(interface_of(skb), here.egress ? BPF_F_INGRESS : 0);
		return TC_DROP;
	}
	if (s->decision.mark)
		mark_tc(skb, s);
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
		if (control_band && (skb->priority & TC_PRIO_MAX) == TC_PRIO_CONTROL)
			skb->priority ^= TC_PRIO_CONTROL ^ TC_PRIO_INTERACTIVE;
	}
	return TC_NEXT;
}

SEC("tc")
int shaperd_tc(struct __sk_buff *skb)
{
	int action = limit_tc(skb);

	/* What is dropped at egress the interface does not count either. */
	if (!here.egress || action == TC_NEXT)
		count_seen(interface_of(skb), here.egress, LIMITING, segments_of(skb));
	return action;
}

SEC("tc")
int shaperd_replies(struct __sk_buff *skb)
{
	struct scratch *s = scratch();

	count_seen(((volatile struct __sk_buff *)skb)->ifindex, !here.egress, NOTING, segments_of(skb));
	if (s && load_tc(skb, &s->parser.head))
		take_note(skb, s);
	return TC_NEXT;
}

/* What becomes of a packet at XDP. */
static __always_inline int limit_xdp(struct xdp_md *xdp)
{
	struct scratch *s = scratch();

	if (!s || !load_xdp(xdp, &s->parser.head) || !enforce(xdp, 1, s, 1, 0))
		return XDP_PASS;
	if (s->decision.verdict == VERDICT_REFUSE)
		return answered(s) && reset_xdp(xdp, s) ? XDP_TX : XDP_DROP;
	if (s->decision.mark)
		mark_xdp(xdp, s);
	return XDP_PASS;
}

SEC("xdp.frags")
int shaperd_xdp(struct xdp_md *xdp)
{
	int action = limit_xdp(xdp);

	count_seen(((volatile struct xdp_md *)xdp)->ingress_ifindex, 0, LIMITING, 1);
	return action;
}

/* Has all connections looked at in turn from now on. The daemon runs it. */
SEC("tc")
int shaperd_sweep(struct __sk_buff *skb)
{
	return start_sweeper();
}

/* A connection that limits do not count any more: nobody would see it end. */
struct uncounted {
	struct tuple tuple;
	__u32 unused;
	__u64 word;
};

SEC("syscall")
int shaperd_uncount(const struct uncounted *u)
{
	struct tuple t = u->tuple;
	struct flight *f = bpf_map_lookup_elem(&connections, &t);
	__u64 word = f ? load_word(&f->word) : CLOSED;

	if (!(word & CLOSED) && !((word ^ u->word) >> BEGAN_SHIFT))
		close_flight(f, word, EXPIRED | CLOSED, clock_ns()); /* whatever becomes of it meanwhile */
	return 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
