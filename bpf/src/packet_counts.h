/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets that the programs have seen at each interface. The daemon compares them with the
 * interface's own counters: packets that bypass the programs are not limited. */
#pragma once

#include "config.h"

#define PACKET_COUNTS 16384 /* a power of two */

/* What a program does at an interface. */
enum prog_role {
	LIMIT_PROG,
	REPLY_PROG, /* tracks the replies of counted connections */
};

/* By the low bits of ifindex, direction and role: distant interfaces may share a count. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PACKET_COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} packet_counts SEC(".maps");

static __always_inline void count_packets(__u32 ifindex, __u32 egress, enum prog_role role, __u32 segments)
{
	__u32 i = (ifindex << 2 | egress << 1 | role) & (PACKET_COUNTS - 1);
	__u64 *count = bpf_map_lookup_elem(&packet_counts, &i);

	if (count)
		*count += segments;
}

/* The number of packets on the wire of a GSO packet, at least. */
static __always_inline __u32 wire_packets(const volatile struct __sk_buff *skb)
{
	__u32 segments = skb->gso_segs, size = skb->gso_size;

	return segments ?: size ? skb->len / size : 1;
}
