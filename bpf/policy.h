/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What a compiled policy is to the programs: the types that Go fills in, and the
 * maps that hold them.
 *
 * A policy is swapped by one update of the map policies. It is one value of fixed
 * size, and tables of any size in lines of 64 bytes, which hang from it by a slot
 * in the map tables: a program that has fetched the policy sees all of it old, or
 * all of it new. */
#pragma once

#include "leaky.h"

#define MAX_LIMITS 64
#define MAX_PLACES 64  /* attachments */
#define MAX_STATES 256 /* limits that are remembered, in force or not */

/* The words of a key that are hashed. The last one is the meter's number. */
#define KEY_WORDS 17

enum key_field {
	KEY_SOURCE = 1 << 0,
	KEY_ASN = 1 << 1,
	KEY_PORT = 1 << 2,
	KEY_CONNECTION = 1 << 4,
	KEY_ATTACH = 1 << 5,
};

/* Transport protocols, as package shaper numbers them. */
enum protocol {
	PROTOCOL_OTHER,
	PROTOCOL_TCP,
	PROTOCOL_UDP,
	PROTOCOL_ICMP,
	PROTOCOLS,
};

/* A leaky bucket's parameters: what a limit holds its bytes, its packets or its
 * new connections to. mult is 0 where it holds them to nothing. */
struct meter {
	struct rate rate;
	__u64 burst;   /* ticks */
	__u64 most;    /* how much a newcomer inherits and a key can owe: see table.h */
	__u64 hash[2]; /* of the meter, to which a key's words are added */
	__u64 id;      /* marks the meter in the table of buckets, at bit 48; STAYS of the one bucket for all */
	__u64 shift;   /* of calendars: a slot is 2^shift ticks wide */
	__u64 unit;    /* cost of an ordinary unit */
};

enum { METER_BYTES, METER_PACKETS, METER_NEW, METERS };

struct limit {
	struct meter meter[METERS];
	__u64 max_delay;  /* ticks */
	__u64 longest;	  /* the longest max_delay of it and of those that a packet may be under beside it */
	__u64 mark_delay; /* a packet that waits longer is marked CE; ticks */
	__u64 max_wait;	  /* of a new connection; ticks */
	__u32 mask[2][4]; /* of a source: IPv4 as IPv4-mapped, IPv6 */
	__u32 connections;
	__u32 overhead; /* bytes added to a packet's payload */
	__u32 fields;	/* enum key_field */
	__u32 state;	/* index into states */
	__u32 silent;	/* a refused connection gets no RST */
	__u32 pad;
};

/* Segments: numbers cut into ranges, from one start to the next, the first at 0.
 * With no lines every number is in the one range of set. */
struct segments {
	__u64 set;
	__u32 line;  /* the first of the lines; of IPv6 the root above them */
	__u32 lines; /* how many with segments */
	__u32 index; /* the line of starts by the upper 16 bits, or 0; of IPv4 and ports */
	__u32 pad;
};

struct policy {
	__u64 hash[KEY_WORDS][2];  /* random multipliers */
	__u64 protocol[PROTOCOLS]; /* sets of limits, limit i in bit i */
	__u64 place[MAX_PLACES];
	__u64 paced;
	__u64 calendars; /* paced limits whose buckets are calendars */
	__u64 crossed;	 /* those that charge on arrival what others may hold for longer */
	__u64 observed;
	__u64 counted; /* limits with connections or new_connections */
	__u64 blocks;  /* limits that refuse all they match */
	__u64 always;  /* limits that are enforced at attachments that observe too */
	struct segments source4, source6, destination4, destination6, port;
	__u32 slot;	    /* in tables */
	__u32 sets;	    /* the line of the sets that segments name */
	__u32 bucket_lines; /* capacity of the table of buckets */
	__u32 generation;   /* one more than that of the policy before */
	struct limit limit[MAX_LIMITS];
};

/* A line of a table. */
struct line {
	__u64 word[8];
};

#define SEGMENTS4 5 /* a line holds so many */
#define SEGMENTS6 2

struct line4 {
	__u32 start[SEGMENTS4];
	__u32 asn[SEGMENTS4];
	__u32 set[SEGMENTS4];
	__u32 used;
};

struct line6 {
	__u64 start[SEGMENTS6][2];
	__u32 asn[SEGMENTS6];
	__u32 set[SEGMENTS6];
	__u64 used;
	__u64 pad;
};

/* The starts of the four lines below a line. */
struct node6 {
	__u64 start[4][2];
};

/* For these to be written out in the type information, which Go's types are made
 * from. */
const struct line *unused_line __attribute__((unused));
const struct line4 *unused_line4 __attribute__((unused));
const struct line6 *unused_line6 __attribute__((unused));
const struct node6 *unused_node6 __attribute__((unused));

struct policy_map {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct policy);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct policy_map);
} policies SEC(".maps");

struct table_map {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_INNER_MAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct line);
};

/* One slot is in force; the next policy goes to another. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 3);
	__type(key, __u32);
	__array(values, struct table_map);
} tables SEC(".maps");
