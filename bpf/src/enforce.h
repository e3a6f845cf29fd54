/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Enforcement, shared by the programs of all hooks: from a packet to its decision, and the
 * tracking of replies. */
#pragma once

#include "checksum.h"
#include "decide.h"
#include "handshake.h"
#include "proxied.h"
#include "parse.h"
#include "sample.h"
#include "cgroup.h"

/* For tests only, which read the decision. */
const volatile __u32 test_sources; /* draw sources at random from this many */
volatile struct decision test_decision;
volatile __u32 test_bytes, test_segments;

/* Time of the daemon's last heartbeat, in ns. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} heartbeats SEC(".maps");

#define HEARTBEAT_GRACE (5ULL * 1000 * 1000 * 1000)

static __always_inline struct scratch *get_scratch(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&scratches, &zero);
}

/* Returns the current policy, or NULL before the first one. */
static __always_inline const struct policy *get_policy(void)
{
	__u32 zero = 0;
	void *current = bpf_map_lookup_elem(&policies, &zero);

	return current ? bpf_map_lookup_elem(current, &zero) : 0;
}

/* The key of maps with one entry: there is no room for another on the stack. */
static const volatile __u32 zero_key;

/* Whether the policy is enforced: the daemon is alive, or the attachment keeps it without. */
static __always_inline int policy_active(__u64 now)
{
	__u64 *heartbeat = bpf_map_lookup_elem(&heartbeats, (const void *)&zero_key);

	return cfg.keep || (heartbeat && now / TICKS_PER_NANO <= *heartbeat + HEARTBEAT_GRACE);
}

