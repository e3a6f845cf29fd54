/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The compiled policy: the types that Go fills in, and the maps that hold them.
 *
 * One update of the map policies swaps the policy. It has a part of fixed size, and tables of any
 * size in lines of 64 bytes, in the entry of the map tables that it names: a program that has
 * looked up the policy sees either all of the old one or all of the new one. */
#pragma once

#include "leaky.h"

#define MAX_LIMITS 64
#define MAX_ATTACHMENTS 64
#define MAX_MARK_MASKS 4
#define DSCPS 64
#define MAX_CGROUPS 32	  /* of which a policy has half, so that the next one has room */
#define MAX_LIMIT_IDS 256 /* limits with saved state, in the current policy or not */

/* Hashed words of a key. The last one is the meter's number. */
#define KEY_WORDS 18

enum key_field {
	KEY_SOURCE = 1 << 0,
	KEY_ASN = 1 << 1,
	KEY_PORT = 1 << 2,
	KEY_CONNECTION = 1 << 4,
	KEY_ATTACH = 1 << 5,
	KEY_DESTINATION = 1 << 6,
	KEY_COUNTRY = 1 << 8,
};

/* Transport protocols, numbered as in package shaper. */
enum protocol {
	PROTOCOL_OTHER,
	PROTOCOL_TCP,
	PROTOCOL_UDP,
	PROTOCOL_ICMP,
	PROTOCOLS,
};

/* The parameters of a leaky bucket, for a limit's bytes, packets or new connections. rate.mult is
 * 0 where it has no such rate. */
struct meter {
	struct rate rate;
	__u64 burst;	      /* ticks */
	__u64 backlog_bounds; /* bounds of a new key's backlog and of any key's: see max_backlog */
	__u64 hash[2];	      /* of the meter, plus a key's words */
	__u64 tag; /* the meter's number at TAG_METER_SHIFT of a bucket's tag; with TAG_PINNED where all keys share one bucket, and TAG_SHARED where hosts share the limit */
	__u64 slot_shift; /* of calendars: a slot is 2^slot_shift ticks wide */
	__u64 unit;	  /* cost of an ordinary unit, ticks */
	__u64 window;	  /* of new connections: length of fixed windows, ticks; 0 for a leaky bucket */
};

enum meter_index { METER_BYTES, METER_PACKETS, METER_NEW, METERS };

struct limit {
	struct meter meter[METERS];
	__u64 max_delay;     /* ticks */
	__u64 longest_delay; /* the largest max_delay of all limits that may match the same packet */
	__u64 mark_delay;    /* a packet that waits longer is marked CE; ticks */
	__u64 queue_timeout; /* of new connections, ticks */
	__u32 mask[2][4];    /* of the address in keys: IPv4 as IPv4-mapped, IPv6 */
	__u32 max_connections;
	__u32 overhead;	  /* bytes added to a packet's payload */
	__u32 key_fields; /* enum key_field */
	__u32 id;	  /* limit ID: index into limit_counters and others, and the same in later policies */
	__u32 no_rst;	  /* drop a refused SYN, do not answer with an RST */
	__u32 shared;	  /* between hosts */
};

/* Numbers divided into segments, from one start to the next, the first at 0. With no lines, all
 * numbers are in one segment, with this set of limits. */
struct segments {
	__u64 set;
	__u32 line;  /* the first line; of IPv6 the root of the tree above them */
	__u32 lines; /* number of lines with segments */
	__u32 index; /* of IPv4 and ports: first line of the index by the upper 16 bits, or 0 */
	__u32 pad;
};

/* The limits by the bits of a packet's mark in one mask. */
struct mark_mask {
	struct segments values; /* of limits that match marks */
	__u32 mask;
	__u32 pad;
};

struct policy {
	__u64 hash[KEY_WORDS][2];  /* random multipliers */
	__u64 protocol[PROTOCOLS]; /* sets of limits, limit i in bit i */
	__u64 attachment[MAX_ATTACHMENTS];
	__u64 paced;
	__u64 calendars;	 /* paced limits with calendars for buckets */
	__u64 charge_on_arrival; /* paced limits that charge on arrival: others may delay their packets for longer */
	__u64 observed;
	__u64 counted;		   /* limits with max_connections or new_connections */
	__u64 blocks;		   /* limits that refuse everything they match */
	__u64 shared;		   /* limits that hosts share */
	__u64 always_enforced;	   /* limits that attachments enforce even if they observe */
	__u64 country_keys;	   /* limits with KEY_COUNTRY */
	__u64 by_mark;		   /* limits that match marks */
	__u64 by_cgroup;	   /* limits that match control groups */
	__u64 cgroup[MAX_CGROUPS]; /* by number: sets of these limits */
	__u64 by_packet;   /* limits that match marks, DSCPs or control groups: not all packets of a connection */
	__u64 dscp[DSCPS]; /* by codepoint: sets of limits */
	struct mark_mask mark_mask[MAX_MARK_MASKS];
	__u32 mark_masks; /* how many are in use */
	__u32 pad;
	struct segments source4, source6, destination4, destination6, port;
	struct segments country4, country6; /* of sources, in place of ASNs */
	__u32 table;			    /* index into tables */
	__u32 sets;			    /* first line of the sets that segments refer to */
	__u32 bucket_lines;		    /* capacity of the table of buckets */
	__u32 generation;		    /* one more than that of the previous policy */
	struct limit limit[MAX_LIMITS];
};

/* A line of a table. */
struct line {
	__u64 word[8];
};

#define SEGMENTS4 5 /* per line */
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

/* The starts of the four lines below a node. */
struct node6 {
	__u64 start[4][2];
};

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

/* One entry is current; the next policy's tables go into another one. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 3);
	__type(key, __u32);
	__array(values, struct table_map);
} tables SEC(".maps");
