/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the programs of all hooks share: where they are attached, and what becomes
 * of a packet there. */
#pragma once

#include "checksum.h"
#include "decide.h"
#include "handshake.h"
#include "own.h"
#include "parse.h"
#include "sample.h"

/* For tests alone, which want to see the decision. */
const volatile __u32 test_sources; /* draw sources at random, so many */
volatile struct decision test_decision;
volatile __u32 test_bytes, test_segments;

/* When the daemon was last seen, in ns. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} heartbeats SEC(".maps");

#define GRACE (5ULL * 1000 * 1000 * 1000)

static __always_inline struct scratch *scratch(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&scratches, &zero);
}

/* The policy in force, if there is one. */
static __always_inline const struct policy *policy_now(void)
{
	__u32 zero = 0;
	void *policies_now = bpf_map_lookup_elem(&policies, &zero);

	return policies_now ? bpf_map_lookup_elem(policies_now, &zero) : 0;
}

/* The key of what there is one of: on the stack there is no room for another. */
static const volatile __u32 the_one;

/* Whether the policy holds: the daemon is there, or it is to hold without it. */
static __always_inline int in_force(__u64 now)
{
	__u64 *heartbeat = bpf_map_lookup_elem(&heartbeats, (const void *)&the_one);

	return here.keep || (heartbeat && now / TICKS_PER_NANO <= *heartbeat + GRACE);
}

/* Takes note of a segment from the initiator's side, and finds out whether it begins
 * a connection. */
