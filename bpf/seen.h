/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* How many packets the programs have seen at each interface. The daemon holds that
 * against what the interface itself says that it moved: what passes by the programs is
 * under no limit. */
#pragma once

#include "here.h"

#define SEEN 16384 /* a power of two */

/* What a program does at an interface. */
enum role {
	LIMITING,
	NOTING, /* what comes back of the connections that are counted */
};

/* By the lower bits of ifindex, side and role: interfaces far apart may share a count. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SEEN);
	__type(key, __u32);
	__type(value, __u64);
} seen SEC(".maps");

static __always_inline void count_seen(__u32 ifindex, __u32 egress, enum role role, __u32 segments)
{
	__u32 i = (ifindex << 2 | egress << 1 | role) & (SEEN - 1);
	__u64 *count = bpf_map_lookup_elem(&seen, &i);

	if (count)
		*count += segments;
}

/* How many packets a train becomes on the wire, at least. */
static __always_inline __u32 segments_of(const volatile struct __sk_buff *skb)
{
	__u32 segments = skb->gso_segs, size = skb->gso_size;

	return segments ?: size ? skb->len / size : 1;
}
