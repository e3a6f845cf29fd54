/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The decision over a packet, as Shaper.Shape makes it, or Shaper.Decide where packets are
 * policed: either all limits of a set charge it, or the first one that does not refuses it, and
 * none is charged.
 *
 * First all limits without a calendar are checked, which writes nothing. Then those with calendars
 * book the packet. Then the others are charged for its departure. Another CPU may charge a bucket
 * in between: what the charge finds is valid, and when that is beyond max_delay after all,
 * everything is refunded. So a bucket never admits more than its rate, whatever other CPUs do, and
 * a full one is only read.
 *
 * What runs for every packet is inlined: on processors with a return mitigation (AMD up to Zen 4)
 * a function return takes 10 ns, a third of the cost of a limit. What runs rarely is in functions
 * that are not static, which the verifier checks once and on their own. The time is read from the
 * scratch at each use, as the verifier would track all comparisons with a value in a register. */
#pragma once

#include "admit.h"
#include "classify.h"
#include "demand.h"
#include "queue.h"

/* Raises the packet's departure to depart, for a limit that could have let it leave at ready. */
static __always_inline void raise_depart(struct scratch *s, __u32 number, __u64 depart, __u64 ready)
{
	struct decision *d = &s->decision;

	if (depart <= ready)
		return;
	s->charge[number].delays = cfg.mode != MODE_POLICE;
	if (depart - ready > s->longest_wait) {
		s->longest_wait = depart - ready;
		d->limit = number;
		d->reason = REASON_RATE;
	}
	d->depart = time_max(d->depart, depart);
}

/* Books the packet under a limit with calendars, unless its booking there is still valid. */
__noinline int book_limit(const struct policy *p, struct scratch *s, __u32 number)
{
	__u64 bit, latest, from, slot;
	const struct limit *l;
	struct charge *c;
	int result = BOOK_DONE, booked;

	if (!p || !s)
		return BOOK_REFUSED;
	number %= MAX_LIMITS;
	bit = 1ULL << number;
	l = &p->limit[number];
	c = &s->charge[number];
	if (!((s->booked[0] | s->booked[1]) & bit))
		c->delays = 0;
	latest = time_add(cfg.mode == MODE_POLICE ? s->now : s->ready, l->max_delay);
	if (latest - s->now > l->longest_delay)
		latest = s->now + l->longest_delay;
#pragma unroll
	for (int j = 0; j < RATE_METERS; j++) {
		const struct meter *m = &l->meter[j];
		__u64 n = s->parser.packet.segments;

		if (!m->rate.mult)
			continue;
		from = cfg.mode == MODE_POLICE ? s->now : s->decision.depart;
		if (s->booked[j] & bit) {
			if (c->booking[j].slot >= from >> (m->slot_shift & 63))
				continue;
			calendar_unbook(p, s, number * RATE_METERS + j);
			s->booked[j] &= ~bit;
		}
		if (j == METER_BYTES)
			n = s->parser.packet.bytes + n * l->overhead;
		c->cost[j] = rate_cost(&m->rate, n);
		s->not_before = from;
		slot = calendar_find(p, s, number * RATE_METERS + j);
		booked = calendar_book(p, s, number * RATE_METERS + j, latest, slot);
		if (booked == BOOK_SPANS) {
			booked = calendar_book_span(p, s, number * RATE_METERS + j);
			/* So that a partial booking is undone if another CPU was faster. */
			s->booked[j] |= bit;
			if (c->booking[j].depart > latest)
				booked = BOOK_REFUSED;
			/* The last part is behind packets that other CPUs booked meanwhile. */
			if (booked == BOOK_SPLIT)
				monitor_overtaken(l, j, c->cost[j]);
		}
		if (booked == BOOK_REFUSED) {
			refuse(&s->decision, number, REASON_QUEUE_FULL, c->booking[j].depart);
			return BOOK_REFUSED;
		}
		s->booked[j] |= bit;
		if (c->booking[j].depart > from &&
		    ((s->booked[0] | s->booked[1]) != bit || s->booked[0] & s->booked[1]))
			result = BOOK_MOVED;
		raise_depart(s, number, c->booking[j].depart, from);
	}
	return result;
}

/* Books the packet under those limits of set where it has no valid booking. */
__noinline int book_round(const struct policy *p, struct scratch *s, __u64 set)
{
	int result = BOOK_DONE;

	if (!p || !s)
		return BOOK_REFUSED;
	for (int i = 0; i < cfg.max_limits && set; i++, set &= set - 1) {
		int one = book_limit(p, s, lowest_bit(set));

		if (one == BOOK_REFUSED)
			return one;
		if (one == BOOK_MOVED)
			result = one;
	}
	return too_many_limits(s, set) ? BOOK_REFUSED : result;
}

