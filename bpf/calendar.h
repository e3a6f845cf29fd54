/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The calendars of package leaky, statement for statement: buckets whose packets need not
 * leave in the order in which they come. See there for what they are.
 *
 * Several CPUs share one. What is taken of a slot is taken by compare-and-swap: nothing is
 * lost, and none is taken twice. All else (what is closed, the hint) only says where not to
 * look, and may be out of date. Who finds that another CPU has taken what it meant to take
 * goes on behind that. */
#pragma once

#include "scratch.h"
#include "table.h"

#define CALENDAR_SLOTS 2048
#define CALENDAR_WORDS (CALENDAR_SLOTS / 32)
#define MAX_SPAN 256
#define TRIES 64
#define BEYOND (~0ULL)
#define PACED METER_NEW /* meters of bytes and of packets */

struct calendar {
	__u64 from;
	__u64 top;
	__u64 hint;
	__u64 pad[5];
	__u64 closed[CALENDAR_WORDS];
	__u64 slot[CALENDAR_SLOTS];
};

/* By limit and meter. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, MAX_STATES *PACED);
	__type(key, __u32);
	__type(value, struct calendar);
} calendars SEC(".maps");

static __always_inline __u32 calendar_index(const struct limit *l, __u32 meter)
{
	return l->state * PACED + meter;
}

static __always_inline struct calendar *calendar_of(const struct limit *l, __u32 meter)
{
	__u32 i = calendar_index(l, meter);

	return bpf_map_lookup_elem(&calendars, &i);
}

static __always_inline __u64 taken_of(__u64 shift, __u64 word, __u64 k, __u64 base)
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

static __always_inline __u64 span_of(const struct meter *m, __u64 cost)
{
	__u64 shift = m->shift & 63;

	return 2 * (cost >> shift) + 6 * (m->unit >> shift) + 2;
}

/* A walk over slots. */
struct walk {
	__u64 shift;
	__u64 base;
	__u64 slot; /* the first */
	__u64 room; /* seen so far */
	__u64 need;
	__u32 calendar;
	__u32 first;
};

static long see_room(__u32 i, struct walk *w)
{
	struct calendar *c = bpf_map_lookup_elem(&calendars, &w->calendar);

	if (!c)
		return 1;
	w->room += (1ULL << (w->shift & 63)) -
		   taken_of(w->shift, load_word(&c->slot[(w->slot + i) % CALENDAR_SLOTS]), w->slot + i, w->base);
	return !w->room || w->room >= w->need;
}

/* How much is free from slot k on, as far as a packet may be spread, and need at most; 0
 * when nothing is free in slot k. */
__noinline __u64 calendar_room(const struct policy *p, __u32 number, __u64 k, __u64 need, __u64 base)
{
	const struct limit *l;
	const struct meter *m;
	struct walk w = { .slot = k, .need = need, .base = base };

	if (!p)
		return 0;
	l = &p->limit[number / PACED % MAX_LIMITS];
	m = &l->meter[number % PACED];
	w.shift = m->shift;
	hide(w.room); /* what is known of it would be followed from slot to slot */
	w.calendar = calendar_index(l, number % PACED);
	bpf_loop(span_of(m, need), see_room, &w, 0);
	return w.room < need ? w.room : need;
}

static __always_inline void close_slot(struct calendar *c, __u64 k)
{
	__u64 *word = &c->closed[k / 32 % CALENDAR_WORDS], seen = load_word(word);

	if (seen >> 32 != (k / 32 & 0xffffffff))
		__sync_val_compare_and_swap(word, seen, k / 32 << 32 | 1ULL << k % 32);
	else
		__sync_fetch_and_or(word, 1ULL << k % 32);
}

/* BOOK_PARTED is BOOK_HELD, with others between the parts of a packet. */
enum booked { BOOK_REFUSED, BOOK_HELD, BOOK_PARTED, BOOK_MOVED, BOOK_SPREAD };

