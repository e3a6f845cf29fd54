/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The time of the buckets of shared limits, for the table of buckets: it compares them with others. It is
 * read once for a new key. */
#pragma once

#include "share.h"
#include "tag.h"

#define MAX_STRETCH 6

/* The time of buckets of shared limits, as far as the table needs it. */
struct shared_clock {
	__u64 at; /* the instant, in ticks of the other buckets */
	__u64 now;
	__u64 parts;
	__u64 stretch; /* the power of two by which it goes by more slowly, at most MAX_STRETCH */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct shared_clock);
} shared_clocks SEC(".maps");

/* Sets the CPU's clock of shared limits, at now: that of the packet, which may have passed a while ago. */
__noinline int set_shared_clock(__u64 now)
{
	__u64 boot = boot_ticks();
	__u32 zero = 0;
	struct shared_clock *clock = bpf_map_lookup_elem(&shared_clocks, &zero);
	__u64 floor = 0;
	struct terms *t = load_terms(NO_HOT);

	if (clock)
		clock->at = now;
	if (!clock || !t)
		return 0;
	advance_terms(t, boot - now_ticks() + now, 0, &floor);
	clock->now = t->share.vtime;
	clock->parts = t->share.parts;
	clock->stretch = 0;
	for (int i = 0; i < MAX_STRETCH; i++)
		clock->stretch += t->share.parts << i < 1 << SHARE_SHIFT;
	return 0;
}

static __always_inline struct shared_clock *get_shared_clock(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&shared_clocks, &zero);
}

/* The value of a bucket with a tag, of a shared limit, that has drained by now: the credit of the whole
 * burst that it may have is left. */
static __always_inline __u64 shared_drained(const struct shared_clock *clock, __u64 tag)
{
	__u32 meter = tag_meter(tag) - 1;
	const __u64 *burst = bpf_map_lookup_elem(&shared_bursts, &meter);

	return time_sub(clock->now, burst ? share_scale(read_once(burst), clock->parts) : 0);
}

/* When a bucket of a shared limit drains, about; not before the clock was set. */
static __always_inline __u64 shared_drain_time(__u64 tag, __u64 value)
{
	const struct shared_clock *clock = get_shared_clock();

	return clock ? clock->at + (time_sub(value, shared_drained(clock, tag)) << (clock->stretch & 7)) : ~0ULL;
}

/* The virtual time from which a bucket with a tag is charged if nothing is left in it. */
__noinline __u64 bucket_base(__u64 tag, __u64 now)
{
	const struct shared_clock *clock = get_shared_clock();

	if (!(tag & TAG_SHARED))
		return now;
	return clock ? time_max(floor_of(NO_HOT, tag_meter(tag)), shared_drained(clock, tag)) : ~0ULL;
}

/* The value at which a bucket of a shared limit begins that inherits a backlog, but no more than most. */
static __always_inline __u64 shared_start(__u64 tag, __u64 backlog, __u64 most)
{
	const struct shared_clock *clock = get_shared_clock();

	if (!clock)
		return ~0ULL;
	return shared_drained(clock, tag) + time_min(backlog >> (clock->stretch & 7), share_scale(most, clock->parts));
}