__noinline int forward(struct scratch *s)
{
	struct opening *o;
	__u64 now;
	int known;

	if (!s)
		return 0;
	o = &s->opening;
	now = s->now / TICKS_PER_NANO;
	s->parser.packet.via = here.ethernet ? load32(&s->parser.head, 2) : 0;
	s->parser.packet.hops = load8(&s->parser.head, s->parser.packet.l3 + (s->parser.packet.ipv4 ? 8 : 7));
	s->parser.packet.plain = load8(&s->parser.head, s->parser.packet.l4 + 12) >> 4 == 5;
	known = follow(&s->parser.packet, o, 0, now);
	if (known == UNKNOWN && !o->late && (s->parser.packet.tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_ACK &&
	    is_forgotten(&o->tuple, now))
		o->stray = 1;
	if (known == STRAY)
		s->parser.packet.hidden = 1;
	if (known != UNKNOWN)
		return 0;
	o->first = o->late || begins(&s->parser.packet);
	return 0;
}

/* The limits that refuse all they match. */
static __always_inline __u64 blocking(const struct policy *p)
{
	return here.mode == MODE_OBSERVE ? p->always : p->blocks & ~p->observed;
}

/* An interface, as a connection has it. */
static __always_inline __u32 side_of(__u32 ifindex)
{
	return ifindex | (here.egress ? AT_EGRESS : 0);
}

/* Takes in a connection that was there before: the responder sends, so it has it.
 * The scratch's packet is one of its segments. It is in flight whatever the limits
 * say; they let no new one through until it fits. */
__noinline int adopt(const struct policy *p, struct scratch *s)
{
	__u64 set, now;
	struct opening *o;
	struct packet *k;
	struct tuple t;
	__u32 end;

	if (!p || !s)
		return 0;
	now = s->now / TICKS_PER_NANO;
	o = &s->opening;
	k = &s->parser.packet;
	t = o->tuple;
	if (bpf_map_lookup_elem(&reversed, &t))
		return 0;
#pragma unroll
	for (int i = 0; i < 4; i++) {
		k->source[i] = o->tuple.initiator[i];
		k->destination[i] = o->tuple.responder[i];
	}
	k->source_port = o->tuple.initiator_port;
	k->port = o->tuple.responder_port;
	set = classify(p, k, here.place);
	if (set & blocking(p) || !(set &= p->counted))
		return 0;
	o->observe = o->adopt = 1;
	take_slots(p, s, set);
	end = sequence_after(k);
	o->flight.via = 0;
	o->flight.hops = 0;
	o->flight.heard = UNCONFIRMED | ADOPTED | QUIETS; /* what adopts it may be sent again */
	o->flight.next[1] = o->flight.ack[0] = end;
	o->flight.next[0] = o->flight.ack[1] = k->tcp_ack;
	if (open_connection(o, SYNS, now, now) != OPENED)
		drop_slots(o);
	return 0;
}

/* A connection begins on the responders' side. */
__noinline int note_reversed(struct scratch *s)
{
	struct tuple t;
	__u32 one = 1;

	if (!s || !likely(&s->opening.tuple))
		return 0;
	t = s->opening.tuple;
	return bpf_map_update_elem(&reversed, &t, &one, BPF_ANY);
}

/* Takes note of a packet from the responders' side, whose head is in the scratch. */
static __always_inline void take_note(struct __sk_buff *skb, struct scratch *s)
{
	const struct policy *p;
	__u64 now;
	int known, gone;

	if (!parse(&s->parser, here.ethernet) || s->parser.packet.protocol != PROTOCOL_TCP || !s->parser.packet.l4)
		return;
	p = policy_now();
	if (!p || p->generation < here.since ||
	    !(p->counted & p->place[here.place % MAX_PLACES] & p->protocol[PROTOCOL_TCP]))
		return;
	s->now = clock();
	clear_opening(&s->opening);
	now = s->now / TICKS_PER_NANO;
	known = follow(&s->parser.packet, &s->opening, 1, now);
	if (known != UNKNOWN && known != LOST)
		return;
	if (begins(&s->parser.packet))
		note_reversed(s);
	gone = is_forgotten(&s->opening.tuple, now);
	if (gone && (s->parser.packet.tcp_flags & (TCP_SYN | TCP_ACK)) == (TCP_SYN | TCP_ACK))
		forget(&s->opening.tuple, now); /* it is answered again */
	if ((s->parser.packet.tcp_flags & (TCP_ACK | TCP_SYN | TCP_FIN | TCP_RST)) == TCP_ACK &&
	    (known == LOST || likely(&s->opening.tuple)) &&
	    (s->parser.packet.payload || !gone) && /* who has no connection yet acknowledges nonsense */
	    of_other(skb, &s->parser.packet)) {
		s->opening.flight.interface = side_of(((volatile struct __sk_buff *)skb)->ifindex);
		adopt(p, s);
	}
}

/* Decides over the packet whose head is in the scratch, and leaves the decision
 * there. Returns whether there is one that holds. */
static __always_inline int enforce(void *ctx, int xdp, struct scratch *s, __u32 segments, __u32 size)
{
	struct opening *o = &s->opening;
	const struct policy *p;
	__u64 set;
	int blocked; /* it is no part of any connection */

	if (!parse(&s->parser, here.ethernet))
		return 0;
	/* A train from a guest, or from a virtual card, has not been counted yet. */
	if (!segments)
		segments = size ? (s->parser.packet.bytes + size - 1) / size : 1;
	s->parser.packet.segments = segments;
	if (test_sources) /* of IPv6 in the first word, of which prefixes are made */
		s->parser.packet.source[s->parser.packet.ipv4 ? 3 : 0] =
			(__u64)bpf_get_prandom_u32() * test_sources >> 32;
	p = policy_now();
	if (!p || p->generation < here.since)
		return 0;
	set = classify(p, &s->parser.packet, here.place);
	if (!set)
		return 0;
	s->now = clock();
	clear_opening(o);
	o->flight.interface = side_of(xdp ? ((volatile struct xdp_md *)ctx)->ingress_ifindex : interface_of(ctx));
	blocked = !!(set & blocking(p));
	if (!blocked && set & p->counted && s->parser.packet.protocol == PROTOCOL_TCP && s->parser.packet.l4) {
		if (s->parser.packet.tcp_flags & TCP_RST)
			s->parser.packet.intact = test_sources || intact(ctx, xdp, s);
		forward(s);
	}
	if (!in_force(s->now))
		return 0; /* connections go on all the same */
	if (o->first && is_proxied(ctx, xdp, &s->parser.packet, 0))
		o->first = 0;
	if (o->stray && !is_proxied(ctx, xdp, &s->parser.packet, s->parser.packet.source_port))
		s->parser.packet.hidden = 1;
	if (o->first && !o->late)
		may_reserve(ctx, xdp, p, s, set & p->counted);
	if (set & p->observed) {
		o->observe = 1;
		decide(p, s, set & p->observed);
	}
	/* What an observed limit said of the connection is not for the others. */
	o->refused = o->silent = 0;
	o->turn = 0;
	o->observe = here.mode == MODE_OBSERVE && !blocked;
	o->insert = o->first;
	decide(p, s, set & ~p->observed);
	sample(p, s, set);
	if (o->observe) {
		if (o->first && s->decision.verdict == VERDICT_REFUSE && insert(s) != OPENED)
			drop_slots(o);
		return 0;
	}
	if (here.mode == MODE_SHAPE && o->earliest > s->decision.depart / TICKS_PER_NANO)
		s->decision.depart = o->earliest * TICKS_PER_NANO;
	if (s->decision.verdict != VERDICT_REFUSE) {
		if (s->watched[METER_BYTES])
			watch_all(p, s, METER_BYTES);
		if (s->watched[METER_PACKETS])
			watch_all(p, s, METER_PACKETS);
	}
	if (under_test) {
		test_decision = s->decision;
		test_bytes = s->parser.packet.bytes;
		test_segments = s->parser.packet.segments;
	}
	return 1;
}
