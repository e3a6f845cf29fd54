/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Admission of a connection, when the packet in hand begins it: its slots under max_connections,
 * and its departure under new_connections. */
#pragma once

#include "charge.h"

/* Marks a refusal as one of a connection, not just of a packet. */
static __always_inline void refuse_conn(const struct policy *p, struct scratch *s)
{
	s->new_conn.refused = 1;
	s->new_conn.no_rst = p->limit[s->decision.limit % MAX_LIMITS].no_rst;
}

/* Takes a slot for the scratch's packet under limit number, in addition to those it has. Returns
 * an enum slot_result. */
__noinline int take_slot(const struct policy *p, struct scratch *s, __u32 number)
{
	const struct limit *l;
	const struct meter *m;
	__u64 hash[2], ret;
	struct new_conn *nc;
	struct counters *cnt;
	__u32 n, max;

	if (!p || !s)
		return SLOT_CONTENDED;
	nc = &s->new_conn;
	l = &p->limit[number % MAX_LIMITS];
	cnt = counters_of(l);
	n = nc->slots_held;
	if (!cnt || n >= MAX_CONN_SLOTS)
		return SLOT_CONTENDED;
	hash_key(p, l, &s->parser.packet, hash);
	m = &l->meter[METER_NEW];
	hash[0] = mix_hash(m, hash);
	max = l->shared ? share_of_connections(l->max_connections) : l->max_connections;
	if (nc->adopt)
		max = SLOT_MAX;
	ret = max ? slot_take(hash[0], max) : slot_return(SLOT_CAP_REACHED, NO_INDEX);
	if (ret >> 32 == SLOT_CAP_REACHED && nc->observe) {
		cnt->conns_over_cap++;
		nc->over_cap |= 1ULL << (number % MAX_LIMITS);
		ret = slot_take(hash[0], SLOT_MAX);
	}
	if (ret >> 32 == SLOT_TAKEN) {
		nc->conn.slot[n] = hash[0] << SLOT_COUNT_BITS | l->id;
		nc->conn.slot_index[n] = ret;
		nc->slots_held = n + 1;
		cnt->in_flight++;
		cnt->conns_adopted += nc->adopt;
	} else if (nc->observe) {
		cnt->conns_memory_full++;
	}
	return ret >> 32;
}

/* Takes slots under all limits of set, or else refuses the packet. The loop has a constant bound
 * and is the last statement: otherwise Linux 6.1 verifies each of its paths to the end. */
__noinline int take_slots(const struct policy *p, struct scratch *s, __u64 set)
{
	if (!p || !s)
		return 0;
	if (__builtin_popcountll(set) > cfg.max_limits)
		return !too_many_limits(s, set);
	for (int i = 0; i < MAX_LIMITS && set; i++, set &= set - 1) {
		__u32 number = lowest_bit(set) % MAX_LIMITS, result;

		if (!p->limit[number].max_connections)
			continue;
		result = take_slot(p, s, number);
		if (result == SLOT_TAKEN || s->new_conn.observe)
			continue;
		refuse(&s->decision, number, result == SLOT_CAP_REACHED ? REASON_CONNECTIONS : REASON_MEMORY_FULL,
		       s->now);
		refuse_conn(p, s);
		return 0;
	}
	return 1;
}

/* Releases the slots that were taken for a connection that does not begin. */
static __always_inline void cancel_slots(struct new_conn *nc)
{
	release_slots(&nc->conn, nc->slots_held);
	nc->slots_held = 0;
}

/* Releases the slots of a connection that takes them again when it is established. */
static __always_inline void defer_slots(struct new_conn *nc)
{
	release_slots(&nc->conn, nc->slots_held);
#pragma unroll
	for (int i = 0; i < MAX_CONN_SLOTS; i++)
		nc->conn.slot_index[i] = NO_INDEX;
}

/* Removes the mark of mark_reversed: a connection begins in this direction. */
__noinline int clear_reversed(const struct tuple *tuple)
{
	struct tuple t;

	if (!tuple)
		return 0;
	t = *tuple;
	return bpf_map_delete_elem(&reversed, &t);
}

/* Inserts the connection that the scratch's packet begins. */
static __always_inline int insert_new_conn(struct scratch *s)
{
	struct new_conn *nc = &s->new_conn;
	const struct packet *k = &s->parser.packet;
	__u64 depart = cfg.mode == MODE_SHAPE ? s->decision.depart : s->now, flags = SYN_SEEN;
	__u32 end = end_seq(k), acked = end; /* by the responder */
	int result;

	nc->conn.dst_mac = k->dst_mac;
	nc->conn.ttl = k->ttl;
	nc->conn.next_seq[1] = nc->conn.ack[0] = 0;
	if (nc->establishes) {
		acked = nc->conn.ack[1];
		nc->conn.ttl = 0;
		nc->conn.next_seq[1] = nc->conn.ack[0] = k->tcp_ack;
		flags |= ESTABLISHED | (seen_reply(cfg.attach_id) ? SYN_SEEN << 1 : 0);
		if (k->tcp_flags & TCP_FIN && seq_after(end, acked) && end - acked <= MAX_WINDOW)
			flags |= FIN_SEEN;
	} else {
		nc->conn.hints = 0;
		if (nc->deferred) {
			defer_slots(nc);
			flags |= CLOSED | EXPIRED;
		}
	}
	nc->conn.ack[1] = acked;
	nc->conn.next_seq[0] = nc->conn.fin_seq[0] = seq_after(end, acked) ? end : acked;
	result = conn_insert(nc, flags, s->now / TICKS_PER_NANO, depart / TICKS_PER_NANO);
	if (result == INSERTED)
		clear_reversed(&nc->tuple);
	return result;
}