__noinline int release_all_bookings(const struct policy *p, struct scratch *s)
{
	__u64 held;

	if (!p || !s)
		return 0;
	held = s->booked[0] | s->booked[1];
	for (int i = 0; i < cfg.max_limits && held; i++, held &= held - 1)
		release_bookings(p, s, lowest_bit(held));
	return 0;
}

/* Raises the packet's departure for a limit that is checked before those with calendars: without a
 * branch, like is_monitored. */
static __always_inline void raise_depart_branchless(struct scratch *s, __u32 number, __u64 depart)
{
	struct decision *d = &s->decision;
	__u64 later = (read_once(&d->depart) - depart) >> 63, wait = depart - read_once(&s->now);
	__u64 waits = (wait | -wait) >> 63 & (cfg.mode != MODE_POLICE);

	barrier_var(later);
	barrier_var(waits);
	s->charge[number].delays = waits;
	d->limit ^= (d->limit ^ number) & -later;
	d->depart += (depart - d->depart) & -later;
}

/* Counts a packet under the limits of set, which have calendars, and selects those whose calendars
 * are monitored. */
__noinline int count_booked(const struct policy *p, struct scratch *s, __u64 set)
{
	const struct monitor_owners *owners = get_monitor_owners();

	if (!p || !s || !owners)
		return 0;
	for (int i = 0; i < cfg.max_limits && set; i++, set &= set - 1) {
		__u32 number = lowest_bit(set) % MAX_LIMITS;
		const struct limit *l = &p->limit[number];

		count_admitted(l, s, s->charge[number].delays & 1, 1);
#pragma unroll
		for (int j = 0; j < RATE_METERS; j++) {
			s->charge[number].hash[j] = 1; /* one calendar for all keys */
			if (l->meter[j].rate.mult)
				s->monitored[j] |= is_monitored(owners, p, l, j, 1) * (set & -set);
		}
	}
	return 0;
}

/* Raises the departure after another CPU charged a bucket first, or refuses the packet. */
__noinline int charge_overtaken(const struct policy *p, struct scratch *s, __u32 number, __u64 depart)
{
	if (!p || !s)
		return 0;
	number %= MAX_LIMITS;
	if (depart - s->now > p->limit[number].max_delay)
		refuse(&s->decision, number, REASON_QUEUE_FULL, depart);
	else if (s->decision.verdict != VERDICT_REFUSE)
		raise_depart(s, number, depart, s->now);
	return 1;
}

/* Checks the limits of set, which have no calendars, and those of new_conns. Returns 0 when one
 * refuses the packet. */
__noinline int check_limits(const struct policy *p, struct scratch *s, __u64 set, __u64 new_conns)
{
	struct decision *d;

	if (!p || !s)
		return 0;
	d = &s->decision;
	d->depart = s->now;
	d->verdict = VERDICT_PASS;
	d->reason = REASON_NONE;
	d->limit = NO_LIMIT;
	s->booked[0] = s->booked[1] = 0;
	for (int i = 0; i < cfg.max_limits && set; i++, set &= set - 1) {
		__u32 number = lowest_bit(set) % MAX_LIMITS;
		__u64 depart = p->limit[number].shared ? peek_shared(p, s, number) : lookup_and_peek(p, s, number);

		if (!depart || depart - read_once(&s->now) > p->limit[number].max_delay) {
			refuse(d, number, depart ? REASON_QUEUE_FULL : REASON_MEMORY_FULL, depart ?: s->now);
			return 0;
		}
		raise_depart_branchless(s, number, depart);
	}
	if (too_many_limits(s, set))
		return 0;
	s->ready = d->depart;
	s->longest_wait = d->depart - s->now;
	if (s->longest_wait)
		d->reason = REASON_RATE;
	return !new_conns || check_new_conns(p, s, new_conns);
}

/* Charges the limits of set, which have no calendars. Returns whether another CPU charged one of
 * their buckets first; the decision may be a refusal then. */
__noinline int charge_all(const struct policy *p, struct scratch *s, __u64 set)
{
	const struct monitor_owners *owners = get_monitor_owners();
	int overtook = 0;

	if (!p || !s || !owners)
		return 0;
	for (int i = 0; i < cfg.max_limits && set; i++, set &= set - 1) {
		__u32 number = lowest_bit(set) % MAX_LIMITS;
		__u64 depart = p->limit[number].shared ? charge_shared(p, s, number) : charge(p, s, number, owners);

		if (depart > s->decision.depart)
			overtook |= charge_overtaken(p, s, number, depart);
		count_admitted(&p->limit[number], s, s->charge[number].delays & 1, 1);
	}
	return overtook;
}

#define BOOK_ROUNDS 8	  /* rounds to find an instant at which all limits have room */
#define CHARGE_ATTEMPTS 3 /* charges of a packet that other CPUs overtake, before it is refused */

