/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Slots: the connections in flight by limit and key. They are counts in lines of one cache line
 * each. A key has one of two lines, as in the table of buckets, and a word with a count of 0 is
 * free.
 *
 * A word holds a key's tag and its count, so one compare-and-swap checks the cap and takes a slot:
 * the cap is never exceeded, at any instant and on any number of CPUs. It is lock-free.
 *
 * That requires that a key never has two words. Neither line may have its tag when it gets a word,
 * which no single atomic operation can ensure. So a new key first claims a word, with its CPU's
 * number in the place of the count, then scans both lines, and turns the claim into a count of 1
 * if it is the only one. Of two concurrent claims, one precedes the other's scan. A CPU that sees
 * another claim does not continue before that is gone: it waits if the other one is first in the
 * lines, and removes it if it is later, or after many tries. Claims of different CPUs differ, so
 * none is mistaken for another. */
#pragma once

#include "policy.h"
#include "buckets.h"

#define SLOT_WORDS 8

/* The bits of a word: of the count, then of the tag. */
enum slot_bits {
	SLOT_COUNT_BITS = 21,
};

#define SLOT_COUNT_MASK ((1ULL << SLOT_COUNT_BITS) - 1)
#define SLOT_MAX (1ULL << (SLOT_COUNT_BITS - 1)) /* the highest cap; a higher count is a claim */

struct slot_line {
	__u64 word[SLOT_WORDS]; /* tag << SLOT_COUNT_BITS | count */
};

/* Sized when the programs are loaded. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__type(value, struct slot_line);
} conn_slots SEC(".maps");

const volatile __u32 slot_lines = 1;

/* The index of the lowest bit of a set that is not empty (Leiserson, Prokop and Randall, "Using de
 * Bruijn sequences to index a 1 in a computer word", 1998). */
static const __u8 lowest_bit_table[64] = {
	0,  1,	2,  53, 3,  7,	54, 27, 4,  38, 41, 8,	34, 55, 48, 28, 62, 5,	39, 46, 44, 42,
	22, 9,	24, 35, 59, 56, 49, 18, 29, 11, 63, 52, 6,  26, 37, 40, 33, 47, 61, 45, 43, 21,
	23, 58, 17, 10, 51, 25, 36, 32, 60, 20, 57, 16, 50, 31, 19, 15, 30, 14, 13, 12,
};

static __always_inline __u32 lowest_bit(__u64 set)
{
	return lowest_bit_table[((set & -set) * 0x022fdd63cc95386dULL) >> 58];
}

/* The words of a line by their relation to a tag, one bit each. */
struct line_masks {
	__u32 held;    /* has the tag and a count */
	__u32 claimed; /* has the tag and a claim */
	__u32 free;
};

/* Scans a line, without a branch: the verifier would check all combinations of their outcomes.
 * Returns struct line_masks of 8 bits each, above them the number of free words; or ~0. */
__noinline __u64 scan_line(__u32 line, __u64 tag)
{
	const struct slot_line *l = bpf_map_lookup_elem(&conn_slots, &line);
	__u64 masks = 0;

	if (!l)
		return ~0ULL;
#pragma unroll
	for (int i = 0; i < SLOT_WORDS; i++) {
		__u64 word = read_once(&l->word[i]), count = word & SLOT_COUNT_MASK;
		__u64 other = (word ^ tag) >> SLOT_COUNT_BITS;
		__u64 same = (other | -other) >> 63 ^ 1;
		__u64 used = (count | -count) >> 63;
		__u64 claim = (SLOT_MAX - count) >> 63;

		barrier_var(same);
		masks += (same & used & ~claim) << i;
		masks += (same & claim) << (i + 8);
		masks += (used ^ 1) << (i + 16);
		masks += (used ^ 1) << 24;
		barrier_var(masks);
	}
	return masks;
}

static __always_inline __u64 *slot_at(__u32 index)
{
	__u32 line = index / SLOT_WORDS;
	struct slot_line *l = bpf_map_lookup_elem(&conn_slots, &line);

	return l ? &l->word[index % SLOT_WORDS] : 0;
}

/* Replaces the word at an index, if it is old. */
static __always_inline int slot_cas(__u32 index, __u64 old, __u64 val)
{
	__u64 *word = slot_at(index);

	return word && __sync_val_compare_and_swap(word, old, val) == old;
}

enum slot_result {
	SLOT_RETRY,
	SLOT_TAKEN,
	SLOT_CAP_REACHED, /* the key has no free slot */
	SLOT_LINES_FULL,  /* other keys fill both lines */
	SLOT_CONTENDED,	  /* other CPUs were faster each time */
};

#define SLOT_TRIES 64
#define SLOT_CLAIM_PATIENCE 32 /* tries before another CPU's claim is removed */

#define slot_return(result, index) ((__u64)(result) << 32 | (__u32)(index))

/* Tries once to take a slot for a tag with a cap. attempt is the number of the try, above 32 bits
 * for the index of its claim from an earlier one, or NO_INDEX. Returns an enum slot_result, above
 * 32 bits for the index of the slot or claim. */
