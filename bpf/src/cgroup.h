/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Control groups of the processes that packets are from: their sockets know. */
#pragma once

#include "policy.h"

/* By number, see struct policy. The daemon replaces a control group that was removed and created again. */
struct {
	__uint(type, BPF_MAP_TYPE_CGROUP_ARRAY);
	__uint(max_entries, MAX_CGROUPS);
	__type(key, __u32);
	__type(value, __u32);
} cgroups SEC(".maps");

/* Returns the limits that match the control group of a packet's process, or a group above it. A packet without a socket is in
 * none. */
static __noinline __u64 match_cgroups(struct __sk_buff *skb, const struct policy *p)
{
	__u64 set = ~p->by_cgroup;

	for (__u32 i = 0; i < MAX_CGROUPS; i++) {
		if (p->cgroup[i] && bpf_skb_under_cgroup(skb, &cgroups, i) == 1)
			set |= p->cgroup[i];
	}
	return set;
}
