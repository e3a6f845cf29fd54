/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Tags of buckets: which meter and key they belong to. */
#pragma once

#include "leaky.h"

/* The bits of a tag: of the key's hash, then of the meter's number. */
enum tag_bits {
	TAG_METER_SHIFT = 48,
	TAG_SHARED_BIT = 62, /* set where hosts share the limit */
	TAG_PINNED_BIT = 63, /* set where the bucket is never evicted */
};

#define TAG_CLAIMED 1ULL /* the tag of an entry that changes owners; no meter has the number 0 */
#define TAG_SHARED (1ULL << TAG_SHARED_BIT)
#define TAG_PINNED (1ULL << TAG_PINNED_BIT)
#define TAG_HASH_MASK ((1ULL << TAG_METER_SHIFT) - 1)

/* Returns the number of the meter that a tag names. */
static __always_inline __u32 tag_meter(__u64 tag)
{
	return (tag & ~(TAG_PINNED | TAG_SHARED)) >> TAG_METER_SHIFT;
}
