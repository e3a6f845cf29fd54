/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Has the limits that count a connection take it, when the packet in hand begins it: its
 * slots under a semaphore, and its turn under new_connections. */
#pragma once

#include "charge.h"

/* A limit has refused a connection, and not just a packet. */
static __always_inline void refused_connection(const struct policy *p, struct scratch *s)
{
	s->opening.refused = 1;
	s->opening.silent = p->limit[s->decision.limit % MAX_LIMITS].silent;
}

/* Takes a slot for the scratch's packet under limit number, beside those that it has.
 * Returns an enum slot_result. */
__noinline int take_slot(const struct policy *p, struct scratch *s, __u32 number)
{
	const struct limit *l;
	const struct meter *m;
	__u64 hash[2], answer;
	struct opening *o;
	struct state *to;
	__u32 held;

	if (!p || !s)
		return SLOT_LOST;
	o = &s->opening;
	l = &p->limit[number % MAX_LIMITS];
	to = state_of(l);
	held = o->held;
	if (!to || held >= MAX_HELD)
		return SLOT_LOST;
	hash_key(p, l, &s->parser.packet, hash);
	m = &l->meter[METER_NEW];
	hash[0] = join(m, hash);
	answer = slot_take(hash[0], o->adopt ? SLOT_MOST : l->connections);
	if (answer >> 32 == SLOT_FULL && o->observe) {
		to->over_connections++;
		o->over |= 1ULL << (number % MAX_LIMITS);
		answer = slot_take(hash[0], SLOT_MOST);
	}
	if (answer >> 32 == SLOT_TAKEN) {
		o->flight.slot[held] = hash[0] << SLOT_BITS | l->state;
		o->flight.slot_place[held] = answer;
		o->held = held + 1;
		to->in_flight++;
		to->adopted += o->adopt;
	} else if (o->observe) {
		to->connections_memory_full++;
	}
	return answer >> 32;
}

/* Takes slots under the limits of set, or none: see refuse. Its loop has a constant bound and
 * nothing behind it: else Linux 6.1 follows each of its paths to the end. */
__noinline int take_slots(const struct policy *p, struct scratch *s, __u64 set)
{
	if (!p || !s)
		return 0;
	if (__builtin_popcountll(set) > here.limits)
		return !exceeded(s, set);
	for (int i = 0; i < MAX_LIMITS && set; i++, set &= set - 1) {
		__u32 number = lowest(set) % MAX_LIMITS, result;

		if (!p->limit[number].connections)
			continue;
		result = take_slot(p, s, number);
		if (result == SLOT_TAKEN || s->opening.observe)
			continue;
		refuse(&s->decision, number, result == SLOT_FULL ? REASON_CONNECTIONS : REASON_MEMORY_FULL, s->now);
		refused_connection(p, s);
		return 0;
	}
	return 1;
}

/* Gives back the slots that were taken for a connection that does not begin. */
static __always_inline void drop_slots(struct opening *o)
{
	give_back(&o->flight, o->held);
	o->held = 0;
}

/* Gives them back as well, of one that is to take them when it is established. */
static __always_inline void put_off_slots(struct opening *o)
{
	give_back(&o->flight, o->held);
#pragma unroll
	for (int i = 0; i < MAX_HELD; i++)
		o->flight.slot_place[i] = NOWHERE;
}

/* A connection that may have been reversed begins in this direction. */
__noinline int note_straight(const struct tuple *of)
{
	struct tuple t;

	if (!of)
		return 0;
	t = *of;
	return bpf_map_delete_elem(&reversed, &t);
}

/* Enters the connection that the scratch's packet begins. */
static __always_inline int insert(struct scratch *s)
{
	struct opening *o = &s->opening;
	const struct packet *k = &s->parser.packet;
	__u64 depart = here.mode == MODE_SHAPE ? s->decision.depart : s->now, flags = SYN_OF;
	__u32 end = sequence_after(k), known = end; /* to the responder */
	int result;

	o->flight.via = k->via;
	o->flight.hops = k->hops;
	o->flight.next[1] = o->flight.ack[0] = 0;
	if (o->late) {
		known = o->flight.ack[1];
		o->flight.hops = 0;
		o->flight.next[1] = o->flight.ack[0] = k->tcp_ack;
		flags |= ESTABLISHED | (has_replied(here.place) ? SYN_OF << 1 : 0);
		if (k->tcp_flags & TCP_FIN && ahead(end, known) && end - known <= WINDOW)
			flags |= FIN_OF;
	} else {
		o->flight.heard = 0;
		if (o->unreserved) {
			put_off_slots(o);
			flags |= CLOSED | EXPIRED;
		}
	}
	o->flight.ack[1] = known;
	o->flight.next[0] = o->flight.fin[0] = ahead(end, known) ? end : known;
	result = open_connection(o, flags, s->now / TICKS_PER_NANO, depart / TICKS_PER_NANO);
	if (result == OPENED)
		note_straight(&o->tuple);
	return result;
}