/* What is to be taken of a calendar. */
struct spread {
	struct booking *booking;
	__u64 shift;
	__u64 base;
	__u64 left;
	__u64 all;
	__u64 begins; /* when that begins of which it takes first */
	__u64 end;    /* of what it takes last */
	__u32 calendar;
	__u32 pad;
};

static long take_part(__u32 i, struct spread *t)
{
	struct calendar *c = bpf_map_lookup_elem(&calendars, &t->calendar);
	__u64 width = 1ULL << (t->shift & 63), k = t->booking->slot + i, seen, taken, part, *slot;

	if (!c)
		return 1;
	slot = &c->slot[k % CALENDAR_SLOTS];
	seen = load_word(slot);
	taken = taken_of(t->shift, seen, k, t->base);
	part = width - taken;
	part = part < t->left ? part : t->left;
	if (part && __sync_val_compare_and_swap(slot, seen, (k << (t->shift + 1 & 63)) | (taken + part)) != seen)
		return 0; /* another CPU has taken some of it: the next one will do */
	if (taken + part == width)
		close_slot(c, k);
	if (t->left == t->all)
		t->begins = (k << (t->shift & 63)) + taken;
	if (i < BOOKED) {
		hide(i);
		t->booking->taken[i % BOOKED] = part;
	}
	t->left -= part;
	t->end = (k << (t->shift & 63)) + taken + part;
	return !t->left;
}

/* Takes what there is from the booking's slot on for the scratch's packet. */
__noinline int calendar_spread(const struct policy *p, struct scratch *s, __u32 number)
{
	const struct limit *l;
	const struct meter *m;
	struct calendar *c;
	struct spread t = {};

	if (!p || !s)
		return BOOK_REFUSED;
	l = &p->limit[number / PACED % MAX_LIMITS];
	m = &l->meter[number % PACED];
	c = calendar_of(l, number % PACED);
	if (!c)
		return BOOK_REFUSED;
	t.booking = &s->charge[number / PACED % MAX_LIMITS].booking[number % PACED];
	t.left = t.all = s->charge[number / PACED % MAX_LIMITS].cost[number % PACED];
	t.base = s->base;
	t.shift = m->shift;
	t.calendar = calendar_index(l, number % PACED);
	hide(t.begins);
	hide(t.end);
	bpf_loop(2 * MAX_SPAN, take_part, &t, 0);
	bucket_merge(&c->top, t.end);
	/* Later than expected, if another CPU has been here. */
	t.booking->depart = time_max(s->from, time_sub(t.begins, m->burst));
	if (t.left)
		return BOOK_REFUSED;
	return t.end - t.begins > t.all ? BOOK_PARTED : BOOK_HELD;
}