/* Tracks a segment in the original direction, and sets whether it begins a connection. */
__noinline int track_original(struct scratch *s)
{
	struct new_conn *nc;
	__u64 now;
	int result;

	if (!s)
		return 0;
	nc = &s->new_conn;
	now = s->now / TICKS_PER_NANO;
	s->parser.packet.dst_mac = cfg.ethernet ? load32(&s->parser.head, 2) : 0;
	s->parser.packet.ttl = load8(&s->parser.head, s->parser.packet.l3 + (s->parser.packet.ipv4 ? 8 : 7));
	s->parser.packet.no_options = load8(&s->parser.head, s->parser.packet.l4 + 12) >> 4 == 5;
	result = conn_track(&s->parser.packet, nc, 0, now);
	if (result == TRACK_NONE && !nc->establishes &&
	    (s->parser.packet.tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_ACK && is_forgotten(&nc->tuple, now))
		nc->stray = 1;
	if (result == TRACK_STRAY)
		s->parser.packet.untrackable = 1;
	if (result != TRACK_NONE)
		return 0;
	nc->is_new = nc->establishes || is_initial_syn(&s->parser.packet);
	return 0;
}

/* The limits that refuse everything they match, less those that only observe. */
static __always_inline __u64 blocking_limits(const struct policy *p)
{
	return cfg.mode == MODE_OBSERVE ? p->always_enforced : p->blocks & ~p->observed;
}

/* The interface of a connection: its ifindex and direction. */
static __always_inline __u32 interface_key(__u32 ifindex)
{
	return ifindex | (cfg.egress ? AT_EGRESS : 0);
}

/* Adopts a connection that began before it was tracked, from a segment of the responder, which
 * sends only if it has it. It is in flight whatever the limits' caps are; they admit no new one until it
 * fits. */
__noinline int adopt_conn(const struct policy *p, struct scratch *s)
{
	__u64 set, now;
	struct new_conn *nc;
	struct packet *k;
	struct tuple t;
	__u32 end;

	if (!p || !s)
		return 0;
	now = s->now / TICKS_PER_NANO;
	nc = &s->new_conn;
	k = &s->parser.packet;
	t = nc->tuple;
	if (bpf_map_lookup_elem(&reversed, &t))
		return 0;
#pragma unroll
	for (int i = 0; i < 4; i++) {
		k->source[i] = nc->tuple.initiator[i];
		k->destination[i] = nc->tuple.responder[i];
	}
	k->source_port = nc->tuple.initiator_port;
	k->port = nc->tuple.responder_port;
	set = classify(p, k, cfg.attach_id);
	if (set & blocking_limits(p) & ~p->by_packet ||
	    !(set &= p->counted)) /* the mark and DSCP are the responder's */
		return 0;
	nc->observe = nc->adopt = 1;
	take_slots(p, s, set);
	end = end_seq(k);
	nc->conn.dst_mac = 0;
	nc->conn.ttl = 0;
	nc->conn.hints =
		PATH_UNCONFIRMED | ADOPTED | BOTH_NO_DATA; /* the segment that adopts it may be a retransmission */
	nc->conn.next_seq[1] = nc->conn.ack[0] = end;
	nc->conn.next_seq[0] = nc->conn.ack[1] = k->tcp_ack;
	if (conn_insert(nc, BOTH_SYNS, now, now) != INSERTED)
		cancel_slots(nc);
	return 0;
}

/* Marks a connection that begins in the reply direction. */
__noinline int mark_reversed(struct scratch *s)
{
	struct tuple t;
	__u32 one = 1;

	if (!s || !initiator_guess(&s->new_conn.tuple))
		return 0;
	t = s->new_conn.tuple;
	return bpf_map_update_elem(&reversed, &t, &one, BPF_ANY);
}

/* Tracks a packet in the reply direction, whose head is in the scratch. */
static __always_inline void track_reply(struct __sk_buff *skb, struct scratch *s)
{
	const struct policy *p;
	__u64 now;
	int result, forgot;

	if (!parse(&s->parser, cfg.ethernet) || s->parser.packet.protocol != PROTOCOL_TCP || !s->parser.packet.l4)
		return;
	p = get_policy();
	if (!p || p->generation < cfg.min_generation ||
	    !(p->counted & p->attachment[cfg.attach_id % MAX_ATTACHMENTS] & p->protocol[PROTOCOL_TCP]))
		return;
	s->now = now_ticks();
	clear_new_conn(&s->new_conn);
	now = s->now / TICKS_PER_NANO;
	result = conn_track(&s->parser.packet, &s->new_conn, 1, now);
	if (result != TRACK_NONE && result != TRACK_LOST)
		return;
	if (is_initial_syn(&s->parser.packet))
		mark_reversed(s);
	forgot = is_forgotten(&s->new_conn.tuple, now);
	if (forgot && (s->parser.packet.tcp_flags & (TCP_SYN | TCP_ACK)) == (TCP_SYN | TCP_ACK))
		mark_forgotten(&s->new_conn.tuple, now); /* another SYN-ACK: extend it */
	if ((s->parser.packet.tcp_flags & (TCP_ACK | TCP_SYN | TCP_FIN | TCP_RST)) == TCP_ACK &&
	    (result == TRACK_LOST || initiator_guess(&s->new_conn.tuple)) &&
	    (s->parser.packet.payload || !forgot) && /* a half-open endpoint acknowledges invalid segments, too */
	    is_unproxied(skb, &s->parser.packet)) {
		s->new_conn.conn.interface = interface_key(((volatile struct __sk_buff *)skb)->ifindex);
		adopt_conn(p, s);
	}
}

/* Decides over the packet whose head is in the scratch. Returns whether the decision there is to
 * be enforced. */
static __always_inline int enforce(void *ctx, int xdp, struct scratch *s, __u32 segments, __u32 size)
{
	struct new_conn *nc = &s->new_conn;
	const struct policy *p;
	__u64 set;
	int blocked; /* the packet is not part of any connection */

	if (!parse(&s->parser, cfg.ethernet))
		return 0;
	/* A GSO packet from a guest or a virtual NIC has no segment count yet. */
	if (!segments)
		segments = size ? (s->parser.packet.bytes + size - 1) / size : 1;
	s->parser.packet.segments = segments;
	if (test_sources) /* of IPv6 the first word, as prefixes are taken from it */
		s->parser.packet.source[s->parser.packet.ipv4 ? 3 : 0] =
			(__u64)bpf_get_prandom_u32() * test_sources >> 32;
	if (!xdp)
		s->parser.packet.mark = ((volatile struct __sk_buff *)ctx)->mark;
	p = get_policy();
	if (!p || p->generation < cfg.min_generation)
		return 0;
	set = classify(p, &s->parser.packet, cfg.attach_id);
	if (!xdp && set & p->by_cgroup)
		set &= match_cgroups(ctx, p);
	if (!set)
		return 0;
	s->now = now_ticks();
	if (set & p->shared)
		s->suspended = boot_ticks() - s->now;
	clear_new_conn(nc);
	nc->conn.interface = interface_key(xdp ? ((volatile struct xdp_md *)ctx)->ingress_ifindex : ifindex_of(ctx));
	blocked = !!(set & blocking_limits(p));
	if (!blocked && set & p->counted && s->parser.packet.protocol == PROTOCOL_TCP && s->parser.packet.l4) {
		if (s->parser.packet.tcp_flags & TCP_RST)
			s->parser.packet.rst_valid = test_sources || segment_valid(ctx, xdp, s);
		track_original(s);
	}
	if (!policy_active(s->now))
		return 0; /* connections are tracked nevertheless */
	if (nc->is_new && is_proxied(ctx, xdp, &s->parser.packet, 0))
		nc->is_new = 0;
	if (nc->stray && !is_proxied(ctx, xdp, &s->parser.packet, s->parser.packet.source_port))
		s->parser.packet.untrackable = 1;
	if (nc->is_new && !nc->establishes)
		decide_deferral(ctx, xdp, p, s, set & p->counted);
	if (set & p->observed) {
		nc->observe = 1;
		decide(p, s, set & p->observed);
	}
	/* Drop what the observed limits said of the connection. */
	nc->refused = nc->no_rst = 0;
	nc->depart = 0;
	nc->observe = cfg.mode == MODE_OBSERVE && !blocked;
	nc->insert = nc->is_new;
	decide(p, s, set & ~p->observed);
	sample(p, s, set);
	if (nc->observe) {
		if (nc->is_new && s->decision.verdict == VERDICT_REFUSE && insert_new_conn(s) != INSERTED)
			cancel_slots(nc);
		return 0;
	}
	if (cfg.mode == MODE_SHAPE && nc->earliest > s->decision.depart / TICKS_PER_NANO)
		s->decision.depart = nc->earliest * TICKS_PER_NANO;
	if (s->decision.verdict != VERDICT_REFUSE) {
		if (s->monitored[METER_BYTES])
			monitor_all(p, s, METER_BYTES);
		if (s->monitored[METER_PACKETS])
			monitor_all(p, s, METER_PACKETS);
	}
	if (under_test) {
		test_decision = s->decision;
		test_bytes = s->parser.packet.bytes;
		test_segments = s->parser.packet.segments;
	}
	return 1;
}
