/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* TCP state tracking from the segments that pass. What ends a connection is believed of the
 * responder, which the slot protects; of the initiator only what the responder has to believe too. */
#pragma once

#include "conntrack.h"

/* The result of a lookup. */
enum track_result {
	TRACK_NONE,
	TRACK_FOUND,
	TRACK_CLOSED,
	TRACK_STRAY, /* not counted; the segment might establish it */
	TRACK_LOST,  /* established, but not counted */
};

/* Whether an RST of the initiator reaches the responder and ends the connection there. It has to
 * take the path of the SYN, and to have the very sequence number that the responder expects (RFC
 * 5961, section 3.2): the last one it acknowledged, with nothing sent after it. In the handshake
 * the responder also checks the acknowledgement and time stamps. */
static __always_inline int initiator_rst_valid(const struct conn *ct, __u64 state, const struct packet *k)
{
	if (!k->rst_valid || ct->hints & PATH_HINTS || k->dst_mac != ct->dst_mac || k->ttl < ct->ttl)
		return 0;
	if (k->tcp_seq != ct->ack[1] || seq_after(ct->next_seq[0], ct->ack[1]))
		return 0;
	return state & ASSURED || (k->no_options && (!(k->tcp_flags & TCP_ACK) || k->tcp_ack == ct->next_seq[1]));
}

/* Whether an RST of the responder proves that it has no connection. Otherwise it may repeat a
 * sequence number that the initiator made up. */
static __always_inline int responder_rst_valid(const struct conn *ct, __u64 state, const struct packet *k)
{
	if (!(state & SYN_SEEN << 1)) /* it answers the SYN */
		return k->tcp_flags & TCP_ACK && k->tcp_ack == ct->next_seq[0];
	return k->tcp_seq == ct->next_seq[1];
}

/* Whether the handshake may still be completed after an RST in direction dir: the responder may
 * use SYN cookies. */
static __always_inline int survives_rst(__u64 state, __u32 dir)
{
	return !(state & ASSURED) && (!dir || state & SYN_SEEN << 1);
}

/* Sets and clears hints. */
static __always_inline void update_hints(struct conn *ct, __u32 set, __u32 clear)
{
	if (~ct->hints & set)
		__sync_fetch_and_or(&ct->hints, set);
	if (ct->hints & clear)
		__sync_fetch_and_and(&ct->hints, ~clear);
}

/* Updates the FIN hints of an adopted connection. advances says whether the segment is a new one,
 * not a retransmission. */
__noinline int track_adopted(struct conn *ct, const struct packet *k, __u32 dir, __u32 advances)
{
	__u32 peer = ~dir & 1;

	if (!ct || !k)
		return 0;
	dir &= 1;
	if (advances && k->payload)
		update_hints(ct, 0, FIN_HINTS << dir);
	if (!advances && k->tcp_flags & TCP_FIN && ct->hints & NO_DATA << dir)
		update_hints(ct, GAP_SEEN << dir, 0);
	if (k->tcp_flags & TCP_ACK && ct->hints & BOTH_NO_DATA && seq_after(k->tcp_ack, ct->next_seq[peer]))
		update_hints(ct, GAP_SEEN << peer, 0);
	return 0;
}

/* Tracks a SYN-ACK. If it answers another SYN than the last one seen, it begins another
 * connection. Returns whether it does. */
static __always_inline int track_synack(struct conn *ct, const struct packet *k, __u64 state)
{
	int reused = k->tcp_flags & TCP_ACK && k->tcp_ack != ct->ack[1];

	set_reply_seen();
	if (reused)
		ct->next_seq[0] = ct->ack[1] = k->tcp_ack;
	if (reused || !(state & SYN_SEEN << 1))
		ct->next_seq[1] = ct->ack[0] = end_seq(k);
	else if (!(state & ESTABLISHED))
		ct->next_seq[1] = end_seq(k);
	if (reused)
		update_hints(ct, 0, BOTH_FIN_HINTS);
	return reused;
}

/* Whether a segment of the initiator acknowledges the SYN-ACK. */
static __always_inline int acks_synack(const struct conn *ct, const struct packet *k)
{
	return k->tcp_flags & TCP_ACK && (k->tcp_ack == ct->next_seq[1] || k->tcp_ack == ct->ack[0]);
}

/* Records the path of a retransmitted SYN, where any of them may be the one that was answered, or
 * of data, until a path to the responder is confirmed. */
