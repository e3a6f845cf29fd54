/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* How far each TCP connection has come, by the segments that pass. What ends the counting of
 * one is believed of its responder, whose slot it is, and of its initiator only where
 * the responder has to believe it too. */
#pragma once

#include "conns.h"

/* What is known of the packet's connection. */
enum known {
	UNKNOWN,
	KNOWN,
	GONE,
};

#define WINDOW (1U << 30) /* the largest (RFC 7323, section 2.3) */

/* Whether a sequence number is ahead of another. */
static __always_inline int ahead(__u32 n, __u32 other)
{
	return (__s32)(n - other) > 0;
}

/* Whether the responder gets an RST of the initiator and believes it: it goes where the SYN
 * went, and is just what the responder expects (RFC 5961, section 3.2), which is what that
 * acknowledged last, with nothing sent behind it. One that has no connection yet looks at
 * the acknowledgement and at time stamps, too. */
static __always_inline int ends(const struct flight *f, __u64 word, const struct packet *k)
{
	if (!k->intact || k->via != f->via || k->hops < f->hops)
		return 0;
	if (k->tcp_seq != f->ack[1] || ahead(f->next[0], f->ack[1]))
		return 0;
	return word & PROVEN || (k->plain && (!(k->tcp_flags & TCP_ACK) || k->tcp_ack == f->next[1]));
}

/* Whether an RST of the responder says that it has no connection. A number that the
 * initiator has made up comes back in an answer to nonsense. */
static __always_inline int ended(const struct flight *f, __u64 word, const struct packet *k)
{
	if (!(word & SYN_OF << 1)) /* it answers the SYN */
		return k->tcp_flags & TCP_ACK && k->tcp_ack == f->next[0];
	return k->tcp_seq == f->next[1];
}

/* Takes note of a SYN of the responder. When it answers another SYN than the one that was
 * seen last, another connection begins. */
static __always_inline void note_answer(struct flight *f, const struct packet *k, __u64 word)
{
	int other = k->tcp_flags & TCP_ACK && k->tcp_ack != f->ack[1];

	if (!replied[here.place % MAX_PLACES])
		replied[here.place % MAX_PLACES] = 1;
	if (other)
		f->next[0] = f->ack[1] = k->tcp_ack;
	if (other || !(word & SYN_OF << 1))
		f->next[1] = f->ack[0] = sequence_after(k);
}

/* Takes note of the way of a SYN that is sent again: nobody knows which of them was answered;
 * or of data, as long as no way is known to lead to the responder. */
static __always_inline void note_way(struct flight *f, const struct packet *k)
{
	if (f->hops & HOPS && f->via != k->via)
		f->hops |= SEVERAL_WAYS;
	if (k->hops > (f->hops & HOPS))
		f->hops = (f->hops & ~HOPS) | k->hops;
	f->via = k->via;
}

/* Takes note of a segment of side of a live connection. */
__noinline int note(struct flight *f, const struct packet *k, __u64 hash, __u32 side, __u64 now)
{
	__u32 flags, end, inside, proven = 0;
	__u64 word, set = 0, clear = 0;

	if (!f || !k)
		return 0;
	side &= 1;
	flags = k->tcp_flags;
	word = load_word(&f->word);
	/* What has not been established the responder does not keep. */
	if (now > load_word(&f->seen) && (!side || word & ESTABLISHED))
		*(volatile __u64 *)&f->seen = now;
	if (flags & TCP_RST) {
		if (side ? ended(f, word, k) : ends(f, word, k))
			return close_flight(f, word, 0, now);
		if (side || k->tcp_seq - f->ack[1] <= WINDOW)
			mark_flight(f, hash, DOUBT_OF << side, 0);
		return 0;
	}

	end = sequence_after(k);
	inside = end - f->ack[side ^ 1] <= WINDOW && ahead(end, f->next[side]);
	/* Data where a FIN was: the other side has got no FIN. */
	if (word & FIN_OF << side && k->payload && !(flags & TCP_FIN) && !ahead(f->fin[side], end))
		clear |= FIN_OF << side;
	if (flags & TCP_SYN) {
		set |= SYN_OF << side;
		if (side)
			note_answer(f, k, word);
	} else if (inside) {
		f->next[side] = end;
	}
	if (!side && (f->hops & UNCONFIRMED ? k->payload : flags & TCP_SYN))
		note_way(f, k);
	if (flags & TCP_ACK && ahead(k->tcp_ack, f->ack[side]) && (side || !ahead(k->tcp_ack, f->next[1]))) {
		f->ack[side] = k->tcp_ack;
		proven = side;
		if (side && f->hops & HOPS && !(f->hops & SEVERAL_WAYS))
			f->hops &= HOPS;
	}
	if (flags & TCP_FIN && inside) {
		f->fin[side] = end;
		set |= FIN_OF << side;
	}
	/* Only who has seen the responder's number knows it. And only who has a connection
	 * sends data, or acknowledges it. */
	if ((word & SYNS) == SYNS && !(flags & TCP_SYN)) {
		if (side && (proven || k->payload))
			set |= ESTABLISHED | PROVEN;
		if (!side && flags & TCP_ACK && k->tcp_ack == f->next[1])
			set |= ESTABLISHED;
	}
	if (!side && flags & TCP_ACK && !(word & SYN_OF << 1) && !replied[here.place % MAX_PLACES])
		set |= ESTABLISHED;
	clear |= word & DOUBT_OF << side;
	if ((word | set) != word || clear)
		word = mark_flight(f, hash, set, clear);
	if (!(word & CLOSED) && closing(f, word) && f->ack[0] == f->fin[1])
		close_flight(f, word, 0, now);
	return 0;
}

/* Looks at a segment of side of a connection that has lost its slots before it was
 * established. */
static __always_inline int note_late(struct flight *f, const struct packet *k, struct opening *o, __u64 word,
				     __u32 side, __u64 now)
{
	__u32 flags = k->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST);

	if (side && flags == (TCP_SYN | TCP_ACK)) {
		*(volatile __u64 *)&f->seen = now;
		f->next[1] = sequence_after(k);
		__sync_val_compare_and_swap(&f->word, word, word | SYN_OF << 1);
	}
	if (side)
		return k->payload ? UNKNOWN : GONE;
	o->late = word & SYN_OF << 1 && flags == TCP_ACK && k->tcp_ack == f->next[1];
	return UNKNOWN;
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
		else if (again && closing(f, word))
			close_flight(f, word, 0, now);
		word = load_word(&f->word);
	}
	if (lapsed(word) && !again)
		return note_late(f, k, o, word, side, now);
	if (word & CLOSED)
		return again || word & EXPIRED ? UNKNOWN : GONE;
	seen = load_word(&f->seen);
	if (again && seen > now)
		o->earliest = seen;
	note(f, k, hash, side, now);
	return KNOWN;
}
