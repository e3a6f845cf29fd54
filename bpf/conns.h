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

/* How long a connection is remembered that is not known to be established: one that
 * opens, closes, is in doubt, or is gone, in ns. Linux sends a SYN, or its answer,
 * again after 1, 2, 4 and 8 s; what is silent for longer has mostly been given up,
 * and is counted anew if not. */
const volatile __u64 unsettled = 10ULL * 1000 * 1000 * 1000;

/* How often the queue is looked at, in ns: mostly, and while there is much to do. */
const volatile __u64 sweep_interval = 50ULL * 1000 * 1000;
#define SWEEP_SOON (1ULL * 1000 * 1000)
#define SWEEP_MOST 1024 /* connections looked at in one go, in 0.2 ms or less */

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
	EXPIRED = 1 << 8, /* closed for its silence: it may come back */
	LOCKED = 1 << 9,  /* closed, and taken out of the map or used again just now */
};

/* Bits of a word from here up tell one connection from another with the same tuple that
 * came before it: by the time. */
#define BEGAN_SHIFT 10

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
	/* What it holds: a slot's tag, and in the place of its count the number of
	 * the limit's state. */
	__u64 slot[MAX_HELD];
	__u32 slot_place[MAX_HELD]; /* NOWHERE when there is none */
	/* By side, of the last packet: the sequence number after it, what it
	 * acknowledged, and the number after a FIN. */
	__u32 next[2];
	__u32 ack[2];
	__u32 fin[2];
};

/* Never a map that forgets by itself: nobody would give the slots back. Preallocated,
 * at 200 bytes each: so it needs no memory amid a flood, and a SYN takes a quarter of
 * the time. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
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
	__uint(max_entries, 263168);
	__type(value, struct turn);
} turns SEC(".maps");

struct sweeper {
	struct bpf_timer timer;
	__u64 started;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct sweeper);
} sweepers SEC(".maps");

/* Connections that began on the other side: by their tuples seen from this one. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct tuple);
	__type(value, __u32);
} reversed SEC(".maps");

/* What a limit has done, on one CPU: see decide.h. */
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

/* How long a connection may be silent. */
static __always_inline __u64 patience(const struct flight *f, __u64 word)
{
	if (word & CLOSED || !(word & ESTABLISHED) || word & DOUBTS || (word & FINS) == FINS)
		return unsettled;
	return f->idle;
}