static __always_inline void track_path(struct conn *ct, const struct packet *k)
{
	if (ct->ttl && ct->dst_mac != k->dst_mac)
		update_hints(ct, MULTIPATH, 0);
	if (k->ttl > ct->ttl)
		ct->ttl = k->ttl;
	ct->dst_mac = k->dst_mac;
}

/* Updates a connection that is not closed from a segment in direction dir. */
__noinline int conn_update(struct conn *ct, const struct packet *k, __u64 hash, __u32 dir, __u64 now)
{
	__u32 flags, end, in_window, assured = 0;
	__u64 state, set = 0, clear = 0;

	if (!ct || !k)
		return 0;
	dir &= 1;
	flags = k->tcp_flags;
	state = read_once(&ct->state);
	/* Forged SYNs can be repeated: they must not keep the slots. */
	if (now > read_once(&ct->last_seen) && (state & ESTABLISHED || (!dir && ct->hints & PATH_UNCONFIRMED)))
		*(volatile __u64 *)&ct->last_seen = now;
	if (flags & TCP_RST) {
		if (dir && survives_rst(state, 1) && state & OUT_OF_ORDER) {
			/* It may answer that segment, while the one that completes the handshake
			 * is in transit. */
			set_conn_flags(ct, hash, RST_SEEN << 1, 0);
			return 0;
		}
		if (dir ? responder_rst_valid(ct, state, k) : initiator_rst_valid(ct, state, k)) {
			if (!dir && !(state & ESTABLISHED))
				start_deferral(ct, now);
			return close_conn(ct, state, survives_rst(state, dir) ? EXPIRED | RST_SEEN << dir : 0, now);
		}
		if (dir || k->tcp_seq - ct->ack[1] <= MAX_WINDOW)
			set_conn_flags(ct, hash, RST_SEEN << dir, 0);
		return 0;
	}

	end = end_seq(k);
	if (!dir && !(state & ASSURED) && !(flags & TCP_SYN) && k->tcp_seq != ct->ack[1])
		set |= OUT_OF_ORDER;
	in_window = end - ct->ack[dir ^ 1] <= MAX_WINDOW && seq_after(end, ct->next_seq[dir]);
	/* Data at or after a FIN: the other side has received no FIN. */
	if (state & FIN_SEEN << dir && k->payload && !(flags & TCP_FIN) &&
	    (k->fragment || !seq_after(ct->fin_seq[dir], end)))
		clear |= FIN_SEEN << dir;
	if (flags & TCP_SYN) {
		set |= SYN_SEEN << dir;
		if (dir && track_synack(ct, k, state))
			clear |= state & BOTH_FINS;
	} else if (in_window && (k->payload || flags & TCP_FIN || (dir && !(state & ESTABLISHED)))) {
		ct->next_seq[dir] = end; /* an ACK may follow a FIN that was lost */
	}
	if (ct->hints & BOTH_FIN_HINTS)
		track_adopted(ct, k, dir, in_window);
	if (!dir && (ct->hints & PATH_UNCONFIRMED ? k->payload : flags & TCP_SYN))
		track_path(ct, k);
	/* Only an initiator that received the SYN-ACK knows its sequence number. */
	if (!dir && !(flags & TCP_SYN) && (state & (BOTH_SYNS | ESTABLISHED)) == BOTH_SYNS && acks_synack(ct, k)) {
		ct->next_seq[1] = ct->ack[0] = k->tcp_ack;
		set |= ESTABLISHED;
	} else if (flags & TCP_ACK && seq_after(k->tcp_ack, ct->ack[dir]) &&
		   (dir || (state & ESTABLISHED && !seq_after(k->tcp_ack, ct->next_seq[1])))) {
		ct->ack[dir] = k->tcp_ack;
		assured = dir;
		if (dir && ct->ttl && !(ct->hints & MULTIPATH))
			update_hints(ct, 0, PATH_UNCONFIRMED | ADOPTED);
	}
	if (flags & TCP_FIN && in_window) {
		ct->fin_seq[dir] = end;
		set |= FIN_SEEN << dir;
	}
	/* Only an endpoint with a connection sends data or acknowledges it. */
	if (dir && (state & BOTH_SYNS) == BOTH_SYNS && !(flags & TCP_SYN) && (assured || k->payload))
		set |= ESTABLISHED | ASSURED;
	if (!dir && flags & TCP_ACK && !(state & SYN_SEEN << 1) && !seen_reply(cfg.attach_id))
		set |= ESTABLISHED;
	if (set & ~state & ESTABLISHED && now > read_once(&ct->last_seen))
		*(volatile __u64 *)&ct->last_seen = now;
	clear |= state & RST_SEEN << dir;
	if ((state | set) != state || clear)
		state = set_conn_flags(ct, hash, set, clear);
	if (!(state & CLOSED) && is_closing(ct, state) && ct->ack[0] == ct->fin_seq[1])
		close_conn(ct, state, 0, now);
	return 0;
}

