/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The TCP connections that limits count: which there are, how far each has come,
 * and the slots it holds.
 *
 * A connection's slots are given back once, by who sets CLOSED in its word. It is
 * then remembered for a while, so that what is still under way is not mistaken for
 * a connection that was there before.
 *
 * All connections are looked at in turn, each once in every span of time in which
 * one that is not established expires: they stand in a queue, and a timer takes the
 * first ones out and puts them in again at the end. There is one timer for all. A
 * timer for each was tried: kernels before 6.10 have no safe way to take it out of a
 * map while it runs, and 6.18 got memory for 250 of them at once, of 20,000. */
#pragma once

#include "here.h"
#include "packet.h"
#include "slots.h"

/* How long a connection is remembered that closes, is in doubt, or is gone, in ns. */
const volatile __u64 unsettled = 10ULL * 1000 * 1000 * 1000;

/* How long a SYN reserves slots, in ns: a handshake takes a round trip. */
const volatile __u64 half_open = 3ULL * 1000 * 1000 * 1000;

/* How long one without slots is remembered, since the responder's last answer, in ns: Linux
 * sends those after 1, 2, 4, 8 and 16 s, and has the connection for 32 s more; its SYN cookies
 * hold for up to 120 s. When it is established after all, it needs slots first. */
const volatile __u64 late = 120ULL * 1000 * 1000 * 1000;

/* Until when SYNs reserve no slots under a limit, in ns, by its state: a handshake was not
 * completed, and a SYN costs nothing to forge. Until then slots are taken by the ACK that
 * completes a handshake, which takes an address at which answers arrive. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_STATES);
	__type(key, __u32);
	__type(value, __u64);
} suspected SEC(".maps");

/* How long a handshake that was not completed is held against others, in ns. */
const volatile __u64 suspicion = 60ULL * 1000 * 1000 * 1000;

/* Whether replies come back by the interface, by its place: a responder has answered a SYN, of
 * which another program takes note. Where none has ever, the initiator is believed alone. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_PLACES);
	__type(key, __u32);
	__type(value, __u32);
} replied SEC(".maps");

static __always_inline int has_replied(__u32 place)
{
	const volatile __u32 *at;

	place %= MAX_PLACES;
	at = bpf_map_lookup_elem(&replied, &place);
	return at && *at;
}

static __always_inline void note_replied(void)
{
	__u32 place = here.place % MAX_PLACES;
	volatile __u32 *at = bpf_map_lookup_elem(&replied, &place);

	if (at && !*at)
		*at = 1;
}

/* How often the queue is looked at, in ns: mostly, and while there is much to do. */
const volatile __u64 sweep_interval = 50ULL * 1000 * 1000;
#define SWEEP_SOON (1ULL * 1000 * 1000)
#define SWEEP_MOST 1024 /* connections looked at in one go, in 0.2 ms or less */

#define MAX_CONNECTIONS 262144

/* So many crowd the table. */
const volatile __u64 crowd = MAX_CONNECTIONS / 2;

/* How often each is looked at, in ns, and how long a handshake may take without slots where the
 * table is crowded: then it is forgotten. */
const volatile __u64 turn_interval = 3ULL * 1000 * 1000 * 1000;

#define MAX_HELD 4 /* shaper.MaxConnectionLimits */

/* A connection's ends, as who begins it has them, and where it is seen. */
struct tuple {
	__u32 initiator[4]; /* as in struct packet */
	__u32 responder[4];
	__u16 initiator_port;
	__u16 responder_port;
	__u32 place; /* of the attachment */
};

/* Sides: 0 is the initiator's, whose packets meet the limits, 1 is the other. */
enum flight_flag {
	SYN_OF = 1 << 0, /* << side: it was seen */
	FIN_OF = 1 << 2,
	DOUBT_OF = 1 << 4, /* sent an RST that nobody may have believed */
	ESTABLISHED = 1 << 6,
	CLOSED = 1 << 7,  /* holds no slots any more */
	EXPIRED = 1 << 8, /* closed for its silence, without proof, or from the first: it may come back */
	LOCKED = 1 << 9,  /* closed, and taken out of the map or used again just now */
	PROVEN = 1 << 10, /* established by what the responder says */
	ASKEW = 1 << 11,  /* the initiator has sent something out of order, before that */
};

/* Bits of a word from here up tell one connection from another with the same tuple that
 * came before it: by the time. */
