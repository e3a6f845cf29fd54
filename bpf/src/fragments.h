/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* IP fragments: the first fragment of a datagram has the ports, and the others look them up.
 *
 * A sender may forge fragments. A first fragment that the receiver never gets, because of its TTL
 * for example, may name other ports than the one that arrives, before or after it. So none is
 * trusted for good: the bytes charged to the other fragments are recorded, a first fragment with
 * other ports is charged for them again, and from then on the other fragments match the limits of
 * all ports, as they do when no first one is known. Identifications are reused, so an entry
 * expires when receivers stop reassembly. */
#pragma once

#include "packet.h"

struct fragment_key {
	__u32 source[4];
	__u32 destination[4];
	__u32 id;
	__u32 transport; /* IPv4 only: with IPv6 only the first one has it (RFC 8200, section 4.5) */
};

struct datagram {
	__u64 expires; /* end of reassembly, ns */
	__u32 ports;
	__u32 charged; /* bytes of fragments charged to these ports, at most about one datagram */
	__u8 transport;
	__u8 ambiguous; /* first fragments disagree, or one is too short for its ports */
	__u16 pad;
};

/* Many times the number for which Linux has memory (ipfrag_high_thresh, 4 MiB). */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct fragment_key);
	__type(value, struct datagram);
} fragments SEC(".maps");

#define REASSEMBLY_TIMEOUT (60ULL * 1000 * 1000 * 1000) /* ns, RFC 8200, section 4.5; Linux: 30 s for IPv4 */

/* Completes a fragment other than the first. */
static __always_inline void apply_first(struct parser *p, struct datagram *d, __u64 now)
{
	struct packet *k = &p->packet;

	if (!d || d->ambiguous) {
		k->unknown = k->ipv4 ? UNKNOWN_PORTS : UNKNOWN_PORTS | UNKNOWN_PROTOCOL;
	} else {
		k->unknown = 0;
		k->transport = d->transport;
		k->source_port = d->ports >> 16;
		k->port = d->ports;
		if (d->charged < 0xffff)
			__sync_fetch_and_add(&d->charged, k->bytes);
	}
	if (d)
		d->expires = now + REASSEMBLY_TIMEOUT;
	k->protocol = protocol_of(k->transport);
	/* It may overwrite half of a TCP header (RFC 3128). */
	k->untrackable = p->body.offset == 1 && (k->unknown & UNKNOWN_PROTOCOL || k->protocol == PROTOCOL_TCP);
}

/* Records a first fragment, and charges it for the bytes that were charged to other ports. */
static __always_inline void record_first(struct packet *k, const struct fragment_key *key, struct datagram *d,
					 __u64 now)
{
	struct datagram made = {
		.expires = now + REASSEMBLY_TIMEOUT,
		.ports = (__u32)k->source_port << 16 | k->port,
		.transport = k->transport,
		.ambiguous = !!k->unknown,
	};

	if (!d) {
		bpf_map_update_elem(&fragments, key, &made, BPF_ANY);
		return;
	}
	d->expires = made.expires;
	if (made.ambiguous || d->ambiguous || d->ports != made.ports || d->transport != made.transport) {
		d->ambiguous = 1;
		k->bytes += d->charged;
	}
}

/* Records or completes a fragment. */
__noinline int track_fragment(struct parser *p)
{
	struct fragment_key key = {};
	struct datagram *d;
	struct packet *k;
	__u64 now;

	if (!p)
		return 0;
	k = &p->packet;
	k->protocol = protocol_of(k->transport);
	if (k->ipv4 && k->protocol != PROTOCOL_TCP && k->protocol != PROTOCOL_UDP)
		return 0; /* a protocol without ports */
	__builtin_memcpy(key.source, k->source, sizeof(key.source));
	__builtin_memcpy(key.destination, k->destination, sizeof(key.destination));
	key.id = p->body.id;
	key.transport = k->ipv4 ? k->transport : 0;
	now = now_ns();
	d = bpf_map_lookup_elem(&fragments, &key);
	if (d && (__s64)(now - d->expires) >= 0) {
		bpf_map_delete_elem(&fragments, &key);
		d = 0;
	}
	if (p->body.first)
		record_first(k, &key, d, now);
	else
		apply_first(p, d, now);
	return 0;
}
