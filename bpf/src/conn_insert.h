/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Insertion of connections. */
#pragma once

#include "conntrack.h"

enum insert_result {
	INSERTED,
	INSERT_EXISTS,
	INSERT_FAILED,
};

/* Reuses the entry of a closed connection with the same tuple. */
static __always_inline int conn_reuse(const struct new_conn *nc, const struct tuple *t)
{
	struct conn *ct = bpf_map_lookup_elem(&connections, t);
	__u64 state, val = nc->conn.state;

	if (!ct)
		return INSERT_FAILED;
	state = read_once(&ct->state);
	if (!(state & CLOSED))
		return INSERT_EXISTS;
	if (state & LOCKED || __sync_val_compare_and_swap(&ct->state, state, state | LOCKED) != state)
		return INSERT_FAILED;
	ct->last_seen = nc->conn.last_seen;
	ct->dst_mac = nc->conn.dst_mac;
	ct->ttl = nc->conn.ttl;
	ct->hints = nc->conn.hints;
	ct->interface = nc->conn.interface;
	ct->idle_timeout = nc->conn.idle_timeout;
#pragma unroll
	for (int i = 0; i < MAX_CONN_SLOTS; i++) {
		ct->slot[i] = nc->conn.slot[i];
		ct->slot_index[i] = nc->conn.slot_index[i];
	}
	ct->next_seq[0] = nc->conn.next_seq[0];
	ct->fin_seq[0] = nc->conn.fin_seq[0];
	if (is_lapsed(state) && state & ~val & SYN_SEEN << 1) {
		/* The responder may still have the state of an earlier SYN. */
		val |= SYN_SEEN << 1;
	} else {
		ct->next_seq[1] = nc->conn.next_seq[1];
		ct->ack[0] = nc->conn.ack[0];
		ct->ack[1] = nc->conn.ack[1];
	}
	return __sync_val_compare_and_swap(&ct->state, state | LOCKED, val) == (state | LOCKED) ? INSERTED
												: INSERT_FAILED;
}

/* Before Linux 6.5 an argument cannot point to a map value to insert, and the stack is too small
 * for it. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct conn);
} staging SEC(".maps");

/* Inserts the connection with the slots that it has taken. */
__noinline int conn_insert(struct new_conn *nc, __u64 flags, __u64 now, __u64 depart)
{
	struct sweep_entry entry = {};
	struct sweeper *sweeper = get_sweeper();
	struct conn *staged;
	__u32 zero = 0;
	int err; /* Linux 6.1 leaves the upper half undefined */

	if (!nc || !sweeper)
		return INSERT_FAILED;
	nc->conn.state = tuple_hash(&nc->tuple) | (__u32)(now << START_SHIFT) | flags;
	nc->conn.last_seen = depart;
	nc->conn.sweep_at = now + recheck_interval;
	nc->conn.idle_timeout = cfg.idle_timeout;
#pragma unroll
	for (__u32 i = 0; i < MAX_CONN_SLOTS; i++) {
		if (i >= nc->slots_held) {
			nc->conn.slot_index[i] = NO_INDEX;
			nc->conn.slot[i] = 0;
		}
	}
	entry.tuple = nc->tuple;
	staged = bpf_map_lookup_elem(&staging, &zero);
	if (!staged)
		return INSERT_FAILED;
	*staged = nc->conn;
	err = bpf_map_update_elem(&connections, &entry.tuple, staged, BPF_NOEXIST);
	if (err)
		return err == -17 /* EEXIST */ ? conn_reuse(nc, &entry.tuple) : INSERT_FAILED;
	__sync_fetch_and_add(&sweeper->connections, 1);
	entry.sweep_at = nc->conn.sweep_at;
	if (!bpf_map_push_elem(&sweep_queue, &entry, 0))
		return INSERTED;
	/* It would never be swept. Cannot happen: the queue has an entry for each. */
	bpf_map_delete_elem(&connections, &entry.tuple);
	__sync_fetch_and_add(&sweeper->connections, -1);
	return INSERT_FAILED;
}