#define BEGAN_SHIFT 12

#define FINS (FIN_OF | FIN_OF << 1)
#define SYNS (SYN_OF | SYN_OF << 1)
#define DOUBTS (DOUBT_OF | DOUBT_OF << 1)

struct flight {
	/* Flags, the lowest bits of when it began, and in the upper half a hash of the
	 * tuple: memory of the map is used again at once, and a change is not for whom it
	 * holds then. */
	__u64 word;
	__u64 seen;  /* the last packet, ns; in the future when a SYN has to wait */
	__u64 check; /* when it is looked at next, ns: marks its entry in the queue */
	__u64 idle;  /* may last so long, ns */
	/* What it holds, or has held: a slot's tag, and in the place of its count the number
	 * of the limit's state; 0 where it needs no slot. */
	__u64 slot[MAX_HELD];
	__u32 slot_place[MAX_HELD]; /* NOWHERE when it is not held */
	/* By side: the highest sequence number that it sent, what it acknowledged, and
	 * the number after a FIN. Before a connection is established, the responder's last
	 * answer to the SYN and its first: its numbers may differ. */
	__u32 next[2];
	__u32 ack[2];
	__u32 fin[2];
	/* Of the SYN, which came to the responder, as it answered; or of what came first of
	 * one that was there before. */
	__u32 via;
	__u32 hops;	 /* 0 when no way is known */
	__u32 heard;	 /* enum heard; both directions change it, each by itself */
	__u32 interface; /* by which the initiator's last segment came or left, and enum interface_flag */
};

/* What is known of the way that the initiator's segments take, and of a connection that was there
 * before. It is not known whether a segment comes to the responder until that acknowledges it. */
enum heard {
	UNCONFIRMED = 1 << 0,
	SEVERAL_WAYS = 1 << 1, /* and not which of them leads there */
	ADOPTED = 1 << 2,      /* nor what the responder answered to a SYN */
	QUIET_OF = 1 << 3,     /* << side: it was there before, and has sent no data since */
	MISSED_OF = 1 << 5,    /* << side: and something that was not seen, which may be a FIN */
};

#define WAYS (UNCONFIRMED | SEVERAL_WAYS | ADOPTED)
#define QUIETS (QUIET_OF | QUIET_OF << 1)
#define ENDS_OF (QUIET_OF | MISSED_OF)
#define ENDS (ENDS_OF | ENDS_OF << 1)

/* Of an interface, which direction its attachment has. */
enum interface_flag {
	AT_EGRESS = 1U << 31,
};

/* Never a map that forgets by itself: nobody would give the slots back. Preallocated,
 * at 210 bytes each: so it needs no memory amid a flood, and a SYN takes a quarter of
 * the time. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_CONNECTIONS);
	__type(key, struct tuple);
	__type(value, struct flight);
} connections SEC(".maps");

/* What a connection in the queue is looked up by. */
struct turn {
	struct tuple tuple;
	__u64 check; /* the connection's */
};

/* One for each connection, and some for those that CPUs have in hand. */
struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, MAX_CONNECTIONS + 1024);
	__type(value, struct turn);
} turns SEC(".maps");

/* What there is once: the timer, and how many connections are in the map. */
struct keeper {
	struct bpf_timer timer;
	__u64 connections;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct keeper);
} keepers SEC(".maps");

static __always_inline struct keeper *the_keeper(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&keepers, &zero);
}

/* Until when handshakes may be completed that were forgotten, by a hash of their tuples. Where
 * another connection has the same, that is taken for one of them if nobody knows it. */
#define FORGOTTEN_SHIFT 27 /* in so many bits of ns, 0.13 s */
#define FORGOTTEN_WORDS 16

struct forgotten_line {
	__u32 until[FORGOTTEN_WORDS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_CONNECTIONS);
	__type(key, __u32);
	__type(value, struct forgotten_line);
} forgotten SEC(".maps");

/* Connections that began on the other side: by their tuples seen from this one. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct tuple);
	__type(value, __u32);
} reversed SEC(".maps");

/* What a limit has done, on one CPU: see count.h. */
struct state;
static __always_inline void count_in_flight(__u32 number, __u64 n);

