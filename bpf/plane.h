/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the programs of all hooks share: where they are attached, and what becomes
 * of a packet there. */
#pragma once

#include "decide.h"

enum mode {
	MODE_SHAPE,
	MODE_POLICE,
	MODE_OBSERVE,
};

/* Where one instance of a program is attached. */
struct attachment {
	__u32 place; /* in policy.place */
	__u32 mode;
	__u32 ethernet; /* packets begin with an Ethernet header */
	__u32 keep;	/* goes on when the daemon is gone */
};

const volatile struct attachment here;

/* Set for tests alone, which give the time and want to see the decision. */
const volatile __u32 under_test;
const volatile __u32 test_sources; /* draw IPv4 sources at random, so many */
volatile __u64 test_now;
volatile struct decision test_decision;
volatile __u32 test_bytes, test_segments;

/* When the daemon was last seen, in ns. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} heartbeats SEC(".maps");

#define GRACE (5ULL * 1000 * 1000 * 1000)

/* Now, in ticks. */
static __always_inline __u64 clock(void)
{
	return (under_test ? test_now : bpf_ktime_get_ns()) * TICKS_PER_NANO;
}

static __always_inline struct scratch *scratch(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&scratches, &zero);
}

/* Decides over the packet whose head is in the scratch, and leaves the decision
 * there. Returns whether there is one that holds. */
static __always_inline int enforce(struct scratch *s, __u32 segments)
{
	__u32 zero = 0;
	void *policies_now = bpf_map_lookup_elem(&policies, &zero);
	const struct policy *p;
	__u64 set, *heartbeat, now;

	if (!policies_now || !parse(&s->parser, here.ethernet))
		return 0;
	s->parser.packet.segments = segments;
	if (test_sources)
		s->parser.packet.source[3] = (__u64)bpf_get_prandom_u32() * test_sources >> 32;
	p = bpf_map_lookup_elem(policies_now, &zero);
	heartbeat = bpf_map_lookup_elem(&heartbeats, &zero);
	if (!p || !heartbeat)
		return 0;
	now = clock();
	if (!here.keep && now / TICKS_PER_NANO > *heartbeat + GRACE)
		return 0;
	set = classify(p, &s->parser.packet, here.place);
	if (!set)
		return 0;
	if (here.mode == MODE_OBSERVE) {
		decide(p, s, set, here.place, now);
		return 0;
	}
	if (set & p->observed)
		decide(p, s, set & p->observed, here.place, now);
	decide(p, s, set & ~p->observed, here.place, now);
	if (under_test) {
		test_decision = s->decision;
		test_bytes = s->parser.packet.bytes;
		test_segments = s->parser.packet.segments;
	}
	return 1;
}
