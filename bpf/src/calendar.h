/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The calendars of package leaky, statement for statement: buckets whose packets may leave out of
 * order. Package leaky explains them.
 *
 * Several CPUs share a calendar. Slots are booked by compare-and-swap: nothing is lost or booked
 * twice. Everything else (closed slots, the hint) only says where not to look, and may be stale. A
 * CPU that loses a race for a slot continues with the next one. */
#pragma once

#include "scratch.h"
#include "buckets.h"

#define CALENDAR_SLOTS 2048
#define CALENDAR_WORDS (CALENDAR_SLOTS / 32)
#define MAX_SPAN 256
#define CALENDAR_TRIES 64
#define NO_SLOT (~0ULL)
#define RATE_METERS METER_NEW /* the meters of bytes and of packets */

struct calendar {
	__u64 from;
	__u64 top;
	__u64 hint;
	__u64 pad[5];
	__u64 closed[CALENDAR_WORDS];
	__u64 slot[CALENDAR_SLOTS];
};

/* By limit ID and meter. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, MAX_LIMIT_IDS *RATE_METERS);
	__type(key, __u32);
	__type(value, struct calendar);
} calendars SEC(".maps");

static __always_inline __u32 calendar_index(const struct limit *l, __u32 meter)
{
	return l->id * RATE_METERS + meter;
}

static __always_inline struct calendar *calendar_of(const struct limit *l, __u32 meter)
{
	__u32 i = calendar_index(l, meter);

	return bpf_map_lookup_elem(&calendars, &i);
}

static __always_inline __u64 slot_taken(__u64 shift, __u64 word, __u64 k, __u64 base)
{
	__u64 width, taken = 0;

	shift &= 63;
	width = 1ULL << shift;
	if (word >> (shift + 1 & 63) == k)
		taken = word & (2 * width - 1);
	if (base >> shift == k)
		taken = time_max(taken, base & (width - 1));
	return taken;
}

static __always_inline __u64 max_span(const struct meter *m, __u64 cost)
{
	__u64 shift = m->slot_shift & 63;

	return 2 * (cost >> shift) + 6 * (m->unit >> shift) + 2;
}

/* The state of a walk over slots. */
struct slot_walk {
	__u64 shift;
	__u64 base;
	__u64 slot; /* the first */
	__u64 room; /* found so far */
	__u64 need;
	__u32 calendar;
	__u32 first;
};

static long walk_room(__u32 i, struct slot_walk *w)
{
	struct calendar *c = bpf_map_lookup_elem(&calendars, &w->calendar);

	if (!c)
		return 1;
	w->room += (1ULL << (w->shift & 63)) -
		   slot_taken(w->shift, read_once(&c->slot[(w->slot + i) % CALENDAR_SLOTS]), w->slot + i, w->base);
	return !w->room || w->room >= w->need;
}

/* The free room from slot k on, within the span of a packet and at most need; 0 when slot k is
 * full. */
__noinline __u64 calendar_room(const struct policy *p, __u32 number, __u64 k, __u64 need, __u64 base)
{
	const struct limit *l;
	const struct meter *m;
	struct slot_walk w = { .slot = k, .need = need, .base = base };

	if (!p)
		return 0;
	l = &p->limit[number / RATE_METERS % MAX_LIMITS];
	m = &l->meter[number % RATE_METERS];
	w.shift = m->slot_shift;
	barrier_var(w.room); /* or the verifier tracks its value from slot to slot */
	w.calendar = calendar_index(l, number % RATE_METERS);
	bpf_loop(max_span(m, need), walk_room, &w, 0);
	return w.room < need ? w.room : need;
}

static __always_inline void close_slot(struct calendar *c, __u64 k)
{
	__u64 *word = &c->closed[k / 32 % CALENDAR_WORDS], cur = read_once(word);

	if (cur >> 32 != (k / 32 & 0xffffffff))
		__sync_val_compare_and_swap(word, cur, k / 32 << 32 | 1ULL << k % 32);
	else
		__sync_fetch_and_or(word, 1ULL << k % 32);
}

/* BOOK_SPLIT: booked, with other packets between the parts. BOOK_MOVED: booked later than the
 * other limits allow for. BOOK_SPANS: not booked, as one slot is too small. */
enum book_result { BOOK_REFUSED, BOOK_DONE, BOOK_SPLIT, BOOK_MOVED, BOOK_SPANS };