static __always_inline __u64 flight_hash(const struct tuple *t)
{
	__u64 h = t->place;

#pragma unroll
	for (int i = 0; i < 4; i++)
		h = (h * 0x9e3779b97f4a7c15ULL ^ t->initiator[i]) * 0x9e3779b97f4a7c15ULL ^ t->responder[i];
	h = h * 0x9e3779b97f4a7c15ULL ^ ((__u32)t->initiator_port << 16 | t->responder_port);
	return h * 0x9e3779b97f4a7c15ULL & ~0xffffffffULL;
}

static __always_inline volatile __u32 *forgotten_at(const struct tuple *t)
{
	__u32 hash = flight_hash(t) >> 32, line = hash / FORGOTTEN_WORDS % MAX_CONNECTIONS;
	struct forgotten_line *l = bpf_map_lookup_elem(&forgotten, &line);

	return l ? &l->until[hash % FORGOTTEN_WORDS] : 0;
}

/* Takes note that a handshake was forgotten. */
__noinline int forget(const struct tuple *t, __u64 now)
{
	volatile __u32 *until = t ? forgotten_at(t) : 0;

	if (until)
		*until = ((now + late) >> FORGOTTEN_SHIFT) + 1;
	return 0;
}

/* Whether the handshake of a connection may have been forgotten, and may be completed. */
__noinline int is_forgotten(const struct tuple *t, __u64 now)
{
	volatile __u32 *until = t ? forgotten_at(t) : 0;

	return until && *until > (__u32)(now >> FORGOTTEN_SHIFT);
}

/* Whether both sides have closed, and the responder knows. */
static __always_inline int closing(const struct flight *f, __u64 word)
{
	return (word & FINS) == FINS && f->ack[1] == f->fin[0];
}

/* Whether both sides may have closed: nothing is known of the responder, or a FIN may have passed
 * before the connection was taken in. That it has is likely when the other side closes, or something
 * was not seen. */
static __always_inline int may_be_closing(const struct flight *f, __u64 word)
{
	__u32 heard = *(const volatile __u32 *)&f->heard;

	if (word & FIN_OF && !(word & SYN_OF << 1))
		return 1;
	if (!(heard & ENDS) || !(word & FINS || heard & (MISSED_OF | MISSED_OF << 1)))
		return 0;
	return (word & FIN_OF || heard & ENDS_OF) && (word & FIN_OF << 1 || heard & ENDS_OF << 1);
}

/* Whether a connection may still open, or not have ended before it opened. */
static __always_inline int unsure(__u64 word)
{
	return !(word & ESTABLISHED) || (word & DOUBTS && !(word & PROVEN));
}

/* Whether a connection has no slots, and may be established yet. */
static __always_inline int lapsed(__u64 word)
{
	return word & CLOSED && word & EXPIRED && unsure(word);
}

/* How long a connection of a place may be silent. */
__noinline __u64 patience(const struct flight *f, __u32 place, __u64 word)
{
	if (!f)
		return 0;
	if (lapsed(word) && (word & SYN_OF << 1 || !has_replied(place)))
		return late;
	if (word & CLOSED)
		return unsettled;
	if (unsure(word))
		return half_open;
	if (word & DOUBTS || closing(f, word) || may_be_closing(f, word))
		return unsettled;
	return f->idle;
}

static __always_inline int overdue(const struct flight *f, __u32 place, __u64 word, __u64 now)
{
	return (__s64)(now - load_word(&f->seen)) >= (__s64)patience(f, place, word);
}

/* Gives back the first slots that are held. */
__noinline int give_back(const struct flight *f, __u32 held)
{
	if (!f)
		return 0;
#pragma unroll
	for (__u32 i = 0; i < MAX_HELD; i++) {
		if (i < held && f->slot_place[i] != NOWHERE && slot_release(f->slot_place[i], f->slot[i]))
			count_in_flight(f->slot[i] & SLOT_COUNT, -1);
	}
	return 0;
}

/* Takes note of a connection that was not established, though it could have been. */
__noinline int suspect(const struct flight *f, __u64 now)
{
	if (!f || f->heard & UNCONFIRMED)
		return 0;
	for (int i = 0; i < MAX_HELD; i++) {
		__u32 number = f->slot[i] % MAX_STATES;
		__u64 *until = bpf_map_lookup_elem(&suspected, &number);

		if (until && f->slot[i])
			*(volatile __u64 *)until = now + suspicion;
	}
	return 0;
}

