/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Tracking of the TCP connections that limits count: their state and their slots.
 *
 * The CPU that sets CLOSED in a connection's state releases its slots, so they are released once.
 * The entry stays for a while, so that segments in transit do not look like those of a connection
 * that began before it was tracked.
 *
 * All connections are in a queue, and one timer sweeps it: it takes entries from the front,
 * checks them and puts them back at the end. Each is checked once per recheck_interval. A timer
 * per connection was tried: kernels before 6.10 cannot safely remove it from a map while it runs,
 * and 6.18 got memory for 250 of 20,000 at once. */
#pragma once

#include "config.h"
#include "packet.h"
#include "conn_slots.h"

/* How long a connection that is closing, closed or may have been reset is remembered, in ns. */
const volatile __u64 closing_timeout = 10ULL * 1000 * 1000 * 1000;

/* How long a SYN holds slots, in ns: a handshake takes a round trip. */
const volatile __u64 half_open_timeout = 3ULL * 1000 * 1000 * 1000;

/* How long a half-open connection without slots is remembered after the responder's last SYN-ACK,
 * in ns. Linux retransmits those after 1, 2, 4, 8 and 16 s and keeps the connection for 32 s more;
 * its SYN cookies are valid for up to 120 s. If it is established after all, it has to take slots
 * first. */
const volatile __u64 deferred_timeout = 120ULL * 1000 * 1000 * 1000;

/* Until when the slots of a limit are deferred, in ns, by limit ID. A handshake was not completed,
 * and SYNs are cheap to forge. Until then the ACK that completes a handshake takes the slots: it
 * proves that replies reach the initiator's address. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_LIMIT_IDS);
	__type(key, __u32);
	__type(value, __u64);
} defer_until SEC(".maps");

/* For how long an incomplete handshake defers slots, in ns. */
const volatile __u64 defer_duration = 60ULL * 1000 * 1000 * 1000;

/* Whether replies pass an attachment's interfaces, by attachment ID: the reply tracker has seen a
 * SYN-ACK. If it never has, the initiator's segments alone establish a connection. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_ATTACHMENTS);
	__type(key, __u32);
	__type(value, __u32);
} reply_seen SEC(".maps");

static __always_inline int seen_reply(__u32 attach_id)
{
	const volatile __u32 *reply;

	attach_id %= MAX_ATTACHMENTS;
	reply = bpf_map_lookup_elem(&reply_seen, &attach_id);
	return reply && *reply;
}

static __always_inline void set_reply_seen(void)
{
	__u32 attach_id = cfg.attach_id % MAX_ATTACHMENTS;
	volatile __u32 *reply = bpf_map_lookup_elem(&reply_seen, &attach_id);

	if (reply && !*reply)
		*reply = 1;
}

/* The interval of the sweep timer, in ns: normally, and when a batch was not enough. */
const volatile __u64 sweep_interval = 50ULL * 1000 * 1000;
#define SWEEP_BUSY_INTERVAL (1ULL * 1000 * 1000)
#define SWEEP_BATCH 1024 /* connections per batch, in 0.2 ms or less */

#define MAX_CONNECTIONS 262144

/* Above this number of connections, half-open ones without slots are dropped early. */
const volatile __u64 early_drop_threshold = MAX_CONNECTIONS / 2;

/* How often each connection is checked, in ns. It is also the age at which early drop begins. */
const volatile __u64 recheck_interval = 3ULL * 1000 * 1000 * 1000;

#define MAX_CONN_SLOTS 4 /* shaper.MaxConnectionLimits */

/* A connection's addresses and ports, and the attachment that tracks it. */
struct tuple {
	__u32 initiator[4]; /* as in struct packet */
	__u32 responder[4];
	__u16 initiator_port;
	__u16 responder_port;
	__u32 attach_id;
};

/* Flags of enum conn_flag with a "<< dir" exist per direction: 0 is the original direction, from
 * the initiator, which the limits apply to; 1 is the reply direction. */
enum conn_flag {
	SYN_SEEN = 1 << 0, /* << dir */
	FIN_SEEN = 1 << 2,
	RST_SEEN = 1 << 4, /* << dir: an RST that its receiver may have ignored */
	ESTABLISHED = 1 << 6,
	CLOSED = 1 << 7,	/* its slots are released */
	EXPIRED = 1 << 8,	/* closed by a timeout, on weak evidence, or from the start: it may come back */
	LOCKED = 1 << 9,	/* closed, and being deleted or reused at this moment */
	ASSURED = 1 << 10,	/* established, as the responder's segments prove */
	OUT_OF_ORDER = 1 << 11, /* the initiator has sent something out of order before ASSURED */
};

/* The bits of the state from here up are the start time. They distinguish a connection from
 * earlier ones of the same tuple. */