/* Updates a lapsed connection, which may still be established. */
static __always_inline int update_lapsed(struct conn *ct, const struct packet *k, struct new_conn *nc, __u64 state,
					 __u32 dir, __u64 now)
{
	__u32 flags = k->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST);

	if (dir && flags == (TCP_SYN | TCP_ACK)) {
		*(volatile __u64 *)&ct->last_seen = now;
		set_reply_seen();
		ct->ack[1] = k->tcp_ack;
		ct->next_seq[1] = end_seq(k);
		if (!(state & SYN_SEEN << 1))
			ct->ack[0] = ct->next_seq[1];
		__sync_val_compare_and_swap(&ct->state, state, state | SYN_SEEN << 1);
	}
	if (dir)
		return flags == TCP_ACK && (k->payload || seq_after(k->tcp_ack, ct->ack[1])) ? TRACK_LOST
											     : TRACK_CLOSED;
	if (flags != TCP_ACK)
		return TRACK_NONE;
	nc->conn.hints = PATH_UNCONFIRMED | (ct->hints & BOTH_FIN_HINTS);
	if (!(state & SYN_SEEN << 1)) {
		nc->establishes = !seen_reply(cfg.attach_id);
		nc->conn.ack[1] = k->tcp_seq;
		return TRACK_NONE;
	}
	nc->establishes = acks_synack(ct, k) && (k->tcp_seq == ct->ack[1] || ct->hints & ADOPTED);
	nc->conn.ack[1] = ct->ack[1];
	/* The responder may have sent SYN-ACKs that are not recorded. */
	return nc->establishes || ct->hints & ADOPTED ? TRACK_NONE : TRACK_STRAY;
}

/* Whether the SYN of a lapsed connection is a retransmission. */
static __always_inline int is_retransmitted_syn(const struct conn *ct, const struct packet *k, __u64 now)
{
	return end_seq(k) == ct->next_seq[0] && (__s64)(now - read_once(&ct->last_seen)) < (__s64)half_open_timeout;
}

/* Looks up the connection of a segment in direction dir, and updates it. */
__noinline int conn_track(const struct packet *k, struct new_conn *nc, __u32 dir, __u64 now)
{
	struct conn *ct;
	struct tuple t; /* on the stack: before Linux 6.5 an argument cannot point to a map key */
	__u64 state, hash, last_seen;
	int syn;

	if (!k || !nc)
		return TRACK_NONE;
	make_tuple(k, dir, &nc->tuple);
	t = nc->tuple;
	ct = bpf_map_lookup_elem(&connections, &t);
	if (!ct)
		return TRACK_NONE;
	hash = tuple_hash(&nc->tuple);
	state = read_once(&ct->state);
	if ((state ^ hash) >> 32)
		return TRACK_NONE;
	syn = !dir && is_initial_syn(k);
	if (!(state & CLOSED)) {
		if (timed_out(ct, t.attach_id, state, now))
			close_conn(ct, state, EXPIRED, now);
		else if (syn && is_closing(ct, state))
			close_conn(ct, state, 0, now);
		state = read_once(&ct->state);
	}
	if (is_lapsed(state) && !syn)
		return update_lapsed(ct, k, nc, state, dir, now);
	if (is_lapsed(state) && !(state & ESTABLISHED))
		start_deferral(ct, now);
	if (state & CLOSED && !(is_lapsed(state) && is_retransmitted_syn(ct, k, now))) {
		if (dir && state & EXPIRED && state & ESTABLISHED)
			return TRACK_LOST;
		return syn || state & EXPIRED ? TRACK_NONE : TRACK_CLOSED;
	}
	last_seen = read_once(&ct->last_seen);
	if (syn && last_seen > now)
		nc->earliest = last_seen;
	if (!(state & CLOSED)) {
		if (!dir && ct->interface != nc->conn.interface)
			ct->interface = nc->conn.interface;
		conn_update(ct, k, hash, dir, now);
	}
	return TRACK_FOUND;
}