/* The state of a booking over several slots. */
struct spread {
	struct booking *booking;
	__u64 shift;
	__u64 base;
	__u64 left;
	__u64 total;
	__u64 start; /* when the first part begins */
	__u64 end;   /* when the last part ends */
	__u32 calendar;
	__u32 pad;
};

static long book_part(__u32 i, struct spread *t)
{
	struct calendar *c = bpf_map_lookup_elem(&calendars, &t->calendar);
	__u64 width = 1ULL << (t->shift & 63), k = t->booking->slot + i, cur, taken, part, *slot;

	if (!c)
		return 1;
	slot = &c->slot[k % CALENDAR_SLOTS];
	cur = read_once(slot);
	taken = slot_taken(t->shift, cur, k, t->base);
	part = width - taken;
	part = part < t->left ? part : t->left;
	if (part && __sync_val_compare_and_swap(slot, cur, (k << (t->shift + 1 & 63)) | (taken + part)) != cur)
		return 0; /* another CPU has booked here: try the next slot */
	if (taken + part == width)
		close_slot(c, k);
	if (t->left == t->total)
		t->start = (k << (t->shift & 63)) + taken;
	if (i < BOOKED_SLOTS) {
		barrier_var(i);
		t->booking->taken[i % BOOKED_SLOTS] = part;
	}
	t->left -= part;
	t->end = (k << (t->shift & 63)) + taken + part;
	return !t->left;
}

/* Books the scratch's packet over as many slots as it needs, from the booking's slot on. */
__noinline int calendar_book_span(const struct policy *p, struct scratch *s, __u32 number)
{
	const struct limit *l;
	const struct meter *m;
	struct calendar *c;
	struct spread t = {};

	if (!p || !s)
		return BOOK_REFUSED;
	l = &p->limit[number / RATE_METERS % MAX_LIMITS];
	m = &l->meter[number % RATE_METERS];
	c = calendar_of(l, number % RATE_METERS);
	if (!c)
		return BOOK_REFUSED;
	t.booking = &s->charge[number / RATE_METERS % MAX_LIMITS].booking[number % RATE_METERS];
	t.left = t.total = s->charge[number / RATE_METERS % MAX_LIMITS].cost[number % RATE_METERS];
	t.base = s->calendar_base;
	t.shift = m->slot_shift;
	t.calendar = calendar_index(l, number % RATE_METERS);
	barrier_var(t.start);
	barrier_var(t.end);
	bpf_loop(2 * MAX_SPAN, book_part, &t, 0);
	bucket_raise(&c->top, t.end);
	/* Later than expected if another CPU has booked here meanwhile. */
	t.booking->depart = time_max(s->not_before, time_sub(t.start, m->burst));
	if (t.left)
		return BOOK_REFUSED;
	return t.end - t.start > t.total ? BOOK_SPLIT : BOOK_DONE;
}

/* Returns the first slot with room for the packet, not before it may leave, or NO_SLOT. */
__noinline __u64 calendar_find(const struct policy *p, struct scratch *s, __u32 number)
{
	__u64 k, first, shift, taken, room, closed, need;
	const struct meter *m;
	struct calendar *c;
	__u32 open;

	if (!p || !s)
		return NO_SLOT;
	m = &p->limit[number / RATE_METERS % MAX_LIMITS].meter[number % RATE_METERS];
	c = calendar_of(&p->limit[number / RATE_METERS % MAX_LIMITS], number % RATE_METERS);
	if (!c)
		return NO_SLOT;
	s->calendar_base = time_max(read_once(&s->now), read_once(&c->from));
	need = time_max(s->charge[number / RATE_METERS % MAX_LIMITS].cost[number % RATE_METERS], m->unit);
	if (max_span(m, need) > MAX_SPAN)
		return NO_SLOT;
	shift = m->slot_shift & 63;
	k = time_max(s->not_before, s->calendar_base) >> shift;
	first = read_once(&c->hint) >> shift;
	if (k <= first)
		k = first;
	first = k == first;
	for (int i = 0; i < CALENDAR_TRIES; i++) {
		closed = read_once(&c->closed[k / 32 % CALENDAR_WORDS]);
		if (closed >> 32 == (k / 32 & 0xffffffff)) {
			open = ~(__u32)closed >> k % 32;
			if (!open) {
				k = (k / 32 + 1) * 32;
				continue;
			}
			k += lowest_bit(open);
		}
		taken = slot_taken(shift, read_once(&c->slot[k % CALENDAR_SLOTS]), k, s->calendar_base);
		room = taken + need <= 1ULL << shift ? need : calendar_room(p, number, k, need, s->calendar_base);
		if (room == need) {
			if (first && need == m->unit)
				*(volatile __u64 *)&c->hint = k << shift;
			return k;
		}
		if (!room || need == m->unit) {
			close_slot(c, k);
			k++;
		} else {
			k += (need >> shift) / 4 + 1;
		}
	}
	return NO_SLOT;
}