#define START_SHIFT 12

#define BOTH_FINS (FIN_SEEN | FIN_SEEN << 1)
#define BOTH_SYNS (SYN_SEEN | SYN_SEEN << 1)
#define ANY_RST (RST_SEEN | RST_SEEN << 1)

struct conn {
	/* Flags, the low bits of the start time, and in the upper half a hash of the tuple: the
	 * map reuses an entry's memory at once, so an update checks that it is still the same
	 * connection. */
	__u64 state;
	__u64 last_seen;    /* time of the last packet, ns; in the future while a SYN waits */
	__u64 sweep_at;	    /* time of the next check, ns; identifies the valid entry in sweep_queue */
	__u64 idle_timeout; /* ns */
	/* The slots that it holds or has held: the slot's tag, with the limit ID in the place of
	 * the count; 0 where it needs none. */
	__u64 slot[MAX_CONN_SLOTS];
	__u32 slot_index[MAX_CONN_SLOTS]; /* NO_INDEX where none is held */
	/* By direction: the sequence number after the last one sent, the highest acknowledgement,
	 * and the sequence number after a FIN. Before the connection is established, next_seq[1]
	 * is of the responder's last SYN-ACK and ack[0] of its first: they may differ. */
	__u32 next_seq[2];
	__u32 ack[2];
	__u32 fin_seq[2];
	/* Of the SYN that reached the responder, as it was answered; of the first segment where
	 * the connection was adopted. */
	__u32 dst_mac;
	__u32 ttl;	 /* 0 when no path is known */
	__u32 hints;	 /* enum conn_hint; both directions update it, each atomically */
	__u32 interface; /* ifindex of the initiator's last segment, and enum interface_flag */
};

/* Hints about the path of the initiator's segments, which is unconfirmed until the responder
 * acknowledges one of them; and about adopted connections. */
enum conn_hint {
	PATH_UNCONFIRMED = 1 << 0,
	MULTIPATH = 1 << 1, /* segments took several paths; unknown which reaches the responder */
	ADOPTED = 1 << 2,   /* began before it was tracked: its handshake is unknown */
	NO_DATA = 1 << 3,   /* << dir: adopted, and no data seen since */
	GAP_SEEN = 1 << 5,  /* << dir: adopted, and a segment was missed, maybe a FIN */
};

#define PATH_HINTS (PATH_UNCONFIRMED | MULTIPATH | ADOPTED)
#define BOTH_NO_DATA (NO_DATA | NO_DATA << 1)
#define FIN_HINTS (NO_DATA | GAP_SEEN)
#define BOTH_FIN_HINTS (FIN_HINTS | FIN_HINTS << 1)

/* Set in the interface of an egress attachment. */
enum interface_flag {
	AT_EGRESS = 1U << 31,
};

/* Not an LRU map: evicted connections would never release their slots. Preallocated, at 210 bytes
 * each: it needs no allocation amid a flood, and a SYN takes a quarter of the time. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_CONNECTIONS);
	__type(key, struct tuple);
	__type(value, struct conn);
} connections SEC(".maps");

/* An entry of sweep_queue. */
struct sweep_entry {
	struct tuple tuple;
	__u64 sweep_at; /* stale unless equal to the connection's */
};

/* One entry for each connection, and some for those in the hands of CPUs. */
struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, MAX_CONNECTIONS + 1024);
	__type(value, struct sweep_entry);
} sweep_queue SEC(".maps");

/* The sweep timer, and the number of connections in the map. There is one. */
struct sweeper {
	struct bpf_timer timer;
	__u64 connections;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct sweeper);
} sweepers SEC(".maps");

static __always_inline struct sweeper *get_sweeper(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&sweepers, &zero);
}

/* When forgotten handshakes expire, by a hash of their tuples. An unknown connection with the same
 * hash is taken for one of them. */
#define FORGOTTEN_SHIFT 27 /* unit of expires: 2^27 ns, 0.13 s */
#define FORGOTTEN_WORDS 16

struct forgotten_line {
	__u32 expires[FORGOTTEN_WORDS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_CONNECTIONS);
	__type(key, __u32);
	__type(value, struct forgotten_line);
} forgotten SEC(".maps");

/* Connections that began in the reply direction, by their tuples as seen in the original one. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct tuple);
	__type(value, __u32);
} reversed SEC(".maps");

/* See counters.h. */
struct counters;
static __always_inline void count_in_flight(__u32 id, __u64 n);

