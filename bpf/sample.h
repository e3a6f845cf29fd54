/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Samples of the packets that are under limits, from which user space ranks who is
 * heavy. It scales them up. They are taken at random distances, so that no regular
 * traffic can keep between them, and wake nobody up. When nobody reads them they are
 * lost, and counted. */
#pragma once

#include "scratch.h"

#define SAMPLE_RING (256 * 1024) /* bytes */

/* Kinds of packets. A flood is mostly refused: that may take half of the ring. */
enum { SAMPLE_PASSED, SAMPLE_REFUSED, SAMPLES };

/* The mean distance between samples of each kind, in packets. */
#define PASSED_DISTANCE 64
#define REFUSED_DISTANCE 16

struct sample {
	__u64 set;    /* limits it is under */
	__u64 waited; /* ns; 0 where packets are policed */
	__u32 source[4];
	__u32 destination[4];
	__u32 bytes;
	__u32 segments;
	__u32 asn;
	__u32 generation; /* of the policy */
	__u16 source_port;
	__u16 port;
	__u8 place;
	__u8 transport;
	__u8 refused;
	__u8 observed; /* and passed nevertheless */
	__u32 limit;   /* that delayed it longest, or refused it, or NO_LIMIT */
	__u32 pad;
};

/* For it to be written out in the type information: see policy.h. */
const struct sample *unused_sample __attribute__((unused));

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, SAMPLE_RING);
} samples SEC(".maps");

struct losses {
	__u64 samples[SAMPLES];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct losses);
} sample_losses SEC(".maps");

/* Takes a sample of the scratch's packet, whose turn it is, and draws the distance to the
 * next. */
__noinline int take_sample(const struct policy *p, struct scratch *s, __u64 set, __u32 kind)
{
	const struct packet *k;
	struct losses *losses;
	struct sample *to = 0;
	__u32 zero = 0, distance = kind == SAMPLE_PASSED ? PASSED_DISTANCE : REFUSED_DISTANCE, first;

	if (!p || !s || kind >= SAMPLES)
		return 0;
	first = !s->until_sample[kind];
	s->until_sample[kind] = 1 + ((__u64)bpf_get_prandom_u32() * (2 * distance - 1) >> 32);
	if (first)
		return 0; /* on this CPU: it is at a distance from it */
	if (kind == SAMPLE_PASSED || bpf_ringbuf_query(&samples, BPF_RB_AVAIL_DATA) < SAMPLE_RING / 2)
		to = bpf_ringbuf_reserve(&samples, sizeof(*to), 0);
	if (!to) {
		losses = bpf_map_lookup_elem(&sample_losses, &zero);
		if (losses)
			losses->samples[kind]++;
		return 0;
	}
	k = &s->parser.packet;
	*to = (struct sample){
		.set = set,
		.bytes = k->bytes,
		.segments = k->segments,
		.asn = k->asn,
		.generation = p->generation,
		.source_port = k->source_port,
		.port = k->port,
		.place = here.place,
		.transport = k->transport,
		.refused = kind == SAMPLE_REFUSED,
		.observed = s->opening.observe,
		.limit = s->decision.limit,
	};
	if (kind == SAMPLE_PASSED && here.mode != MODE_POLICE)
		to->waited = (s->decision.depart - s->now) / TICKS_PER_NANO;
#pragma unroll
	for (int i = 0; i < 4; i++) {
		to->source[i] = k->source[i];
		to->destination[i] = k->destination[i];
	}
	bpf_ringbuf_submit(to, BPF_RB_NO_WAKEUP);
	return 0;
}

/* Takes a sample of the scratch's packet, which is under the limits of set, if it is its
 * turn. */
static __always_inline void sample(const struct policy *p, struct scratch *s, __u64 set)
{
	__u32 kind = s->decision.verdict == VERDICT_REFUSE ? SAMPLE_REFUSED : SAMPLE_PASSED;

	if (s->until_sample[kind] > 1)
		s->until_sample[kind]--;
	else
		take_sample(p, s, set, kind);
}