__noinline __u64 slot_try(__u64 tag, __u32 first, __u32 second, __u32 cap, __u64 attempt)
{
	__u64 claim = tag | (SLOT_MAX + 1 + bpf_get_smp_processor_id()), *word, old;
	__u64 a = scan_line(first, tag), b = first == second ? 0 : scan_line(second, tag);
	__u32 index, mine = attempt, tries = attempt >> 32, i;
	struct line_masks masks = {
		.held = (a & 0xff) | (b & 0xff) << 8,
		.claimed = (a >> 8 & 0xff) | (b & 0xff00),
		.free = b >> 24 > a >> 24 ? b >> 8 & 0xff00 : a >> 16 & 0xff,
	};

	if (a == ~0ULL || b == ~0ULL)
		return slot_return(SLOT_CONTENDED, NO_INDEX);
	if (masks.held) {
		if (mine != NO_INDEX)
			slot_cas(mine, claim, tag);
		i = lowest_bit(masks.held);
		index = (i < SLOT_WORDS ? first : second) * SLOT_WORDS + i % SLOT_WORDS;
		word = slot_at(index);
		if (!word)
			return slot_return(SLOT_CONTENDED, NO_INDEX);
		old = read_once(word);
		if ((old ^ tag) >> SLOT_COUNT_BITS || !(old & SLOT_COUNT_MASK) || (old & SLOT_COUNT_MASK) > SLOT_MAX)
			return slot_return(SLOT_RETRY, NO_INDEX);
		if ((old & SLOT_COUNT_MASK) >= cap)
			return slot_return(SLOT_CAP_REACHED, NO_INDEX);
		if (__sync_val_compare_and_swap(word, old, old + 1) == old)
			return slot_return(SLOT_TAKEN, index);
		return slot_return(SLOT_RETRY, NO_INDEX);
	}

	if (mine == NO_INDEX) {
		if (masks.claimed && tries < SLOT_CLAIM_PATIENCE)
			return slot_return(SLOT_RETRY, NO_INDEX); /* the claim will become a count soon */
		if (!masks.free)
			return slot_return(SLOT_LINES_FULL, NO_INDEX);
		i = lowest_bit(masks.free);
		index = (i < SLOT_WORDS ? first : second) * SLOT_WORDS + i % SLOT_WORDS;
		word = slot_at(index);
		if (!word)
			return slot_return(SLOT_CONTENDED, NO_INDEX);
		old = read_once(word);
		if (old & SLOT_COUNT_MASK || __sync_val_compare_and_swap(word, old, claim) != old)
			return slot_return(SLOT_RETRY, NO_INDEX);
		return slot_return(SLOT_RETRY, index);
	}

	i = mine % SLOT_WORDS + (mine / SLOT_WORDS == first ? 0 : SLOT_WORDS);
	if (!(masks.claimed >> i & 1))
		return slot_return(SLOT_RETRY, NO_INDEX); /* removed by another CPU */
	masks.claimed ^= 1U << i;
	if (!masks.claimed) {
		if (slot_cas(mine, claim, tag | 1))
			return slot_return(SLOT_TAKEN, mine);
		return slot_return(SLOT_RETRY, NO_INDEX);
	}
	if (lowest_bit(masks.claimed) > i || tries >= SLOT_CLAIM_PATIENCE) {
		i = lowest_bit(masks.claimed);
		word = slot_at((i < SLOT_WORDS ? first : second) * SLOT_WORDS + i % SLOT_WORDS);
		if (!word)
			return slot_return(SLOT_RETRY, mine);
		old = read_once(word);
		if (!((old ^ tag) >> SLOT_COUNT_BITS) && (old & SLOT_COUNT_MASK) > SLOT_MAX)
			__sync_val_compare_and_swap(word, old, tag);
	}
	return slot_return(SLOT_RETRY, mine);
}

/* Takes a slot for the key of a hash, with a cap. Returns an enum slot_result, above 32 bits for
 * the slot's index. */
__noinline __u64 slot_take(__u64 hash, __u32 cap)
{
	__u32 first = (hash >> 32) * slot_lines >> 32;
	__u32 second = (hash * 0x9e3779b97f4a7c15ULL >> 32) * slot_lines >> 32;
	__u64 ret = NO_INDEX, tag = hash << SLOT_COUNT_BITS;

	if (cap > SLOT_MAX)
		cap = SLOT_MAX;
	for (__u64 i = 0; i < SLOT_TRIES; i++) {
		ret = slot_try(tag, first, second, cap, i << 32 | (ret & ~0U));
		if (ret >> 32)
			return ret;
	}
	slot_cas(ret, tag | (SLOT_MAX + 1 + bpf_get_smp_processor_id()), tag);
	return slot_return(SLOT_CONTENDED, NO_INDEX);
}

/* Releases a slot at an index, if the upper bits of the word are those of tag. */
__noinline int slot_release(__u32 index, __u64 tag)
{
	__u64 *word = slot_at(index), old;

	if (!word)
		return 0;
	old = read_once(word);
	for (int i = 0; i < 16; i++) {
		__u64 cur;

		if ((old ^ tag) >> SLOT_COUNT_BITS || !(old & SLOT_COUNT_MASK) || (old & SLOT_COUNT_MASK) > SLOT_MAX)
			return 0; /* none is taken: the daemon has repaired it */
		cur = __sync_val_compare_and_swap(word, old, old - 1);
		if (cur == old)
			return 1;
		old = cur;
	}
	/* Other CPUs keep changing the count, but it cannot reach 0 while it includes this slot. */
	__sync_fetch_and_sub(word, 1);
	return 1;
}
