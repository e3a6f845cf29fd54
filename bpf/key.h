/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Keys: what of a packet makes one under a limit, and where its bucket stands. */
#pragma once

#include "scratch.h"
#include "table.h"

/* Adds a word of a key to its hash: multilinear hashing, whose upper 32 bits are
 * strongly universal (Lemire and Kaser, "Strongly universal string hashing is
 * fast", 2014). */
#define HASH(word, n)                                                                                                  \
	({                                                                                                             \
		hash[0] += p->hash[n][0] * (word);                                                                     \
		hash[1] += p->hash[n][1] * (word);                                                                     \
	})

/* Hashes what of a packet is in the key of a limit. */
static __always_inline void hash_key(const struct policy *p, const struct limit *l, const struct packet *k,
				     __u64 hash[2])
{
	hash[0] = hash[1] = 0;
	if (l->fields & KEY_SOURCE) {
		if (k->ipv4) { /* the words before are 0 */
			HASH(0xffffULL, 2);
			HASH((__u64)(k->source[3] & l->mask[0][3]), 3);
		} else {
#pragma unroll
			for (int i = 0; i < 4; i++)
				HASH((__u64)(k->source[i] & l->mask[1][i]), i);
		}
	}
	if (l->fields & KEY_ASN)
		HASH((__u64)k->asn, 4);
	if (l->fields & (KEY_PORT | KEY_ATTACH)) {
		__u64 word = (l->fields & KEY_PORT ? k->port : 0) | (__u64)(l->fields & KEY_ATTACH ? here.place + 1 : 0)
									    << 16;

		HASH(word, 5);
	}
	if (l->fields & KEY_CONNECTION) {
#pragma unroll
		for (int i = 0; i < 4; i++) {
			HASH((__u64)k->source[i], 6 + i);
			HASH((__u64)k->destination[i], 10 + i);
		}
		HASH((__u64)k->source_port << 16 | k->port, 14);
		HASH((__u64)k->transport, 15);
	}
}

/* Joins a meter's hash and a key's to one of 64 bits, and mixes them. Multilinear
 * hashes of addresses in a row lie at regular distances, which would crowd some lines
 * of the table with some hashes. */
static __always_inline __u64 join(const struct meter *m, const __u64 hash[2])
{
	__u64 h = ((m->hash[0] + hash[0]) & 0xffffffff00000000ULL) | (m->hash[1] + hash[1]) >> 32;

	h = (h ^ h >> 32) * 0xd6e8feb86659fd93ULL;
	return h ^ h >> 32;
}

static __always_inline __u64 tag_of(const struct meter *m, __u64 hash)
{
	return m->id | (hash & 0xffffffffffffULL);
}

/* The two lines of the table in which the bucket of a key's hash may stand. */
static __always_inline __u32 first_line(const struct policy *p, __u64 hash)
{
	return (hash >> 32) * p->bucket_lines >> 32;
}

static __always_inline __u32 second_line(const struct policy *p, __u64 hash)
{
	return (hash * 0x9e3779b97f4a7c15ULL >> 32) * p->bucket_lines >> 32;
}

/* Returns the place of a meter's bucket in the table. */
static __always_inline __u32 place_of(const struct policy *p, const struct scratch *s, const struct meter *m,
				      __u64 hash)
{
	__u64 tag = tag_of(m, hash);
	__u32 place = find_in(first_line(p, hash), tag);

	if (place == NOWHERE)
		place = find_in(second_line(p, hash), tag);
	if (place == NOWHERE)
		place = table_place(tag, first_line(p, hash), second_line(p, hash), load_word(&s->now), m->most);
	return place;
}
