/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Connections in flight by limit and key: counts, in lines of one cache line each.
 * A key may stand in one of two lines, as in the table of buckets, and a count of 0
 * is room for another key.
 *
 * A word holds a key's tag and its count, so one compare-and-swap checks the cap
 * and takes a slot: there are never more than the cap allows, at no instant and on
 * any number of CPUs. None waits for another.
 *
 * What has to be exact for that is that no key has two words. Both lines have to be
 * free of its tag when it gets one, and no single atomic operation can see to that.
 * So a newcomer first claims a word, with its CPU's number in the place of a count,
 * then looks at both lines, and turns the claim into a count of 1 when it is alone.
 * Of two who claim at the same time, one claims before the other looks. Who sees
 * another's claim does not go on before it is gone: it waits for it when it stands
 * first and takes it away when it stands later, or when it has waited for long. A
 * claim is like no other, so nobody mistakes another's for its own. */
#pragma once

#include "policy.h"
#include "table.h"

#define SLOT_WORDS 8
#define SLOT_BITS 21
#define SLOT_COUNT ((1ULL << SLOT_BITS) - 1)
#define SLOT_MOST (1ULL << 20) /* the highest cap; what is above is a claim */

struct slot_line {
	__u64 word[SLOT_WORDS]; /* tag << SLOT_BITS | count */
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

/* The number of the lowest bit of a set that is not empty (Leiserson, Prokop and
 * Randall, "Using de Bruijn sequences to index a 1 in a computer word", 1998). */
static const __u8 lowest_bit[64] = {
	0,  1,	2,  53, 3,  7,	54, 27, 4,  38, 41, 8,	34, 55, 48, 28, 62, 5,	39, 46, 44, 42,
	22, 9,	24, 35, 59, 56, 49, 18, 29, 11, 63, 52, 6,  26, 37, 40, 33, 47, 61, 45, 43, 21,
	23, 58, 17, 10, 51, 25, 36, 32, 60, 20, 57, 16, 50, 31, 19, 15, 30, 14, 13, 12,
};

static __always_inline __u32 lowest(__u64 set)
{
	return lowest_bit[((set & -set) * 0x022fdd63cc95386dULL) >> 58];
}

/* What the words of a line are to a tag, a bit each. */
struct words {
	__u32 held;    /* the tag's, with a count */
	__u32 claimed; /* for the tag */
	__u32 free;
};

/* Looks at a line, without a branch: the verifier would follow each one's both ways, and
 * all their combinations. Returns a struct words of 8 bits
 * each, above them the number of free words, or ~0. */
__noinline __u64 see_words(__u32 line, __u64 tag)
{
	const struct slot_line *l = bpf_map_lookup_elem(&conn_slots, &line);
	__u64 words = 0;

	if (!l)
		return ~0ULL;
#pragma unroll
	for (int i = 0; i < SLOT_WORDS; i++) {
		__u64 word = load_word(&l->word[i]), count = word & SLOT_COUNT;
		__u64 other = (word ^ tag) >> SLOT_BITS;
		__u64 same = (other | -other) >> 63 ^ 1;
		__u64 some = (count | -count) >> 63;
		__u64 claim = (SLOT_MOST - count) >> 63;

		hide(same);
		words += (same & some & ~claim) << i;
		words += (same & claim) << (i + 8);
		words += (some ^ 1) << (i + 16);
		words += (some ^ 1) << 24;
		hide(words);
	}
	return words;
}

static __always_inline __u64 *slot_at(__u32 place)
{
	__u32 line = place / SLOT_WORDS;
	struct slot_line *l = bpf_map_lookup_elem(&conn_slots, &line);

	return l ? &l->word[place % SLOT_WORDS] : 0;
}

/* Changes the word at a place, if it is was. */
static __always_inline int slot_swap(__u32 place, __u64 was, __u64 is)
{
	__u64 *word = slot_at(place);

	return word && __sync_val_compare_and_swap(word, was, is) == was;
}

enum slot_result {
	SLOT_AGAIN,
	SLOT_TAKEN,
	SLOT_FULL,    /* the key has as many as it may */
	SLOT_NO_ROOM, /* both lines are full of other keys */
	SLOT_LOST,    /* other CPUs were always faster */
};

#define SLOT_TRIES 64
#define SLOT_PATIENCE 32 /* tries before another's claim is taken away */

#define slot_answer(result, place) ((__u64)(result) << 32 | (__u32)(place))

/* One try to take a slot for a tag that may have cap of them. try is which one it
 * is, above 32 bits for the place claimed in an earlier one, or NOWHERE. Returns
 * an enum slot_result, above 32 bits for the place of the slot or of the claim. */
__noinline __u64 slot_try(__u64 tag, __u32 first, __u32 second, __u32 cap, __u64 try)
{
	__u64 claim = tag | (SLOT_MOST + 1 + bpf_get_smp_processor_id()), *word, was;
	__u64 a = see_words(first, tag), b = first == second ? 0 : see_words(second, tag);
	__u32 place, mine = try, tries = try >> 32, i;
	struct words seen = {
		.held = (a & 0xff) | (b & 0xff) << 8,
		.claimed = (a >> 8 & 0xff) | (b & 0xff00),
		.free = b >> 24 > a >> 24 ? b >> 8 & 0xff00 : a >> 16 & 0xff,
	};

	if (a == ~0ULL || b == ~0ULL)
		return slot_answer(SLOT_LOST, NOWHERE);
	if (seen.held) {
		if (mine != NOWHERE)
			slot_swap(mine, claim, tag);
		i = lowest(seen.held);
		place = (i < SLOT_WORDS ? first : second) * SLOT_WORDS + i % SLOT_WORDS;
		word = slot_at(place);
		if (!word)
			return slot_answer(SLOT_LOST, NOWHERE);
		was = load_word(word);
		if ((was ^ tag) >> SLOT_BITS || !(was & SLOT_COUNT) || (was & SLOT_COUNT) > SLOT_MOST)
			return slot_answer(SLOT_AGAIN, NOWHERE);
		if ((was & SLOT_COUNT) >= cap)
			return slot_answer(SLOT_FULL, NOWHERE);
		if (__sync_val_compare_and_swap(word, was, was + 1) == was)
			return slot_answer(SLOT_TAKEN, place);
		return slot_answer(SLOT_AGAIN, NOWHERE);
	}

	if (mine == NOWHERE) {
		if (seen.claimed && tries < SLOT_PATIENCE)
			return slot_answer(SLOT_AGAIN, NOWHERE); /* it will have a count soon */
		if (!seen.free)
			return slot_answer(SLOT_NO_ROOM, NOWHERE);
		i = lowest(seen.free);
		place = (i < SLOT_WORDS ? first : second) * SLOT_WORDS + i % SLOT_WORDS;
		word = slot_at(place);
		if (!word)
			return slot_answer(SLOT_LOST, NOWHERE);
		was = load_word(word);
		if (was & SLOT_COUNT || __sync_val_compare_and_swap(word, was, claim) != was)
			return slot_answer(SLOT_AGAIN, NOWHERE);
		return slot_answer(SLOT_AGAIN, place);
	}

	i = mine % SLOT_WORDS + (mine / SLOT_WORDS == first ? 0 : SLOT_WORDS);
	if (!(seen.claimed >> i & 1))
		return slot_answer(SLOT_AGAIN, NOWHERE); /* taken away */
	seen.claimed ^= 1U << i;
	if (!seen.claimed) {
		if (slot_swap(mine, claim, tag | 1))
			return slot_answer(SLOT_TAKEN, mine);
		return slot_answer(SLOT_AGAIN, NOWHERE);
	}
	if (lowest(seen.claimed) > i || tries >= SLOT_PATIENCE) {
		i = lowest(seen.claimed);
		word = slot_at((i < SLOT_WORDS ? first : second) * SLOT_WORDS + i % SLOT_WORDS);
		if (!word)
			return slot_answer(SLOT_AGAIN, mine);
		was = load_word(word);
		if (!((was ^ tag) >> SLOT_BITS) && (was & SLOT_COUNT) > SLOT_MOST)
			__sync_val_compare_and_swap(word, was, tag);
	}
	return slot_answer(SLOT_AGAIN, mine);
}

/* Takes a slot for the key of a hash, which may have cap of them. Returns an enum
 * slot_result, above 32 bits for the slot's place. */
__noinline __u64 slot_take(__u64 hash, __u32 cap)
{
	__u32 first = (hash >> 32) * slot_lines >> 32;
	__u32 second = (hash * 0x9e3779b97f4a7c15ULL >> 32) * slot_lines >> 32;
	__u64 answer = NOWHERE, tag = hash << SLOT_BITS;

	if (cap > SLOT_MOST)
		cap = SLOT_MOST;
	for (__u64 i = 0; i < SLOT_TRIES; i++) {
		answer = slot_try(tag, first, second, cap, i << 32 | (answer & ~0U));
		if (answer >> 32)
			return answer;
	}
	slot_swap(answer, tag | (SLOT_MOST + 1 + bpf_get_smp_processor_id()), tag);
	return slot_answer(SLOT_LOST, NOWHERE);
}

/* Gives back a slot of tag, which is the upper bits of a word, at a place. */
__noinline int slot_release(__u32 place, __u64 tag)
{
	__u64 *word = slot_at(place), was;

	if (!word)
		return 0;
	was = load_word(word);
	for (int i = 0; i < 16; i++) {
		__u64 seen;

		if ((was ^ tag) >> SLOT_BITS || !(was & SLOT_COUNT) || (was & SLOT_COUNT) > SLOT_MOST)
			return 0; /* none is taken: it was repaired */
		seen = __sync_val_compare_and_swap(word, was, was - 1);
		if (seen == was)
			return 1;
		was = seen;
	}
	/* Others change the count all the time, and none can make it 0 as long as
	 * this slot is in it. */
	__sync_fetch_and_sub(word, 1);
	return 1;
}