/* Whether a packet or a connection that may leave at depart waits until then. It does
 * not where packets are policed: it passes at once, or not at all. */
static __always_inline int waits_until(const struct scratch *s, __u64 depart)
{
	return here.mode != MODE_POLICE && depart > load_word(&s->now);
}

__noinline __u64 quote_new(const struct policy *p, struct scratch *s, __u32 number)
{
	return p && s ? quote(p, s, number % MAX_LIMITS | OF_NEW) : 0;
}

__noinline __u64 charge_new(const struct policy *p, struct scratch *s, __u32 number)
{
	return p && s ? charge(p, s, number % MAX_LIMITS | OF_NEW, 0) : 0;
}

/* Asks the limits of set for the connection that the packet begins. Returns 0 when one
 * refuses it. */
static __always_inline int ask_new(const struct policy *p, struct scratch *s, __u64 set)
{
	__u64 rest = set;

	if (!p || !s)
		return 0;
	for (int i = 0; i < here.limits && rest; i++, rest &= rest - 1) {
		__u32 number = lowest(rest) % MAX_LIMITS;
		__u64 depart = quote_new(p, s, number);

		if (depart && depart - load_word(&s->now) <= p->limit[number].max_wait) {
			if (depart > s->opening.turn) {
				s->opening.turn = depart;
				s->opening.last = number;
			}
			continue;
		}
		refuse(&s->decision, number, depart ? REASON_NEW : REASON_MEMORY_FULL, depart ?: s->now);
		refused_connection(p, s);
		return 0;
	}
	return 1;
}

/* Has the limits of set take the connection. */
__noinline int take_new(const struct policy *p, struct scratch *s, __u64 set)
{
	struct decision *d;

	if (!p || !s)
		return 0;
	d = &s->decision;
	s->opening.waits = 0;
	for (int i = 0; i < here.limits && set; i++, set &= set - 1) {
		__u32 number = lowest(set) % MAX_LIMITS;
		__u64 depart = charge_new(p, s, number);

		s->opening.waits |= (__u64)waits_until(s, depart) << number;
		if (depart - load_word(&s->now) > p->limit[number].max_wait) {
			refuse(d, number, REASON_NEW, depart);
		} else if (d->verdict != VERDICT_REFUSE && depart > d->depart) {
			d->depart = depart;
			d->limit = number;
			d->reason = REASON_NEW;
		}
	}
	if (s->decision.verdict == VERDICT_REFUSE)
		refused_connection(p, s);
	return 1;
}

/* Has the limits of set take the connection that the scratch's packet begins, and enters
 * it. The decision says if one of them refuses it; then none is charged. */
__noinline int begin(const struct policy *p, struct scratch *s, __u64 set)
{
	struct opening *o;
	struct decision *d;
	__u64 new;
	int result;

	if (!p || !s)
		return 0;
	o = &s->opening;
	d = &s->decision;
	new = o->late ? 0 : set; /* one that is late was new when its SYN came */
	if (new)
		take_new(p, s, new);
	if (o->insert && d->verdict != VERDICT_REFUSE) {
		result = insert(s);
		if (result == OPEN_FAILED && set && !o->observe) {
			refuse(d, lowest(set), REASON_MEMORY_FULL, s->now);
			refused_connection(p, s);
		} else if (result != OPENED) {
			/* Another CPU has met its first SYN just now; or nobody minds. */
			drop_slots(o);
			return refund_all(p, s, 0, new);
		}
	}
	if (d->verdict == VERDICT_REFUSE)
		return refund_all(p, s, 0, new);
	return new ? count_opened(p, s, new & ~o->over) : 0;
}
