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
	STRAY, /* not counted, and the segment might establish it */
	LOST,  /* established, and not counted */
};

/* Whether the responder gets an RST of the initiator and believes it: it goes where the SYN
 * went, and is just what the responder expects (RFC 5961, section 3.2), which is what that
 * acknowledged last, with nothing sent behind it. One that has no connection yet looks at
 * the acknowledgement and at time stamps, too. */
static __always_inline int ends(const struct flight *f, __u64 word, const struct packet *k)
{
	if (!k->intact || f->heard & WAYS || k->via != f->via || k->hops < f->hops)
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

/* Whether a handshake may be completed after an RST of side: a responder forgets no SYN
 * cookie. */
static __always_inline int outlived(__u64 word, __u32 side)
{
	return !(word & PROVEN) && (!side || word & SYN_OF << 1);
}

/* Sets and clears what was heard. */
static __always_inline void hear(struct flight *f, __u32 set, __u32 clear)
{
	if (~f->heard & set)
		__sync_fetch_and_or(&f->heard, set);
	if (f->heard & clear)
		__sync_fetch_and_and(&f->heard, ~clear);
}

/* Takes note of what a segment of side, which is fresh or was sent before, tells of a connection that
 * was there before: what passed then. */
__noinline int note_before(struct flight *f, const struct packet *k, __u32 side, __u32 fresh)
{
	__u32 other = ~side & 1;

	if (!f || !k)
		return 0;
	side &= 1;
	if (fresh && k->payload)
		hear(f, 0, ENDS_OF << side);
	if (!fresh && k->tcp_flags & TCP_FIN && f->heard & QUIET_OF << side)
		hear(f, MISSED_OF << side, 0);
	if (k->tcp_flags & TCP_ACK && f->heard & QUIETS && ahead(k->tcp_ack, f->next[other]))
		hear(f, MISSED_OF << other, 0);
	return 0;
}

/* Takes note of a SYN of the responder. When it answers another SYN than the one that was
 * seen last, another connection begins. Returns whether one does. */
static __always_inline int note_answer(struct flight *f, const struct packet *k, __u64 word)
{
	int other = k->tcp_flags & TCP_ACK && k->tcp_ack != f->ack[1];

	note_replied();
	if (other)
		f->next[0] = f->ack[1] = k->tcp_ack;
	if (other || !(word & SYN_OF << 1))
		f->next[1] = f->ack[0] = sequence_after(k);
	else if (!(word & ESTABLISHED))
		f->next[1] = sequence_after(k);
	if (other)
		hear(f, 0, ENDS);
	return other;
}

/* Whether a segment of the initiator acknowledges what the responder answered to its SYN. */
static __always_inline int answers(const struct flight *f, const struct packet *k)
{
	return k->tcp_flags & TCP_ACK && (k->tcp_ack == f->next[1] || k->tcp_ack == f->ack[0]);
}

/* Takes note of the way of a SYN that is sent again: nobody knows which of them was answered;
 * or of data, as long as no way is known to lead to the responder. */
static __always_inline void note_way(struct flight *f, const struct packet *k)
{
	if (f->hops && f->via != k->via)
		hear(f, SEVERAL_WAYS, 0);
	if (k->hops > f->hops)
		f->hops = k->hops;
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
	/* Who forges a SYN can repeat it as well: that must not keep slots. */
	if (now > load_word(&f->seen) && (word & ESTABLISHED || (!side && f->heard & UNCONFIRMED)))
		*(volatile __u64 *)&f->seen = now;
	if (flags & TCP_RST) {
		if (side && outlived(word, 1) && word & ASKEW) {
			/* It may answer that, while what completes the handshake is under way. */
			mark_flight(f, hash, DOUBT_OF << 1, 0);
			return 0;
		}
		if (side ? ended(f, word, k) : ends(f, word, k)) {
			if (!side && !(word & ESTABLISHED))
				suspect(f, now);
			return close_flight(f, word, outlived(word, side) ? EXPIRED | DOUBT_OF << side : 0, now);
		}
		if (side || k->tcp_seq - f->ack[1] <= WINDOW)
			mark_flight(f, hash, DOUBT_OF << side, 0);
		return 0;
	}

	end = sequence_after(k);
	if (!side && !(word & PROVEN) && !(flags & TCP_SYN) && k->tcp_seq != f->ack[1])
		set |= ASKEW;
	inside = end - f->ack[side ^ 1] <= WINDOW && ahead(end, f->next[side]);
	/* Data where a FIN was, or may be: the other side has got no FIN. */
	if (word & FIN_OF << side && k->payload && !(flags & TCP_FIN) && (k->fragment || !ahead(f->fin[side], end)))
		clear |= FIN_OF << side;
	if (flags & TCP_SYN) {
		set |= SYN_OF << side;
		if (side && note_answer(f, k, word))
			clear |= word & FINS;
	} else if (inside && (k->payload || flags & TCP_FIN || (side && !(word & ESTABLISHED)))) {
		f->next[side] = end; /* an ACK may be behind a FIN that was lost */
	}
	if (f->heard & ENDS)
		note_before(f, k, side, inside);
	if (!side && (f->heard & UNCONFIRMED ? k->payload : flags & TCP_SYN))
		note_way(f, k);
	/* Only who has seen the responder's number knows it. */
	if (!side && !(flags & TCP_SYN) && (word & (SYNS | ESTABLISHED)) == SYNS && answers(f, k)) {
		f->next[1] = f->ack[0] = k->tcp_ack;
		set |= ESTABLISHED;
	} else if (flags & TCP_ACK && ahead(k->tcp_ack, f->ack[side]) &&
		   (side || (word & ESTABLISHED && !ahead(k->tcp_ack, f->next[1])))) {
		f->ack[side] = k->tcp_ack;
		proven = side;
		if (side && f->hops && !(f->heard & SEVERAL_WAYS))
			hear(f, 0, UNCONFIRMED | ADOPTED);
	}
	if (flags & TCP_FIN && inside) {
		f->fin[side] = end;
		set |= FIN_OF << side;
	}
	/* Only who has a connection sends data, or acknowledges it. */
	if (side && (word & SYNS) == SYNS && !(flags & TCP_SYN) && (proven || k->payload))
		set |= ESTABLISHED | PROVEN;
	if (!side && flags & TCP_ACK && !(word & SYN_OF << 1) && !has_replied(here.place))
		set |= ESTABLISHED;
	if (set & ~word & ESTABLISHED && now > load_word(&f->seen))
		*(volatile __u64 *)&f->seen = now;
	clear |= word & DOUBT_OF << side;
	if ((word | set) != word || clear)
		word = mark_flight(f, hash, set, clear);
	if (!(word & CLOSED) && closing(f, word) && f->ack[0] == f->fin[1])
		close_flight(f, word, 0, now);
	return 0;
}

/* Looks at a segment of side of a connection that has no slots, and may be established. */
static __always_inline int note_lapsed(struct flight *f, const struct packet *k, struct opening *o, __u64 word,
				       __u32 side, __u64 now)
{
	__u32 flags = k->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST);

	if (side && flags == (TCP_SYN | TCP_ACK)) {
		*(volatile __u64 *)&f->seen = now;
		note_replied();
		f->ack[1] = k->tcp_ack;
		f->next[1] = sequence_after(k);
		if (!(word & SYN_OF << 1))
			f->ack[0] = f->next[1];
		__sync_val_compare_and_swap(&f->word, word, word | SYN_OF << 1);
	}
	if (side)
		return flags == TCP_ACK && (k->payload || ahead(k->tcp_ack, f->ack[1])) ? LOST : GONE;
	if (flags != TCP_ACK)
		return UNKNOWN;
	o->flight.heard = UNCONFIRMED | (f->heard & ENDS);
	if (!(word & SYN_OF << 1)) {
		o->late = !has_replied(here.place);
		o->flight.ack[1] = k->tcp_seq;
		return UNKNOWN;
	}
	o->late = answers(f, k) && (k->tcp_seq == f->ack[1] || f->heard & ADOPTED);
	o->flight.ack[1] = f->ack[1];
	/* The responder may have given answers that are not remembered. */
	return o->late || f->heard & ADOPTED ? UNKNOWN : STRAY;
}

/* Whether a SYN of a connection without slots is a retransmission. */
static __always_inline int sent_again(const struct flight *f, const struct packet *k, __u64 now)
{
	return sequence_after(k) == f->next[0] && (__s64)(now - load_word(&f->seen)) < (__s64)half_open;
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
		if (overdue(f, t.place, word, now))
			close_flight(f, word, EXPIRED, now);
		else if (again && closing(f, word))
			close_flight(f, word, 0, now);
		word = load_word(&f->word);
	}
	if (lapsed(word) && !again)
		return note_lapsed(f, k, o, word, side, now);
	if (lapsed(word) && !(word & ESTABLISHED))
		suspect(f, now);
	if (word & CLOSED && !(lapsed(word) && sent_again(f, k, now))) {
		if (side && word & EXPIRED && word & ESTABLISHED)
			return LOST;
		return again || word & EXPIRED ? UNKNOWN : GONE;
	}
	seen = load_word(&f->seen);
	if (again && seen > now)
		o->earliest = seen;
	if (!(word & CLOSED)) {
		if (!side && f->interface != o->flight.interface)
			f->interface = o->flight.interface;
		note(f, k, hash, side, now);
	}
	return KNOWN;
}
