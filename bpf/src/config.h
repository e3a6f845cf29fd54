/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The configuration of one attachment, the same at all its interfaces, and the clock. */
#pragma once

#include "leaky.h"

enum mode {
	MODE_SHAPE,
	MODE_POLICE,
	MODE_OBSERVE,
};

struct config {
	__u32 attach_id; /* index into policy.attachment */
	enum mode mode;
	__u32 ethernet; /* packets begin with an Ethernet header */
	__u32 keep;	/* keep enforcing when the daemon is gone */
	__u32 egress;
	__u32 min_generation; /* generation of the first policy to enforce */
	__u64 idle_timeout;   /* of TCP connections, ns */
	__u32 max_limits;     /* most limits that match one packet */
	__u32 queue_limit;    /* packets that an interface's queue may hold; 0 in tests without a queue */
};

const volatile struct config cfg;

/* The ifindex of a packet's interface. After an ifb redirect, the program runs at another one. */
static __always_inline __u32 ifindex_of(const volatile struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex, ingress = skb->ingress_ifindex;

	barrier_var(ifindex); /* read both: the verifier requires fixed offsets */
	barrier_var(ingress);
	return cfg.mode == MODE_SHAPE && !cfg.egress ? ingress : ifindex;
}

/* For tests only: they set the time and read the decision. */
const volatile __u32 under_test;
volatile __u64 test_now;
volatile __u64 test_suspended; /* ns that the machine was suspended */

/* The current time, in ns and in ticks. */
static __always_inline __u64 now_ns(void)
{
	return under_test ? test_now : bpf_ktime_get_ns();
}

static __always_inline __u64 now_ticks(void)
{
	return now_ns() * TICKS_PER_NANO;
}

/* The current time by CLOCK_BOOTTIME, in ticks. */
static __always_inline __u64 boot_ticks(void)
{
	return (under_test ? test_now + test_suspended : bpf_ktime_get_boot_ns()) * TICKS_PER_NANO;
}