/* Whether SYNs reserve no slots under the limit of a state. */
static __always_inline int is_suspected(__u32 number, __u64 now)
{
	const __u64 *until = bpf_map_lookup_elem(&suspected, &number);

	return until && load_word(until) > now;
}

/* Closes a connection whose word was was: it gives its slots back and is remembered
 * from now on. One that has changed meanwhile has not expired. */
__noinline int close_flight(struct flight *f, __u64 was, __u64 flags, __u64 now)
{
	struct flight held;

	if (!f)
		return 0;
	__builtin_memcpy(&held, f, sizeof(held));
	*(volatile __u64 *)&f->seen = now;
	for (int i = 0; i < 8; i++) {
		__u64 seen = __sync_val_compare_and_swap(&f->word, was, was | CLOSED | flags);

		if (seen == was) {
			if (flags == EXPIRED && !(was & ESTABLISHED))
				suspect(&held, now);
			return give_back(&held, MAX_HELD);
		}
		if (seen & CLOSED || (seen ^ was) >> BEGAN_SHIFT || flags == EXPIRED)
			return 0;
		was = seen;
	}
	return 0;
}

/* Sets and clears flags of a connection that is not closed. Returns its word. */
__noinline __u64 mark_flight(struct flight *f, __u64 hash, __u64 set, __u64 clear)
{
	__u64 was;

	if (!f)
		return CLOSED;
	was = load_word(&f->word);
	for (int i = 0; i < 8; i++) {
		__u64 is = (was & ~clear) | set, seen;

		if ((was ^ hash) >> 32)
			return CLOSED; /* that of another one now */
		if (was & CLOSED || was == is)
			break;
		seen = __sync_val_compare_and_swap(&f->word, was, is);
		if (seen == was)
			return is;
		was = seen;
	}
	return was;
}

/* Whether a packet begins a connection. */
static __always_inline int begins(const struct packet *k)
{
	return k->l4 && (k->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
}

/* The sequence number after a segment. */
static __always_inline __u32 sequence_after(const struct packet *k)
{
	return k->tcp_seq + k->payload + !!(k->tcp_flags & TCP_SYN) + !!(k->tcp_flags & TCP_FIN);
}

#define WINDOW (1U << 30) /* the largest (RFC 7323, section 2.3) */

/* Whether a sequence number is ahead of another. */
static __always_inline int ahead(__u32 n, __u32 other)
{
	return (__s32)(n - other) > 0;
}

/* A connection that is to begin, or is taken in. */
struct opening {
	struct tuple tuple;
	struct flight flight;
	__u64 earliest;	  /* a SYN that is sent again leaves no sooner than the first, ns */
	__u64 turn;	  /* when new_connections let it leave, ticks */
	__u64 over;	  /* limits that observe, and would have refused it */
	__u64 waits;	  /* limits that hold it back */
	__u32 first;	  /* the packet is its first SYN, or it is late */
	__u32 late;	  /* the packet establishes one that has no slots */
	__u32 stray;	  /* it may establish one that was forgotten */
	__u32 unreserved; /* it begins without slots */
	__u32 fast;	  /* and its responder may not wait for an ACK */
	__u32 insert;	  /* it begins when it is let through */
	__u32 observe;	  /* it is let through whatever limits say */
	__u32 adopt;	  /* it was there before */
	__u32 held;	  /* slots taken */
	__u32 refused;	  /* as a connection, not as a packet */
	__u32 silent;	  /* and gets no answer */
	__u32 last;	  /* the limit whose turn that is */
};

static __always_inline void clear_opening(struct opening *o)
{
	o->earliest = o->turn = o->over = o->waits = 0;
	o->first = o->late = o->stray = o->unreserved = o->fast = o->insert = o->observe = o->adopt = o->held = 0;
	o->refused = o->silent = 0;
}

/* Whether a connection whose beginning nobody has seen is likely to have begun where
 * its tuple says: clients' ports are high. */
static __always_inline int likely(const struct tuple *t)
{
	return t->responder_port < t->initiator_port;
}

static __always_inline void tuple_of(const struct packet *k, __u32 side, struct tuple *t)
{
#pragma unroll
	for (int i = 0; i < 4; i++) {
		t->initiator[i] = side ? k->destination[i] : k->source[i];
		t->responder[i] = side ? k->source[i] : k->destination[i];
	}
	t->initiator_port = side ? k->port : k->source_port;
	t->responder_port = side ? k->source_port : k->port;
	t->place = here.place;
}