static __always_inline __u64 tuple_hash(const struct tuple *t)
{
	__u64 h = t->attach_id;

#pragma unroll
	for (int i = 0; i < 4; i++)
		h = (h * 0x9e3779b97f4a7c15ULL ^ t->initiator[i]) * 0x9e3779b97f4a7c15ULL ^ t->responder[i];
	h = h * 0x9e3779b97f4a7c15ULL ^ ((__u32)t->initiator_port << 16 | t->responder_port);
	return h * 0x9e3779b97f4a7c15ULL & ~0xffffffffULL;
}

static __always_inline volatile __u32 *forgotten_at(const struct tuple *t)
{
	__u32 hash = tuple_hash(t) >> 32, line = hash / FORGOTTEN_WORDS % MAX_CONNECTIONS;
	struct forgotten_line *l = bpf_map_lookup_elem(&forgotten, &line);

	return l ? &l->expires[hash % FORGOTTEN_WORDS] : 0;
}

/* Records that a handshake was forgotten. */
__noinline int mark_forgotten(const struct tuple *t, __u64 now)
{
	volatile __u32 *expires = t ? forgotten_at(t) : 0;

	if (expires)
		*expires = ((now + deferred_timeout) >> FORGOTTEN_SHIFT) + 1;
	return 0;
}

/* Whether the handshake of a connection may have been forgotten, and may still be completed. */
__noinline int is_forgotten(const struct tuple *t, __u64 now)
{
	volatile __u32 *expires = t ? forgotten_at(t) : 0;

	return expires && *expires > (__u32)(now >> FORGOTTEN_SHIFT);
}

/* Whether both sides have sent a FIN, and the responder has acknowledged the initiator's. */
static __always_inline int is_closing(const struct conn *ct, __u64 state)
{
	return (state & BOTH_FINS) == BOTH_FINS && ct->ack[1] == ct->fin_seq[0];
}

/* Whether both sides may have closed: the initiator has, and nothing is known of the responder; or
 * FINs may have passed before the connection was adopted. The latter is likely only once the other
 * side closes, or a segment was missed. */
static __always_inline int may_be_closing(const struct conn *ct, __u64 state)
{
	__u32 hints = *(const volatile __u32 *)&ct->hints;

	if (state & FIN_SEEN && !(state & SYN_SEEN << 1))
		return 1;
	if (!(hints & BOTH_FIN_HINTS) || !(state & BOTH_FINS || hints & (GAP_SEEN | GAP_SEEN << 1)))
		return 0;
	return (state & FIN_SEEN || hints & FIN_HINTS) && (state & FIN_SEEN << 1 || hints & FIN_HINTS << 1);
}

/* Whether the handshake may be incomplete, or an RST may not have ended it. */
static __always_inline int may_be_half_open(__u64 state)
{
	return !(state & ESTABLISHED) || (state & ANY_RST && !(state & ASSURED));
}

/* Whether a connection has no slots, and may still be established. */
static __always_inline int is_lapsed(__u64 state)
{
	return state & CLOSED && state & EXPIRED && may_be_half_open(state);
}

/* The idle timeout of a connection in its current state, ns. */
__noinline __u64 conn_timeout(const struct conn *ct, __u32 attach_id, __u64 state)
{
	if (!ct)
		return 0;
	if (is_lapsed(state) && (state & SYN_SEEN << 1 || !seen_reply(attach_id)))
		return deferred_timeout;
	if (state & CLOSED)
		return closing_timeout;
	if (may_be_half_open(state))
		return half_open_timeout;
	if (state & ANY_RST || is_closing(ct, state) || may_be_closing(ct, state))
		return closing_timeout;
	return ct->idle_timeout;
}

static __always_inline int timed_out(const struct conn *ct, __u32 attach_id, __u64 state, __u64 now)
{
	return (__s64)(now - read_once(&ct->last_seen)) >= (__s64)conn_timeout(ct, attach_id, state);
}

/* Releases the first n slots. */
__noinline int release_slots(const struct conn *ct, __u32 n)
{
	if (!ct)
		return 0;
#pragma unroll
	for (__u32 i = 0; i < MAX_CONN_SLOTS; i++) {
		if (i < n && ct->slot_index[i] != NO_INDEX && slot_release(ct->slot_index[i], ct->slot[i]))
			count_in_flight(ct->slot[i] & SLOT_COUNT_MASK, -1);
	}
	return 0;
}

/* Defers the slots of a connection's limits, as its handshake was not completed. */
__noinline int start_deferral(const struct conn *ct, __u64 now)
{
	if (!ct || ct->hints & PATH_UNCONFIRMED)
		return 0;
	for (int i = 0; i < MAX_CONN_SLOTS; i++) {
		__u32 id = ct->slot[i] % MAX_LIMIT_IDS;
		__u64 *until = bpf_map_lookup_elem(&defer_until, &id);

		if (until && ct->slot[i])
			*(volatile __u64 *)until = now + defer_duration;
	}
	return 0;
}

