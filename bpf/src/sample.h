/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Samples of the packets that limits match, which user space scales up to rank the top talkers.
 * They are taken at random intervals, so that no regular traffic can avoid them, and wake up no
 * reader. Samples that do not fit into the ring are dropped and counted. */
#pragma once

#include "scratch.h"

#define SAMPLE_RING_SIZE (256 * 1024) /* bytes */

/* Kinds of samples. Most packets of a flood are refused: those may take half of the ring. */
enum sample_kind { SAMPLE_PASSED, SAMPLE_REFUSED, SAMPLES };

/* The mean interval between samples of each kind, in packets. */
enum sample_interval {
	PASSED_INTERVAL = 64,
	REFUSED_INTERVAL = 16,
};

struct sample {
	__u64 set;   /* limits that match */
	__u64 delay; /* ns; 0 where packets are policed */
	__u32 source[4];
	__u32 destination[4];
	__u32 bytes;
	__u32 segments;
	__u32 asn;
	__u32 generation; /* of the policy */
	__u16 source_port;
	__u16 port;
	__u8 attach_id;
	__u8 transport;
	__u8 refused;
	__u8 observed; /* only observed: it passed */
	__u32 limit;   /* the limit that delayed it longest or refused it, or NO_LIMIT */
	__u32 country;
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, SAMPLE_RING_SIZE);
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

/* Takes a sample of the scratch's packet, and draws the interval to the next one. */
__noinline int take_sample(const struct policy *p, struct scratch *s, __u64 set, __u32 kind)
{
	const struct packet *k;
	struct losses *losses;
	struct sample *out = 0;
	__u32 zero = 0, interval = kind == SAMPLE_PASSED ? PASSED_INTERVAL : REFUSED_INTERVAL, first;

	if (!p || !s || kind >= SAMPLES)
		return 0;
	first = !s->sample_in[kind];
	s->sample_in[kind] = 1 + ((__u64)bpf_get_prandom_u32() * (2 * interval - 1) >> 32);
	if (first)
		return 0; /* the first packet on this CPU only starts the interval */
	if (kind == SAMPLE_PASSED || bpf_ringbuf_query(&samples, BPF_RB_AVAIL_DATA) < SAMPLE_RING_SIZE / 2)
		out = bpf_ringbuf_reserve(&samples, sizeof(*out), 0);
	if (!out) {
		losses = bpf_map_lookup_elem(&sample_losses, &zero);
		if (losses)
			losses->samples[kind]++;
		return 0;
	}
	k = &s->parser.packet;
	*out = (struct sample){
		.set = set,
		.bytes = k->bytes,
		.segments = k->segments,
		.asn = k->asn,
		.country = k->country,
		.generation = p->generation,
		.source_port = k->source_port,
		.port = k->port,
		.attach_id = cfg.attach_id,
		.transport = k->transport,
		.refused = kind == SAMPLE_REFUSED,
		.observed = s->new_conn.observe,
		.limit = s->decision.limit,
	};
	if (kind == SAMPLE_PASSED && cfg.mode != MODE_POLICE)
		out->delay = (s->decision.depart - s->now) / TICKS_PER_NANO;
#pragma unroll
	for (int i = 0; i < 4; i++) {
		out->source[i] = k->source[i];
		out->destination[i] = k->destination[i];
	}
	bpf_ringbuf_submit(out, BPF_RB_NO_WAKEUP);
	return 0;
}

/* Counts down to the next sample, and takes one of the scratch's packet when it is due. set are
 * the limits that match. */
static __always_inline void sample(const struct policy *p, struct scratch *s, __u64 set)
{
	__u32 kind = s->decision.verdict == VERDICT_REFUSE ? SAMPLE_REFUSED : SAMPLE_PASSED;

	if (s->sample_in[kind] > 1)
		s->sample_in[kind]--;
	else
		take_sample(p, s, set, kind);
}
