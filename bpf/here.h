/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the programs of an attachment know of it, at whatever interface they are, and the
 * time there. */
#pragma once

#include "leaky.h"

enum mode {
	MODE_SHAPE,
	MODE_POLICE,
	MODE_OBSERVE,
};

struct attachment {
	__u32 place; /* in policy.place */
	__u32 mode;
	__u32 ethernet; /* packets begin with an Ethernet header */
	__u32 keep;	/* goes on when the daemon is gone */
	__u32 egress;
	__u32 since;	    /* generation of the first policy that is enforced */
	__u64 idle_timeout; /* of TCP connections, ns */
	__u32 limits;	    /* that a packet may be under */
	__u32 queue;	    /* packets that an interface's queue may hold; 0 in tests that have none */
};

const volatile struct attachment here;

/* The interface of a packet. Behind a detour that is not the one where the program is. */
static __always_inline __u32 interface_of(const volatile struct __sk_buff *skb)
{
	__u32 at = skb->ifindex, from = skb->ingress_ifindex;

	hide(at); /* both are read: the verifier wants each at a fixed place */
	hide(from);
	return here.mode == MODE_SHAPE && !here.egress ? from : at;
}

/* Set for tests alone, which give the time and want to see the decision. */
const volatile __u32 under_test;
volatile __u64 test_now;

/* Now, in ns and in ticks. */
static __always_inline __u64 clock_ns(void)
{
	return under_test ? test_now : bpf_ktime_get_ns();
}

static __always_inline __u64 clock(void)
{
	return clock_ns() * TICKS_PER_NANO;
}
