/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The program entry points: the limiter at tc and tcx, egress and ingress, and at XDP; and the
 * reply tracker, which runs at the opposite tc hook. */
#include "enforce.h"
#include "tcp_rst.h"
#include "packet_counts.h"
#include "sweep.h"

#define TC_NEXT -1 /* TCX_NEXT and TC_ACT_UNSPEC: run the next program */
#define TC_DROP 2

/* Values of skb->priority (include/uapi/linux/pkt_sched.h). */
#define TC_PRIO_INTERACTIVE 6
#define TC_PRIO_CONTROL 7
#define TC_PRIO_MAX 15

/* Set before Linux 6.7, where sch_fq has a band for TC_PRIO_CONTROL that ignores time stamps. */
const volatile __u32 control_band;

/* The two words of an IP header that ECN marking changes. */
struct ecn_mark {
	__u16 first, sum; /* network order; sum is for IPv4 only */
};

/* Sets Congestion Experienced (CE, RFC 3168) in a copy of the header words. */
static __always_inline struct ecn_mark mark_ce(const struct parser *p)
{
	__u32 l3 = p->packet.l3, first = load16(&p->head, l3), ce = first | (p->packet.ipv4 ? 3 : 0x30), sum;

	/* Incremental checksum update: ~(~sum + ~old + new), RFC 1624. */
	sum = (~load16(&p->head, l3 + 10) & 0xffff) + (~first & 0xffff) + ce;
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (struct ecn_mark){
		.first = __builtin_bswap16(ce),
		.sum = __builtin_bswap16(~sum),
	};
}

/* Not bpf_skb_ecn_set_ce: it takes a VLAN tag in front of the IP header for that header, and does
 * not mark packets that are being captured. */
static __noinline void mark_ce_tc(struct __sk_buff *skb, const struct scratch *s)
{
	struct ecn_mark mark = mark_ce(&s->parser);

	bpf_skb_store_bytes(skb, s->parser.packet.l3, &mark.first, sizeof(mark.first), BPF_F_RECOMPUTE_CSUM);
	if (s->parser.packet.ipv4)
		bpf_skb_store_bytes(skb, s->parser.packet.l3 + 10, &mark.sum, sizeof(mark.sum), BPF_F_RECOMPUTE_CSUM);
}

static __noinline void mark_ce_xdp(struct xdp_md *xdp, const struct scratch *s)
{
	struct ecn_mark mark = mark_ce(&s->parser);

	bpf_xdp_store_bytes(xdp, s->parser.packet.l3, &mark.first, sizeof(mark.first));
	if (s->parser.packet.ipv4)
		bpf_xdp_store_bytes(xdp, s->parser.packet.l3 + 10, &mark.sum, sizeof(mark.sum));
}

/* Whether the refused packet is answered with an RST. */
static __always_inline int sends_rst(const struct scratch *s)
{
	return s->new_conn.refused && !s->new_conn.no_rst;
}

static __always_inline int load_head_tc(struct __sk_buff *skb, struct head *h)
{
	h->length = skb->len;
	h->copied = copy_fast(h, (void *)(long)skb->data, (void *)(long)skb->data_end);
	return h->copied || copy_tc(skb, h);
}

static __always_inline int load_head_xdp(struct xdp_md *xdp, struct head *h)
{
	h->length = bpf_xdp_get_buff_len(xdp);
	h->copied = copy_fast(h, (void *)(long)xdp->data, (void *)(long)xdp->data_end);
	return h->copied || copy_xdp(xdp, h);
}