/* The first slot from when the packet may leave on that has room for it; or BEYOND. */
__noinline __u64 calendar_find(const struct policy *p, struct scratch *s, __u32 number)
{
	__u64 k, first, shift, taken, room, closed, need;
	const struct meter *m;
	struct calendar *c;
	__u32 open;

	if (!p || !s)
		return BEYOND;
	m = &p->limit[number / PACED % MAX_LIMITS].meter[number % PACED];
	c = calendar_of(&p->limit[number / PACED % MAX_LIMITS], number % PACED);
	if (!c)
		return BEYOND;
	s->base = time_max(load_word(&s->now), load_word(&c->from));
	need = time_max(s->charge[number / PACED % MAX_LIMITS].cost[number % PACED], m->unit);
	if (span_of(m, need) > MAX_SPAN)
		return BEYOND;
	shift = m->shift & 63;
	k = time_max(s->from, s->base) >> shift;
	first = load_word(&c->hint) >> shift;
	if (k <= first)
		k = first;
	first = k == first;
	for (int i = 0; i < TRIES; i++) {
		closed = load_word(&c->closed[k / 32 % CALENDAR_WORDS]);
		if (closed >> 32 == (k / 32 & 0xffffffff)) {
			open = ~(__u32)closed >> k % 32;
			if (!open) {
				k = (k / 32 + 1) * 32;
				continue;
			}
			k += lowest(open);
		}
		taken = taken_of(shift, load_word(&c->slot[k % CALENDAR_SLOTS]), k, s->base);
		room = taken + need <= 1ULL << shift ? need : calendar_room(p, number, k, need, s->base);
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
	return BEYOND;
}

/* Books the scratch's packet under a meter of a limit in slot k, which calendar_find found,
 * at an instant not after latest, or not at all: the booking says when it may leave, or could.
 * Returns BOOK_SPREAD if it is more than one slot that it takes: see calendar_spread. */
__noinline int calendar_take(const struct policy *p, struct scratch *s, __u32 number, __u64 latest, __u64 k)
{
	__u64 shift, taken, cost, seen, *slot;
	const struct meter *m;
	struct booking *b;
	struct calendar *c;

	if (!p || !s)
		return BOOK_REFUSED;
	m = &p->limit[number / PACED % MAX_LIMITS].meter[number % PACED];
	b = &s->charge[number / PACED % MAX_LIMITS].booking[number % PACED];
	cost = s->charge[number / PACED % MAX_LIMITS].cost[number % PACED];
	c = calendar_of(&p->limit[number / PACED % MAX_LIMITS], number % PACED);
	if (!c)
		return BOOK_REFUSED;
	shift = m->shift & 63;
#pragma unroll
	for (int i = 0; i < BOOKED; i++)
		b->taken[i] = 0;
	if (k > (s->now >> shift) + CALENDAR_SLOTS - MAX_SPAN) {
		/* Behind all that is taken; and nothing goes before a giant any more. */
		seen = load_word(&c->from);
		taken = time_max(time_max(s->from, seen), load_word(&c->top));
		b->depart = time_max(s->from, time_sub(taken, m->burst));
		b->slot = taken >> shift;
		if (span_of(m, time_max(cost, m->unit)) <= MAX_SPAN || b->depart > latest ||
		    __sync_val_compare_and_swap(&c->from, seen, time_add(taken, cost)) != seen)
			return BOOK_REFUSED;
		return BOOK_HELD;
	}
	slot = &c->slot[k % CALENDAR_SLOTS];
	seen = load_word(slot);
	taken = taken_of(shift, seen, k, s->base);
	b->depart = time_max(s->from, time_sub((k << shift) + taken, m->burst));
	b->slot = k;
	if (b->depart > latest)
		return BOOK_REFUSED;
	if (taken + cost >= 1ULL << shift ||
	    __sync_val_compare_and_swap(slot, seen, (k << (shift + 1 & 63)) | (taken + cost)) != seen)
		return BOOK_SPREAD;
	b->taken[0] = cost;
	bucket_merge(&c->top, (k << shift) + taken + cost);
	return BOOK_HELD;
}

/* Takes back what a booking took of its first slots, and opens them again. */
__noinline int calendar_return(const struct policy *p, const struct scratch *s, __u32 number)
{
	const struct meter *m;
	const struct booking *b;
	struct calendar *c;

	if (!p || !s)
		return 0;
	m = &p->limit[number / PACED % MAX_LIMITS].meter[number % PACED];
	b = &s->charge[number / PACED % MAX_LIMITS].booking[number % PACED];
	c = calendar_of(&p->limit[number / PACED % MAX_LIMITS], number % PACED);
	if (!c)
		return 0;
	for (int i = 0; i < BOOKED; i++) {
		__u64 k = b->slot + i, *slot = &c->slot[k % CALENDAR_SLOTS];
		__u64 *closed = &c->closed[k / 32 % CALENDAR_WORDS];

		if (!b->taken[i] || load_word(slot) >> (m->shift + 1 & 63) != k)
			continue;
		__sync_fetch_and_sub(slot, b->taken[i]);
		if (load_word(closed) >> 32 == (k / 32 & 0xffffffff))
			__sync_fetch_and_and(closed, ~(1ULL << k % 32));
		if (load_word(&c->hint) > k << (m->shift & 63))
			*(volatile __u64 *)&c->hint = k << (m->shift & 63);
	}
	return 0;
}