/* Whether a packet or connection waits until depart. It never waits where packets are policed: it
 * passes at once or not at all. */
static __always_inline int must_wait(const struct scratch *s, __u64 depart)
{
	return cfg.mode != MODE_POLICE && depart > read_once(&s->now);
}

__noinline __u64 peek_new_conn(const struct policy *p, struct scratch *s, __u32 number)
{
	return p && s ? lookup_and_peek(p, s, number % MAX_LIMITS | NEW_CONNS) : 0;
}

/* Sets the time at which limit number charges the connection, by the clock of its bucket. */
__noinline int set_conn_clock(const struct policy *p, struct scratch *s, __u32 number)
{
	if (p && s)
		s->charge[number % MAX_LIMITS].conn_clock =
			window_clock(p->limit[number % MAX_LIMITS].meter[METER_NEW].window, s->now);
	return 0;
}

__noinline __u64 charge_new_conn(const struct policy *p, struct scratch *s, __u32 number)
{
	return p && s ? charge(p, s, number % MAX_LIMITS | NEW_CONNS, 0) : 0;
}

/* Checks the new_connections of the limits of set. Returns 0 when one refuses the connection. */
static __always_inline int check_new_conns(const struct policy *p, struct scratch *s, __u64 set)
{
	__u64 rest = set;

	if (!p || !s)
		return 0;
	for (int i = 0; i < cfg.max_limits && rest; i++, rest &= rest - 1) {
		__u32 number = lowest_bit(rest) % MAX_LIMITS;
		__u64 depart;

		set_conn_clock(p, s, number);
		depart = p->limit[number].shared ? peek_shared(p, s, number | NEW_CONNS) : peek_new_conn(p, s, number);

		if (depart && depart - read_once(&s->now) <= p->limit[number].queue_timeout) {
			if (depart > s->new_conn.depart) {
				s->new_conn.depart = depart;
				s->new_conn.last_limit = number;
			}
			continue;
		}
		refuse(&s->decision, number, depart ? REASON_NEW : REASON_MEMORY_FULL, depart ?: s->now);
		refuse_conn(p, s);
		return 0;
	}
	return 1;
}

/* Charges the new connection to the limits of set. */
__noinline int charge_new_conns(const struct policy *p, struct scratch *s, __u64 set)
{
	struct decision *d;

	if (!p || !s)
		return 0;
	d = &s->decision;
	s->new_conn.delayed_by = 0;
	for (int i = 0; i < cfg.max_limits && set; i++, set &= set - 1) {
		__u32 number = lowest_bit(set) % MAX_LIMITS;
		__u64 depart = p->limit[number].shared ? charge_shared(p, s, number | NEW_CONNS)
						       : charge_new_conn(p, s, number);

		s->new_conn.delayed_by |= (__u64)must_wait(s, depart) << number;
		if (depart - read_once(&s->now) > p->limit[number].queue_timeout) {
			refuse(d, number, REASON_NEW, depart);
		} else if (d->verdict != VERDICT_REFUSE && depart > d->depart) {
			d->depart = depart;
			d->limit = number;
			d->reason = REASON_NEW;
		}
	}
	if (s->decision.verdict == VERDICT_REFUSE)
		refuse_conn(p, s);
	return 1;
}

/* Charges the connection that the scratch's packet begins to the limits of set, and inserts it. If
 * one of them refuses it after all, as the decision says, none is charged. */
__noinline int admit_new(const struct policy *p, struct scratch *s, __u64 set)
{
	struct new_conn *nc;
	struct decision *d;
	__u64 charged;
	int result;

	if (!p || !s)
		return 0;
	nc = &s->new_conn;
	d = &s->decision;
	charged = nc->establishes ? 0 : set; /* an established one was charged at its SYN */
	if (charged)
		charge_new_conns(p, s, charged);
	if (nc->insert && d->verdict != VERDICT_REFUSE) {
		result = insert_new_conn(s);
		if (result == INSERT_FAILED && set && !nc->observe) {
			refuse(d, lowest_bit(set), REASON_MEMORY_FULL, s->now);
			refuse_conn(p, s);
		} else if (result != INSERTED) {
			/* Another CPU has just seen the first SYN, or no enforced limit counts the
			 * connection. */
			cancel_slots(nc);
			return refund_all(p, s, 0, charged);
		}
	}
	if (d->verdict == VERDICT_REFUSE)
		return refund_all(p, s, 0, charged);
	return charged ? count_admitted_conn(p, s, charged & ~nc->over_cap) : 0;
}