/* The limits to check, with calendars and with buckets. Computed at each use: there is no room on
 * the stack. */
static __always_inline __u64 calendar_limits(const struct policy *p, const struct scratch *s)
{
	return read_once(&s->limits) & p->calendars;
}

static __always_inline __u64 bucket_limits(const struct policy *p, const struct scratch *s)
{
	return read_once(&s->limits) & p->paced & ~p->calendars;
}

/* Charges the paced limits that match the scratch's packet, for its bytes and packets. Returns
 * whether they were charged; the decision may be a refusal nevertheless.
 *
 * Limits with calendars come after the others, as those set the earliest departure, and book the
 * packet at the first instant at which all of them have room. */
__noinline int charge_limits(const struct policy *p, struct scratch *s, __u64 new_conns)
{
	if (!p || !s)
		return 0;
	for (int i = 0; i < CHARGE_ATTEMPTS; i++) {
		int result = BOOK_DONE, overtook;

		if (!check_limits(p, s, bucket_limits(p, s), new_conns))
			return 0;
		for (int j = 0; j < BOOK_ROUNDS && calendar_limits(p, s); j++) {
			result = book_round(p, s, calendar_limits(p, s));
			if (result != BOOK_MOVED)
				break;
		}
		if (result == BOOK_MOVED)
			refuse(&s->decision, lowest_bit(calendar_limits(p, s)), REASON_QUEUE_FULL, s->decision.depart);
		if (result != BOOK_DONE || (must_queue(s) && !has_room(p, s))) {
			release_all_bookings(p, s);
			return 0;
		}
		overtook = charge_all(p, s, bucket_limits(p, s));
		if (!calendar_limits(p, s))
			return 1;
		count_booked(p, s, calendar_limits(p, s));
		if (!overtook || cfg.mode == MODE_POLICE)
			return 1;
		refund_all(p, s, bucket_limits(p, s) | calendar_limits(p, s), 0);
	}
	refuse(&s->decision, lowest_bit(calendar_limits(p, s)), REASON_QUEUE_FULL, s->decision.depart);
	return 0;
}

/* Decides over the scratch's packet under the limits of set; package shaper explains the verdicts.
 * The first SYN of a connection is admitted by all limits that count it too, or refused and not
 * charged. */
static __always_inline void decide(const struct policy *p, struct scratch *s, __u64 set)
{
	__u64 paced = set & p->paced, counted, new_conns;
	struct new_conn *nc = &s->new_conn;
	struct decision *d = &s->decision;

	counted = nc->is_new ? set & p->counted : 0;
	new_conns = nc->establishes ? 0 : counted;
	d->depart = s->now;
	d->verdict = VERDICT_PASS;
	d->reason = REASON_NONE;
	d->limit = NO_LIMIT;
	d->mark = 0;
	s->limits = set;
	s->monitored[METER_BYTES] = s->monitored[METER_PACKETS] = 0;

	if (set & p->blocks) {
		refuse(d, lowest_bit(set & p->blocks), REASON_BLOCKED, s->now);
		if (is_initial_syn(&s->parser.packet))
			refuse_conn(p, s);
		count_refused(p, s);
		return;
	}
	/* Possibly a SYN, but the connection cannot be counted. */
	if (s->parser.packet.untrackable && set & p->counted) {
		refuse(d, lowest_bit(set & p->counted), nc->stray ? REASON_MEMORY_FULL : REASON_CONNECTIONS, s->now);
		goto refused;
	}
	if (counted && !take_slots(p, s, counted))
		goto refused;
	if (counted && nc->fastopen && !nc->observe) {
		refuse(d, lowest_bit(counted), REASON_CONNECTIONS, s->now);
		refuse_conn(p, s);
		nc->no_rst = 1;
		goto refused;
	}
	if (paced | new_conns ? !charge_limits(p, s, new_conns) : must_queue(s) && !has_room(p, s))
		goto refused;
	if (nc->is_new && d->verdict != VERDICT_REFUSE)
		admit_new(p, s, counted);
	if (d->verdict == VERDICT_REFUSE) {
		refund_all(p, s, paced, 0);
		goto refused;
	}
	if (d->depart > s->now) {
		d->verdict = VERDICT_DELAY;
		if (d->reason == REASON_RATE)
			count_delay(p, s, d->depart - s->now);
		if (decided_by_shared(p, s))
			note_demand(p, s);
	}
	if (must_queue(s))
		enqueue(p, s);
	if (set & ~paced)
		count_uncharged(p, s, set & ~paced);
	return;
refused:
	if (nc->is_new && !nc->observe)
		cancel_slots(nc);
	count_refused(p, s);
	if (decided_by_shared(p, s))
		note_demand(p, s);
}
