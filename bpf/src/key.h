/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Keys: the hash of a packet's key under a limit, and the index of its bucket. */
#pragma once

#include "scratch.h"
#include "buckets.h"

/* Adds a word of a key to its hash. Multilinear hashing: the upper 32 bits are strongly universal
 * (Lemire and Kaser, "Strongly universal string hashing is fast", 2014). */
#define HASH(word, n)                                                                                                  \
	({                                                                                                             \
		hash[0] += p->hash[n][0] * (word);                                                                     \
		hash[1] += p->hash[n][1] * (word);                                                                     \
	})

/* The address of a packet that is in the keys of a limit, if one is. */
static __always_inline const __u32 *key_address(const struct limit *l, const struct packet *k)
{
	return k->source + ((l->key_fields & KEY_DESTINATION) / KEY_DESTINATION * 4);
}

/* Hashes the key of a packet under a limit. */
static __always_inline void hash_key(const struct policy *p, const struct limit *l, const struct packet *k,
				     __u64 hash[2])
{
	hash[0] = hash[1] = 0;
	if (l->key_fields & (KEY_SOURCE | KEY_DESTINATION)) {
		const __u32 *address = key_address(l, k);

		if (k->ipv4) { /* the words before are 0 */
			HASH(0xffffULL, 2);
			HASH((__u64)(address[3] & l->mask[0][3]), 3);
		} else {
#pragma unroll
			for (int i = 0; i < 4; i++)
				HASH((__u64)(address[i] & l->mask[1][i]), i);
		}
	}
	if (l->key_fields & KEY_ASN)
		HASH((__u64)k->asn, 4);
	if (l->key_fields & KEY_COUNTRY)
		HASH((__u64)k->country, 16);
	if (l->key_fields & (KEY_PORT | KEY_ATTACH)) {
		__u64 word = (l->key_fields & KEY_PORT ? k->port : 0) |
			     (__u64)(l->key_fields & KEY_ATTACH ? cfg.attach_id + 1 : 0) << 16;

		HASH(word, 5);
	}
	if (l->key_fields & KEY_CONNECTION) {
#pragma unroll
		for (int i = 0; i < 4; i++) {
			HASH((__u64)k->source[i], 6 + i);
			HASH((__u64)k->destination[i], 10 + i);
		}
		HASH((__u64)k->source_port << 16 | k->port, 14);
		HASH((__u64)k->transport, 15);
	}
}

/* Combines the hashes of a meter and a key to one of 64 bits, and mixes it. Multilinear hashes of
 * consecutive addresses lie at regular distances: without mixing, some hash multipliers would
 * crowd some lines of the table. */
static __always_inline __u64 mix_hash(const struct meter *m, const __u64 hash[2])
{
	__u64 h = ((m->hash[0] + hash[0]) & 0xffffffff00000000ULL) | (m->hash[1] + hash[1]) >> 32;

	h = (h ^ h >> 32) * 0xd6e8feb86659fd93ULL;
	return h ^ h >> 32;
}

static __always_inline __u64 tag_of(const struct meter *m, __u64 hash)
{
	return m->tag | (hash & TAG_HASH_MASK);
}

/* The two lines of the table that may hold the bucket of a hash. */
static __always_inline __u32 first_line(const struct policy *p, __u64 hash)
{
	return (hash >> 32) * p->bucket_lines >> 32;
}

static __always_inline __u32 second_line(const struct policy *p, __u64 hash)
{
	return (hash * 0x9e3779b97f4a7c15ULL >> 32) * p->bucket_lines >> 32;
}

/* Returns the index of a meter's bucket in the table, which is inserted if it is missing. */
static __always_inline __u32 bucket_index(const struct policy *p, const struct scratch *s, const struct meter *m,
					  __u64 hash)
{
	__u64 tag = tag_of(m, hash);
	__u32 index = find_bucket(first_line(p, hash), tag);

	if (index == NO_INDEX)
		index = find_bucket(second_line(p, hash), tag);
	if (index == NO_INDEX)
		index = bucket_get(tag, first_line(p, hash), second_line(p, hash), read_once(&s->now),
				   m->backlog_bounds);
	return index;
}
