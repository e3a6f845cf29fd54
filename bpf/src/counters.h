/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Counters of limits, for metrics and logs. */
#pragma once

#include "scratch.h"

#define HIST_BOUNDS 16 /* length of shaper.HistogramBounds */

/* The counters of a limit on one CPU. */
struct counters {
	__u64 admitted[2][2];		   /* at once, delayed: bytes, packets */
	__u64 refused[2];		   /* queue full or blocked: bytes, packets */
	__u64 memory_full[2];		   /* no room in the table: bytes, packets */
	__u64 marked;			   /* packets */
	__u64 delay_hist[HIST_BOUNDS + 1]; /* packets by class of delay, the last one beyond all bounds */
	__u64 delay_sum;		   /* ns */
	__u64 conns_admitted[2];	   /* at once, delayed */
	__u64 conns_over_cap;		   /* SYNs refused */
	__u64 conns_over_rate;
	__u64 conns_memory_full;
	__u64 conns_adopted;			/* began before they were tracked */
	__u64 in_flight;			/* slots taken less slots released on this CPU, may be negative */
	__u64 conn_delay_hist[HIST_BOUNDS + 1]; /* delayed connections by class of delay */
	__u64 conn_delay_sum;			/* ns */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MAX_LIMIT_IDS);
	__type(key, __u32);
	__type(value, struct counters);
} limit_counters SEC(".maps");

static __always_inline struct counters *counters_of(const struct limit *l)
{
	__u32 i = l->id;

	return bpf_map_lookup_elem(&limit_counters, &i);
}

static __always_inline void count_in_flight(__u32 id, __u64 n)
{
	struct counters *s = bpf_map_lookup_elem(&limit_counters, &id);

	if (s) /* atomic: shaperd_uncount may interrupt, or be interrupted */
		__sync_fetch_and_add(&s->in_flight, n);
}

static __always_inline void hist_add(__u64 *bins, __u64 *sum, __u64 ticks)
{
	/* shaper.HistogramBounds, in ns. */
	static const __u64 bounds[HIST_BOUNDS] = {
		100000,	  250000,    500000,	1000000,   2500000,    5000000,	   10000000,   25000000,
		50000000, 100000000, 250000000, 500000000, 1000000000, 2500000000, 5000000000, 10000000000,
	};
	__u64 delay = (ticks + TICKS_PER_NANO - 1) / TICKS_PER_NANO;
	__u64 bin = 0;

#pragma unroll
	for (int i = 0; i < HIST_BOUNDS; i++)
		bin += (bounds[i] - delay) >> 63; /* without a branch: 16 of them make 65,536 paths */
	barrier_var(bin);
	if (bin <= HIST_BOUNDS)
		bins[bin]++;
	*sum += delay;
}

static __always_inline void refuse(struct decision *d, __u32 limit, __u32 reason, __u64 depart)
{
	d->verdict = VERDICT_REFUSE;
	d->reason = reason;
	d->limit = limit;
	d->depart = depart;
}

/* Refuses a packet that more limits match than the program was loaded for. It happens only after a
 * reload, until the program is replaced. */
static __always_inline int too_many_limits(struct scratch *s, __u64 left)
{
	if (left)
		refuse(&s->decision, lowest_bit(left), REASON_MEMORY_FULL, s->now);
	return !!left;
}

/* Counts a refused packet under the limit that refused it. */
__noinline int count_refused(const struct policy *p, const struct scratch *s)
{
	struct counters *cnt;

	if (!p || !s)
		return 0;
	cnt = counters_of(&p->limit[s->decision.limit % MAX_LIMITS]);
	if (!cnt)
		return 0;
	if (s->decision.reason == REASON_CONNECTIONS) {
		cnt->conns_over_cap++;
	} else if (s->decision.reason == REASON_NEW) {
		cnt->conns_over_rate++;
	} else if (s->decision.reason == REASON_QUEUE_FULL || s->decision.reason == REASON_BLOCKED) {
		cnt->refused[0] += s->parser.packet.bytes;
		cnt->refused[1] += s->parser.packet.segments;
	} else if (s->new_conn.refused) {
		cnt->conns_memory_full++;
	} else {
		cnt->memory_full[0] += s->parser.packet.bytes;
		cnt->memory_full[1] += s->parser.packet.segments;
	}
	return 0;
}

/* Counts n times the scratch's packet as admitted, at once or delayed. */
static __always_inline void count_admitted(const struct limit *l, const struct scratch *s, int later, __u64 n)
{
	struct counters *cnt = counters_of(l);

	if (!cnt)
		return;
	cnt->admitted[later][0] += n * s->parser.packet.bytes;
	cnt->admitted[later][1] += n * s->parser.packet.segments;
}

/* Counts a packet under the limits of set, which charge nothing for it. */
__noinline int count_uncharged(const struct policy *p, const struct scratch *s, __u64 set)
{
	if (!p || !s)
		return 0;
	for (int i = 0; i < cfg.max_limits && set; i++, set &= set - 1)
		count_admitted(&p->limit[lowest_bit(set) % MAX_LIMITS], s, 0, 1);
	return 0;
}

/* Counts the packet's delay under the limit that delays it longest, and decides whether to mark
 * it: if it is ECN-capable and the delay is above mark_delay. */
__noinline int count_delay(const struct policy *p, struct scratch *s, __u64 ticks)
{
	const struct limit *l;
	struct counters *cnt;

	if (!p || !s)
		return 0;
	l = &p->limit[s->decision.limit % MAX_LIMITS];
	s->decision.mark = !s->new_conn.observe && ticks > l->mark_delay && is_ect(&s->parser);
	cnt = counters_of(l);
	if (!cnt)
		return 0;
	if (s->decision.mark)
		cnt->marked += s->parser.packet.segments;
	if (cfg.mode != MODE_POLICE)
		hist_add(cnt->delay_hist, &cnt->delay_sum, ticks);
	return 0;
}

/* Counts an admitted connection under the limits of set. */
__noinline int count_admitted_conn(const struct policy *p, const struct scratch *s, __u64 set)
{
	struct counters *cnt;

	if (!p || !s)
		return 0;
	for (int i = 0; i < cfg.max_limits && set; i++, set &= set - 1) {
		__u32 number = lowest_bit(set) % MAX_LIMITS;

		cnt = counters_of(&p->limit[number]);
		if (!cnt)
			return 0;
		cnt->conns_admitted[s->new_conn.delayed_by >> number & 1]++;
	}
	/* Only the limit that delays it longest counts its delay. */
	if (s->new_conn.delayed_by && s->decision.reason == REASON_NEW) {
		cnt = counters_of(&p->limit[s->decision.limit % MAX_LIMITS]);
		if (cnt)
			hist_add(cnt->conn_delay_hist, &cnt->conn_delay_sum, s->decision.depart - s->now);
	}
	return 0;
}
