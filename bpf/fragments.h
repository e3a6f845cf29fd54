/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Fragments: the first one of a datagram leaves its ports for the rest, which has none.
 *
 * Who sends fragments may lie. A first one that the receiver never gets, for its time to
 * live or whatever else, may say other ports than the one that it does get, before it or
 * behind it. So none is believed for good: what the rest was charged is kept, a first one
 * that says something else pays that as well, and from then on the rest is under the limits
 * of all ports. A rest whose first is not known is so from the start. Identifications come
 * round: what is kept holds for as long as receivers wait. */
#pragma once

#include "packet.h"

struct fragment {
	__u32 source[4];
	__u32 destination[4];
	__u32 id;
	__u32 transport; /* of IPv4. That of IPv6 is in the first one alone (RFC 8200, section 4.5) */
};

struct datagram {
	__u64 until; /* ns; then nobody waits for the rest of it */
	__u32 ports;
	__u32 paid; /* bytes of the rest, under these ports; as many as a datagram may have, or a little more */
	__u8 transport;
	__u8 disputed; /* first ones differ, or one did not show its ports */
	__u16 pad;
};

/* Many times those for which Linux has memory at once (ipfrag_high_thresh, 4 MiB). */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct fragment);
	__type(value, struct datagram);
} fragments SEC(".maps");

#define REASSEMBLY (60ULL * 1000 * 1000 * 1000) /* ns: RFC 8200, section 4.5; Linux waits 30 s for IPv4 */

/* Says what is known of a fragment that is not the first. */
static __always_inline void recall(struct parser *p, struct datagram *d, __u64 now)
{
	struct packet *k = &p->packet;

	if (!d || d->disputed) {
		k->unknown = k->ipv4 ? UNKNOWN_PORTS : UNKNOWN_PORTS | UNKNOWN_PROTOCOL;
	} else {
		k->unknown = 0;
		k->transport = d->transport;
		k->source_port = d->ports >> 16;
		k->port = d->ports;
		if (d->paid < 0xffff)
			__sync_fetch_and_add(&d->paid, k->bytes);
	}
	if (d)
		d->until = now + REASSEMBLY;
	k->protocol = protocol_of(k->transport);
	/* It may say another half of a TCP header (RFC 3128). */
	k->hidden = p->carried.offset == 1 && (k->unknown & UNKNOWN_PROTOCOL || k->protocol == PROTOCOL_TCP);
}

/* Remembers what a first fragment says, and has it pay what others were charged that said
 * something else. */
static __always_inline void remember(struct packet *k, const struct fragment *key, struct datagram *d, __u64 now)
{
	struct datagram made = {
		.until = now + REASSEMBLY,
		.ports = (__u32)k->source_port << 16 | k->port,
		.transport = k->transport,
		.disputed = !!k->unknown,
	};

	if (!d) {
		bpf_map_update_elem(&fragments, key, &made, BPF_ANY);
		return;
	}
	d->until = made.until;
	if (made.disputed || d->disputed || d->ports != made.ports || d->transport != made.transport) {
		d->disputed = 1;
		k->bytes += d->paid;
	}
}

/* Looks after a fragment. */
__noinline int fragment(struct parser *p)
{
	struct fragment key = {};
	struct datagram *d;
	struct packet *k;
	__u64 now;

	if (!p)
		return 0;
	k = &p->packet;
	k->protocol = protocol_of(k->transport);
	if (k->ipv4 && k->protocol != PROTOCOL_TCP && k->protocol != PROTOCOL_UDP)
		return 0; /* it has no ports */
	__builtin_memcpy(key.source, k->source, sizeof(key.source));
	__builtin_memcpy(key.destination, k->destination, sizeof(key.destination));
	key.id = p->carried.id;
	key.transport = k->ipv4 ? k->transport : 0;
	now = clock_ns();
	d = bpf_map_lookup_elem(&fragments, &key);
	if (d && (__s64)(now - d->until) >= 0) {
		bpf_map_delete_elem(&fragments, &key);
		d = 0;
	}
	if (p->carried.first)
		remember(k, &key, d, now);
	else
		recall(p, d, now);
	return 0;
}