/* Applies the limits to a packet at tc. */
static __always_inline int limit_tc(struct __sk_buff *skb)
{
	struct scratch *s = get_scratch();
	__u64 depart;

	if (!s)
		return TC_NEXT;
	s->queue = queue_of(skb);
	if (!load_head_tc(skb, &s->parser.head) || !enforce(skb, 0, s, skb->gso_segs, skb->gso_size))
		return TC_NEXT;
	if (s->decision.verdict == VERDICT_REFUSE) {
		if (sends_rst(s) && rst_tc(skb, s))
			return bpf_redirect(ifindex_of(skb), cfg.egress ? BPF_F_INGRESS : 0);
		return TC_DROP;
	}
	if (s->decision.mark)
		mark_ce_tc(skb, s);
	if (cfg.mode == MODE_SHAPE) {
		depart = (s->decision.depart + TICKS_PER_NANO - 1) / TICKS_PER_NANO;
		/* Keep a later stamp: TCP pacing or SO_TXTIME set it for this sender only, so it
		 * delays no other packet of the bucket.
		 *
		 * Set the type of the stamp too. Otherwise it is taken for the arrival time after
		 * an ifb redirect, and reported to sockets with SO_TIMESTAMP. This fails for
		 * packets with the VLAN tag in front of the IP header. */
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

	/* The interface's own counters leave out what is dropped at egress, too. */
	if (!cfg.egress || action == TC_NEXT)
		count_packets(ifindex_of(skb), cfg.egress, LIMIT_PROG, wire_packets(skb));
	return action;
}

SEC("tc")
int shaperd_replies(struct __sk_buff *skb)
{
	struct scratch *s = get_scratch();

	count_packets(((volatile struct __sk_buff *)skb)->ifindex, !cfg.egress, REPLY_PROG, wire_packets(skb));
	if (s && load_head_tc(skb, &s->parser.head))
		track_reply(skb, s);
	return TC_NEXT;
}

/* Applies the limits to a packet at XDP. */
static __always_inline int limit_xdp(struct xdp_md *xdp)
{
	struct scratch *s = get_scratch();

	if (!s || !load_head_xdp(xdp, &s->parser.head) || !enforce(xdp, 1, s, 1, 0))
		return XDP_PASS;
	if (s->decision.verdict == VERDICT_REFUSE)
		return sends_rst(s) && rst_xdp(xdp, s) ? XDP_TX : XDP_DROP;
	if (s->decision.mark)
		mark_ce_xdp(xdp, s);
	return XDP_PASS;
}

SEC("xdp.frags")
int shaperd_xdp(struct xdp_md *xdp)
{
	int action = limit_xdp(xdp);

	count_packets(((volatile struct xdp_md *)xdp)->ingress_ifindex, 0, LIMIT_PROG, 1);
	return action;
}

/* Starts the sweep timer. The daemon runs this program once. */
SEC("tc")
int shaperd_sweep(struct __sk_buff *skb)
{
	return start_sweeper();
}

/* A connection that limits no longer count, as its end would not be seen. */
struct uncounted {
	struct tuple tuple;
	__u32 unused;
	__u64 state;
};

SEC("syscall")
int shaperd_uncount(const struct uncounted *u)
{
	struct tuple t = u->tuple;
	struct conn *ct = bpf_map_lookup_elem(&connections, &t);
	__u64 state = ct ? read_once(&ct->state) : CLOSED;

	if (!(state & CLOSED) && !((state ^ u->state) >> START_SHIFT))
		close_conn(ct, state, EXPIRED | CLOSED, now_ns()); /* even if its state changes meanwhile */
	return 0;
}

/* Emits BTF for types and enums that no map or variable has, and that Go uses: bpf2go generates Go
 * types and constants from it. */
struct types_of_go {
	struct line line;
	struct line4 line4;
	struct line6 line6;
	struct node6 node6;
	struct sample sample;
	enum backlog_bounds backlog_bounds;
	enum bucket_index bucket_index;
	enum conn_flag conn_flag;
	enum interface_flag interface_flag;
	enum key_field key_field;
	enum meter_index meter_index;
	enum owner_bits owner_bits;
	enum prog_role prog_role;
	enum protocol protocol;
	enum reason reason;
	enum sample_interval sample_interval;
	enum slot_bits slot_bits;
	enum tag_bits tag_bits;
	enum verdict verdict;
};

const struct types_of_go *types_of_go __attribute__((unused));

char _license[] SEC("license") = "Dual BSD/GPL";