/* Whether the slots of a limit are deferred. */
static __always_inline int deferral_active(__u32 id, __u64 now)
{
	const __u64 *until = bpf_map_lookup_elem(&defer_until, &id);

	return until && read_once(until) > now;
}

/* Moves a connection from state old to CLOSED and releases its slots. If its state has changed, it
 * has not expired. */
__noinline int close_conn(struct conn *ct, __u64 old, __u64 flags, __u64 now)
{
	struct conn copy;

	if (!ct)
		return 0;
	__builtin_memcpy(&copy, ct, sizeof(copy));
	*(volatile __u64 *)&ct->last_seen = now;
	for (int i = 0; i < 8; i++) {
		__u64 cur = __sync_val_compare_and_swap(&ct->state, old, old | CLOSED | flags);

		if (cur == old) {
			if (flags == EXPIRED && !(old & ESTABLISHED))
				start_deferral(&copy, now);
			return release_slots(&copy, MAX_CONN_SLOTS);
		}
		if (cur & CLOSED || (cur ^ old) >> START_SHIFT || flags == EXPIRED)
			return 0;
		old = cur;
	}
	return 0;
}

/* Sets and clears flags of a connection that is not closed. Returns its state. */
__noinline __u64 set_conn_flags(struct conn *ct, __u64 hash, __u64 set, __u64 clear)
{
	__u64 old;

	if (!ct)
		return CLOSED;
	old = read_once(&ct->state);
	for (int i = 0; i < 8; i++) {
		__u64 val = (old & ~clear) | set, cur;

		if ((old ^ hash) >> 32)
			return CLOSED; /* reused by another connection */
		if (old & CLOSED || old == val)
			break;
		cur = __sync_val_compare_and_swap(&ct->state, old, val);
		if (cur == old)
			return val;
		old = cur;
	}
	return old;
}

/* Whether a packet is the SYN of an initiator. */
static __always_inline int is_initial_syn(const struct packet *k)
{
	return k->l4 && (k->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
}

/* The sequence number after a segment. */
static __always_inline __u32 end_seq(const struct packet *k)
{
	return k->tcp_seq + k->payload + !!(k->tcp_flags & TCP_SYN) + !!(k->tcp_flags & TCP_FIN);
}

#define MAX_WINDOW (1U << 30) /* the largest window (RFC 7323, section 2.3) */

/* Whether sequence number n is after other. */
static __always_inline int seq_after(__u32 n, __u32 other)
{
	return (__s32)(n - other) > 0;
}

/* A connection that is about to begin, or to be adopted. */
struct new_conn {
	struct tuple tuple;
	struct conn conn;
	__u64 earliest;	   /* a retransmitted SYN leaves no earlier than the first one, ns */
	__u64 depart;	   /* departure time under new_connections, ticks */
	__u64 over_cap;	   /* observed limits that would have refused it */
	__u64 delayed_by;  /* limits that delay it */
	__u32 is_new;	   /* the packet is its first SYN, or establishes it */
	__u32 establishes; /* the packet establishes a connection without slots */
	__u32 stray;	   /* the packet may establish a forgotten connection */
	__u32 deferred;	   /* it begins without slots */
	__u32 fastopen;	   /* deferred, and its responder may not wait for an ACK */
	__u32 insert;	   /* insert it into the map when it is admitted */
	__u32 observe;	   /* admit it regardless of the verdict */
	__u32 adopt;	   /* it began before it was tracked */
	__u32 slots_held;  /* number of slots taken */
	__u32 refused;	   /* refused as a connection, not as a packet */
	__u32 no_rst;	   /* refused silently */
	__u32 last_limit;  /* the limit that sets depart */
};

static __always_inline void clear_new_conn(struct new_conn *nc)
{
	nc->earliest = nc->depart = nc->over_cap = nc->delayed_by = 0;
	nc->is_new = nc->establishes = nc->stray = nc->deferred = nc->fastopen = nc->insert = nc->observe = nc->adopt =
		nc->slots_held = 0;
	nc->refused = nc->no_rst = 0;
}

/* Guesses whether a connection whose beginning was not seen began in the original direction:
 * clients' ports are higher. */
static __always_inline int initiator_guess(const struct tuple *t)
{
	return t->responder_port < t->initiator_port;
}

static __always_inline void make_tuple(const struct packet *k, __u32 dir, struct tuple *t)
{
#pragma unroll
	for (int i = 0; i < 4; i++) {
		t->initiator[i] = dir ? k->destination[i] : k->source[i];
		t->responder[i] = dir ? k->source[i] : k->destination[i];
	}
	t->initiator_port = dir ? k->port : k->source_port;
	t->responder_port = dir ? k->source_port : k->port;
	t->attach_id = cfg.attach_id;
}
