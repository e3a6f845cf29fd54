//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The programs. */
#include "plane.h"

#define TC_NEXT -1 /* TCX_NEXT and TC_ACT_UNSPEC: the next program, as if there were none */
#define TC_DROP 2

SEC("tc")
int shaperd_tc(struct __sk_buff *skb)
{
	struct scratch *s = scratch();
	struct head *h;
	__u64 now;

	if (!s)
		return TC_NEXT;
	h = &s->head;
	h->length = skb->len;
	h->have = h->length < HEAD ? h->length : HEAD;
	if (h->have == 0 || bpf_skb_load_bytes(skb, 0, h->data, h->have))
		return TC_NEXT;
	if (!parse(h, &s->packet, here.ethernet))
		return TC_NEXT;
	s->packet.segments = skb->gso_segs ?: 1;
	now = clock();
	if (!enforce(s, now))
		return TC_NEXT;
	if (s->decision.verdict == VERDICT_REFUSE)
		return TC_DROP;
	if (s->decision.mark)
		bpf_skb_ecn_set_ce(skb);
	if (here.mode == MODE_SHAPE) {
		__u64 depart = (s->decision.depart + TICKS_PER_NANO - 1) / TICKS_PER_NANO;

		/* A stamp that is later already, of TCP's pacing or of SO_TXTIME, is
		 * the sender's own and not the bucket's: nobody else waits for it. */
		if (depart > skb->tstamp)
			skb->tstamp = depart;
	}
	return TC_NEXT;
}

char _license[] SEC("license") = "Dual BSD/GPL";