static __always_inline int overdue(const struct flight *f, __u64 word, __u64 now)
{
	return (__s64)(now - load_word(&f->seen)) >= (__s64)patience(f, word);
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

		if (seen == was)
			return give_back(&held, MAX_HELD);
		if (seen & CLOSED || (seen ^ was) >> BEGAN_SHIFT || flags & EXPIRED)
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

/* What is known of the packet's connection. */
enum known {
	UNKNOWN,
	KNOWN,
	GONE,
};

/* A connection that is to begin, or is taken in. */
struct opening {
	struct tuple tuple;
	struct flight flight;
	__u64 earliest; /* a SYN that is sent again leaves no sooner than the first, ns */
	__u64 over;	/* limits that observe, and would have refused it */
	__u64 waits;	/* limits that hold it back */
	__u32 first;	/* the packet is its first SYN */
	__u32 insert;	/* it begins when it is let through */
	__u32 observe;	/* it is let through whatever limits say */
	__u32 adopt;	/* it was there before */
	__u32 held;	/* slots taken */
	__u32 refused;	/* as a connection, not as a packet */
	__u32 silent;	/* and gets no answer */
};

static __always_inline void clear_opening(struct opening *o)
{
	o->earliest = o->over = o->waits = 0;
	o->first = o->insert = o->observe = o->adopt = o->held = 0;
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

/* Whether a segment of side with an RST can be believed: those who get it believe
 * one that is what they expect next (RFC 5961, section 3.2), or that answers their
 * SYN. */
static __always_inline int credible(const struct flight *f, __u64 word, const struct packet *k, __u32 side)
{
	__u32 other = side ^ 1;

	if (!(word & SYN_OF << side))
		return k->tcp_flags & TCP_ACK && k->tcp_ack == f->next[other];
	return k->tcp_seq == f->ack[other] || k->tcp_seq == f->next[side];
}

/* Takes note of a segment of side of a live connection. */
__noinline int note(struct flight *f, const struct packet *k, __u64 hash, __u32 side, __u64 now)
{
	__u32 flags, end;
	__u64 word, set = 0;

	if (!f || !k)
		return 0;
	side &= 1;
	flags = k->tcp_flags;
	word = load_word(&f->word);
	if (now > load_word(&f->seen))
		*(volatile __u64 *)&f->seen = now;
	if (flags & TCP_RST) {
		if (credible(f, word, k, side))
			return close_flight(f, word, 0, now);
		mark_flight(f, hash, DOUBT_OF << side, 0);
		return 0;
	}

	end = sequence_after(k);
	f->next[side] = end;
	if (flags & TCP_ACK)
		f->ack[side] = k->tcp_ack;
	if (flags & TCP_SYN) {
		set |= SYN_OF << side;
		if (!(word & SYN_OF << side))
			f->ack[side ^ 1] = end; /* what the other side expects */
	}
	if (flags & TCP_FIN) {
		f->fin[side] = end;
		set |= FIN_OF << side;
	}
	/* Only who has seen the responder's number knows it. */
	if (!side && flags & TCP_ACK && (word & SYNS) == SYNS && k->tcp_ack == f->next[1])
		set |= ESTABLISHED;
	if ((word | set) != word || word & DOUBT_OF << side)
		word = mark_flight(f, hash, set, DOUBT_OF << side);
	if ((word & FINS) == FINS && !(word & CLOSED) && f->ack[0] == f->fin[1] && f->ack[1] == f->fin[0])
		close_flight(f, word, 0, now);
	return 0;
}

/* Looks up the connection of a segment of side, and takes note of the segment. */
__noinline int follow(const struct packet *k, struct opening *o, __u32 side, __u64 now)
{
	struct flight *f;
	struct tuple t; /* on the stack: before 6.5 a key may not be in what an argument points to */
	__u64 word, hash, seen;
	int again;

	if (!k || !o)
		return UNKNOWN;
	tuple_of(k, side, &o->tuple);
	t = o->tuple;
	f = bpf_map_lookup_elem(&connections, &t);
	if (!f)
		return UNKNOWN;
	hash = flight_hash(&o->tuple);
	word = load_word(&f->word);
	if ((word ^ hash) >> 32)
		return UNKNOWN;
	again = !side && begins(k);
	if (!(word & CLOSED)) {
		if (overdue(f, word, now))
			close_flight(f, word, EXPIRED, now);
		else if (again && (word & FINS) == FINS)
			close_flight(f, word, 0, now);
		word = load_word(&f->word);
	}
	if (word & CLOSED)
		return again || word & EXPIRED ? UNKNOWN : GONE;
	seen = load_word(&f->seen);
	if (again && seen > now)
		o->earliest = seen;
	note(f, k, hash, side, now);
	return KNOWN;
}

/* Looks at the connection that is first in the queue, if it is its turn. Returns
 * whether it is not. */
__noinline int sweep_one(__u64 now)
{
	struct flight *f;
	struct turn turn;
	__u64 word;

	if (bpf_map_peek_elem(&turns, &turn) || (__s64)(turn.check - now) > 0)
		return 1;
	bpf_map_pop_elem(&turns, &turn);
	f = bpf_map_lookup_elem(&connections, &turn.tuple);
	if (!f || load_word(&f->check) != turn.check)
		return 0;
	word = load_word(&f->word);
	if (overdue(f, word, now)) {
		if (!(word & CLOSED)) {
			close_flight(f, word, EXPIRED, now);
		} else if (!(word & LOCKED) && __sync_val_compare_and_swap(&f->word, word, word | LOCKED) == word) {
			bpf_map_delete_elem(&connections, &turn.tuple);
			return 0;
		}
	}
	turn.check = now + unsettled;
	f->check = turn.check;
	bpf_map_push_elem(&turns, &turn, 0); /* where it has just been */
	return 0;
}

static long sweep_next(__u32 i, void *now)
{
	__u64 done = sweep_one(*(__u64 *)now);

	hide(done);
	return done & 1;
}

static int sweep(void *map, __u32 *key, struct sweeper *s)
{
	__u64 now = clock_ns();
	long n = bpf_loop(SWEEP_MOST, sweep_next, &now, 0);

	bpf_timer_start(&s->timer, n < SWEEP_MOST ? sweep_interval : SWEEP_SOON, 0);
	return 0;
}

/* Starts the timer, unless it runs. The map and its programs live on without the
 * daemon, and so does the timer. */
static __always_inline int start_sweeper(void)
{
	__u32 zero = 0;
	struct sweeper *s = bpf_map_lookup_elem(&sweepers, &zero);
	int err;

	if (!s)
		return 0;
	if (s->started)
		return 1;
	err = bpf_timer_init(&s->timer, &sweepers, 1 /* CLOCK_MONOTONIC */);
	if (err && err != -16 /* EBUSY: another CPU does the same just now */)
		return 0;
	if (bpf_timer_set_callback(&s->timer, sweep) || bpf_timer_start(&s->timer, sweep_interval, 0))
		return 0;
	s->started = 1;
	return 1;
}

enum opened {
	OPENED,
	OPEN_ALREADY,
	OPEN_FAILED,
};

/* Enters the connection in the place of one with the same tuple that is closed. */
static __always_inline int open_again(const struct opening *o, const struct tuple *t)
{
	struct flight *f = bpf_map_lookup_elem(&connections, t);
	__u64 word;

	if (!f)
		return OPEN_FAILED;
	word = load_word(&f->word);
	if (!(word & CLOSED))
		return OPEN_ALREADY;
	if (word & LOCKED || __sync_val_compare_and_swap(&f->word, word, word | LOCKED) != word)
		return OPEN_FAILED;
	f->seen = o->flight.seen;
	f->idle = o->flight.idle;
#pragma unroll
	for (int i = 0; i < MAX_HELD; i++) {
		f->slot[i] = o->flight.slot[i];
		f->slot_place[i] = o->flight.slot_place[i];
	}
#pragma unroll
	for (int i = 0; i < 2; i++) {
		f->next[i] = o->flight.next[i];
		f->ack[i] = o->flight.ack[i];
	}
	return __sync_val_compare_and_swap(&f->word, word | LOCKED, o->flight.word) == (word | LOCKED) ? OPENED
												       : OPEN_FAILED;
}

/* Before Linux 6.5 what goes into a map may not be in what an argument points to, and
 * for the stack it is too large. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct flight);
} staging SEC(".maps");

/* Enters the connection in the map, with the slots that were taken for it. */
__noinline int open_connection(struct opening *o, __u64 flags, __u64 now, __u64 depart)
{
	struct turn turn = {};
	struct flight *staged;
	__u32 zero = 0;
	int err; /* Linux 6.1 leaves the upper half of it undefined */

	if (!o || !start_sweeper())
		return OPEN_FAILED;
	o->flight.word = flight_hash(&o->tuple) | (__u32)(now << BEGAN_SHIFT) | flags;
	o->flight.seen = depart;
	o->flight.check = now + unsettled;
	o->flight.idle = here.idle_timeout;
#pragma unroll
	for (__u32 i = 0; i < MAX_HELD; i++) {
		if (i >= o->held)
			o->flight.slot_place[i] = NOWHERE;
	}
	turn.tuple = o->tuple;
	staged = bpf_map_lookup_elem(&staging, &zero);
	if (!staged)
		return OPEN_FAILED;
	*staged = o->flight;
	err = bpf_map_update_elem(&connections, &turn.tuple, staged, BPF_NOEXIST);
	if (err)
		return err == -17 /* EEXIST */ ? open_again(o, &turn.tuple) : OPEN_FAILED;
	turn.check = o->flight.check;
	if (!bpf_map_push_elem(&turns, &turn, 0))
		return OPENED;
	/* It would never end. This cannot be: there is a turn for each. */
	bpf_map_delete_elem(&connections, &turn.tuple);
	return OPEN_FAILED;
}