/* Books the scratch's packet in slot k, as found by calendar_find, unless it would leave after
 * latest. Sets the booking's departure time in either case. Returns BOOK_SPANS if the packet needs
 * several slots: see calendar_book_span. */
__noinline int calendar_book(const struct policy *p, struct scratch *s, __u32 number, __u64 latest, __u64 k)
{
	__u64 shift, taken, cost, cur, *slot;
	const struct meter *m;
	struct booking *b;
	struct calendar *c;

	if (!p || !s)
		return BOOK_REFUSED;
	m = &p->limit[number / RATE_METERS % MAX_LIMITS].meter[number % RATE_METERS];
	b = &s->charge[number / RATE_METERS % MAX_LIMITS].booking[number % RATE_METERS];
	cost = s->charge[number / RATE_METERS % MAX_LIMITS].cost[number % RATE_METERS];
	c = calendar_of(&p->limit[number / RATE_METERS % MAX_LIMITS], number % RATE_METERS);
	if (!c)
		return BOOK_REFUSED;
	shift = m->slot_shift & 63;
#pragma unroll
	for (int i = 0; i < BOOKED_SLOTS; i++)
		b->taken[i] = 0;
	if (k > (s->now >> shift) + CALENDAR_SLOTS - MAX_SPAN) {
		/* Behind everything booked; and no later packet may go ahead of a giant. */
		cur = read_once(&c->from);
		taken = time_max(time_max(s->not_before, cur), read_once(&c->top));
		b->depart = time_max(s->not_before, time_sub(taken, m->burst));
		b->slot = taken >> shift;
		if (max_span(m, time_max(cost, m->unit)) <= MAX_SPAN || b->depart > latest ||
		    __sync_val_compare_and_swap(&c->from, cur, time_add(taken, cost)) != cur)
			return BOOK_REFUSED;
		return BOOK_DONE;
	}
	slot = &c->slot[k % CALENDAR_SLOTS];
	cur = read_once(slot);
	taken = slot_taken(shift, cur, k, s->calendar_base);
	b->depart = time_max(s->not_before, time_sub((k << shift) + taken, m->burst));
	b->slot = k;
	if (b->depart > latest)
		return BOOK_REFUSED;
	if (taken + cost >= 1ULL << shift ||
	    __sync_val_compare_and_swap(slot, cur, (k << (shift + 1 & 63)) | (taken + cost)) != cur)
		return BOOK_SPANS;
	b->taken[0] = cost;
	bucket_raise(&c->top, (k << shift) + taken + cost);
	return BOOK_DONE;
}

/* Undoes the booking of the first slots, and reopens them. */
__noinline int calendar_unbook(const struct policy *p, const struct scratch *s, __u32 number)
{
	const struct meter *m;
	const struct booking *b;
	struct calendar *c;

	if (!p || !s)
		return 0;
	m = &p->limit[number / RATE_METERS % MAX_LIMITS].meter[number % RATE_METERS];
	b = &s->charge[number / RATE_METERS % MAX_LIMITS].booking[number % RATE_METERS];
	c = calendar_of(&p->limit[number / RATE_METERS % MAX_LIMITS], number % RATE_METERS);
	if (!c)
		return 0;
	for (int i = 0; i < BOOKED_SLOTS; i++) {
		__u64 k = b->slot + i, *slot = &c->slot[k % CALENDAR_SLOTS];
		__u64 *closed = &c->closed[k / 32 % CALENDAR_WORDS];

		if (!b->taken[i] || read_once(slot) >> (m->slot_shift + 1 & 63) != k)
			continue;
		__sync_fetch_and_sub(slot, b->taken[i]);
		if (read_once(closed) >> 32 == (k / 32 & 0xffffffff))
			__sync_fetch_and_and(closed, ~(1ULL << k % 32));
		if (read_once(&c->hint) > k << (m->slot_shift & 63))
			*(volatile __u64 *)&c->hint = k << (m->slot_shift & 63);
	}
	return 0;
}
